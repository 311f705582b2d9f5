"""What is refused, and in which words."""

from proxy.simulator.errors import bad_value, missing, no_model, not_readable


def test_a_bad_value_is_named():
    """The sentence of a refused value ends with the field, and with the value where it is told."""
    assert bad_value("No.", "n", 3).body["error"]["message"] == "No. (parameter=n, value=3)"
    assert bad_value("No.", "n").body["error"]["message"] == "No. (parameter=n)"
    assert bad_value("No.").body == {"error": {"message": "No.", "type": "BadRequestError", "param": None, "code": 400}}


def test_an_unknown_model_is_not_found():
    """An unknown model is answered with 404 and the name of the served one."""
    refused = no_model("x", "y")

    assert (refused.status, refused.body["error"]["code"]) == (404, 404)
    assert refused.body["error"]["message"] == "The model `x` does not exist. Valid aliases: y."


def test_problems_are_counted():
    """A body that cannot be read is answered with all its problems."""
    assert not_readable(["a", "b"], "body").body["error"]["message"] == "2 validation errors:\n  a\n  b"
    assert missing("body").body["error"]["message"].startswith("1 validation error:\n  {'type': 'missing'")
