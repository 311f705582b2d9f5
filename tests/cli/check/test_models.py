"""Checks of model aliases and tokenizers."""

import pytest
from tests.support.fakes import settings_for
from tests.support.findings import all_findings, graded

from proxy.cli.check import models
from proxy.cli.check.models import check_aliases, check_tokenizer
from proxy.config import settings as config
from proxy.config.engines import EndpointSettings
from proxy.errors import UnprocessableRequest
from proxy.server.listener import simulating
from proxy.simulator.options import Options


async def test_an_alias_of_a_missing_model_is_a_fault_with_the_listed_models(tmp_path):
    aliases = {"gpt-4o": "simulated", "policy": "polcy"}
    async with simulating("127.0.0.1:0", Options()) as url:
        found = await all_findings(settings_for(url, models=aliases, store={"url": f"embedded:{tmp_path / 'store'}"}))

    (fault,) = graded(found)["fault"]
    assert (
        "models 'policy': refers to 'polcy', which no engine lists -> use a model that the engines list (simulated)"
        in fault
    )
    assert "models 'gpt-4o': refers to 'simulated'" in graded(found)["ok"][-1]


def test_an_alias_that_some_engines_do_not_list_is_a_note():
    """Calls go to any of them."""
    (note,) = graded(list(check_aliases({"*": "m"}, {"a": ["m"], "b": ["x"]})))["note"]

    assert "which b does not list" in note


def test_aliases_are_not_checked_without_lists_of_models():
    """An unreachable engine is another finding."""
    assert [] == list(check_aliases({"*": "m"}, {}))


@pytest.mark.parametrize(
    ("refusal", "fix"),
    [
        ("it cannot be loaded: no such folder", "a folder that contains tokenizer.json"),
        ("pip install transformers", ""),
    ],
)
async def test_a_tokenizer_that_cannot_be_loaded_is_a_fault(monkeypatch, refusal, fix):
    """The fix is omitted if the error contains it; tests/upstream/test_tokenizers.py tests the errors."""

    def load(path):
        assert "none/here" == path
        raise UnprocessableRequest(refusal)

    monkeypatch.setattr(models, "load", load)
    finding = await check_tokenizer(EndpointSettings(url="http://127.0.0.1:9", tokenizer="none/here"))

    assert ("fault", refusal) == (finding.grade, finding.seen)
    assert fix in finding.fix


async def test_the_tokenizer_of_each_endpoint_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda _: None)
    async with simulating("127.0.0.1:0", Options()) as url:
        engines = {"endpoints": [{"url": url, "tokenizer": "good/one"}]}
        settings = {"listen": "127.0.0.1:0", "engines": engines, "store": {"url": f"embedded:{tmp_path / 'store'}"}}
        found = graded(await all_findings(config.load(**settings)))

    assert any("tokenizer good/one: loads" in finding for finding in found["ok"])
