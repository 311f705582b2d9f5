"""Error responses in vLLM's words."""

from proxy.simulator.errors import invalid_value, missing_field, validation_errors


def test_an_invalid_value_is_named():
    """The message for an invalid value ends with the field, and with the value if there is one."""
    assert invalid_value("No.", "n", 3).body["error"]["message"] == "No. (parameter=n, value=3)"
    assert invalid_value("No.", "n").body["error"]["message"] == "No. (parameter=n)"
    assert invalid_value("No.").body == {
        "error": {"message": "No.", "type": "BadRequestError", "param": None, "code": 400}
    }


def test_problems_are_counted():
    """The error for an invalid body counts and lists all its problems."""
    assert validation_errors(["a", "b"], "body").body["error"]["message"] == "2 validation errors:\n  a\n  b"
    assert missing_field("body").body["error"]["message"].startswith("1 validation error:\n  {'type': 'missing'")
