"""Models in Google's format."""

from proxy.protocols.dialects.gemini.models_list import model, models


def test_a_model_has_its_context_window_as_limits():
    """The window of an engine without one is unknown."""
    shown = models([{"id": "org/name", "max_model_len": 4096}, {"id": "other"}])["models"]

    assert ["models/org/name", "models/other"] == [entry["name"] for entry in shown]
    assert (4096, 4096) == (shown[0]["inputTokenLimit"], shown[0]["outputTokenLimit"])
    assert "inputTokenLimit" not in shown[1]
    assert shown[1] == model({"id": "other"})
