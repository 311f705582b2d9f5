"""The settings of scorers."""

import pytest
from pydantic import ValidationError

from proxy.config.settings import load


def test_a_scorer_has_endpoints_with_the_fields_of_engines():
    """A model and a version are optional; the settings survive the way to a worker."""
    endpoint = {"url": "http://teacher:8000", "api_key": "secret", "max_in_flight": 4}
    settings = load(rescore={"scorers": {"teacher": {"endpoints": [endpoint], "version": "2"}}})
    (scorer,) = settings.rescore.scorers.values()

    assert ("http://teacher:8000", None, "2") == (scorer.endpoints[0].url, scorer.model, scorer.version)
    assert "secret" not in repr(settings)
    assert settings == load(**settings.to_json())


@pytest.mark.parametrize("name", ["policy", "", "a b", "-x", "x" * 65])
def test_a_name_is_short_and_not_that_of_the_policy(name):
    with pytest.raises(ValidationError, match="invalid scorer name"):
        load(rescore={"scorers": {name: {"endpoints": [{"url": "http://a"}]}}})


def test_a_scorer_without_endpoints_is_rejected():
    with pytest.raises(ValidationError, match="endpoints"):
        load(rescore={"scorers": {"teacher": {"endpoints": []}}})
