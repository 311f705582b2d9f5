"""The sections of policies and scorers. tests/config/test_settings.py tests the sections of endpoints."""

import pytest
from pydantic import ValidationError

from proxy.config.engines import PolicySettings, with_default
from proxy.config.settings import load

PLANNER = {"models": ["planner", "planner-*"]}


@pytest.mark.parametrize("name", ["", "-planner", ".planner", "a b", "a/b", "a:b", "a\n", "plän", "p" * 65])
def test_a_policy_name_has_letters_digits_and_three_signs(name):
    """It is part of paths and of the names of announcements."""
    with pytest.raises(ValidationError, match="invalid policy name"):
        load(policies={name: PLANNER})

    assert list(load(policies={"p" * 64: PLANNER, "4b-v1.5_x": {"models": ["x"]}}).policies) == ["p" * 64, "4b-v1.5_x"]


@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ({"default": {"models": ["m"]}}, "policies.default accepts no models"),
        ({"planner": {}}, "policies.planner.models is required"),
        ({"planner": {"models": []}}, "policies.planner.models is required"),
        ({"planner": {"models": [""]}}, "at least 1 character"),
        ({"planner": {"models": "planner"}}, "valid list"),
        ({"planner": {"models": [1]}}, "valid string"),
        ({"planner": {"models": None}}, "valid list"),
        ({"planner": None}, "planner"),
        ({"planner": ["planner"]}, "planner"),
        ({"planner": {**PLANNER, "train": "perhaps"}}, "valid boolean"),
        ({"planner": {**PLANNER, "trained": True}}, "trained"),
        ({"planner": PLANNER, "judge": {"models": ["j", "planner-*"]}}, "'planner-\\*' is listed by the policies 'planner' "),
        (["planner"], "valid dictionary"),
        ({f"p{number}": {"models": [f"m{number}"]} for number in range(33)}, "at most 32"),
    ],
)  # fmt: skip
def test_an_invalid_policy_is_named(policies, named):
    """The policy `default` has the models of no other policy, so it lists none; every other one lists its models."""
    with pytest.raises(ValidationError, match=named):
        load(policies=policies)


def test_policies_are_read_from_the_file_and_from_environment_variables(tmp_path, monkeypatch):
    """Policies keep the order of the file, which decides when patterns overlap; variables add settings of a policy."""
    file = tmp_path / "c.yaml"
    file.write_text("policies: {planner: {models: [planner, planner-*]}, judge: {models: [judge]}}\n")
    monkeypatch.setenv("TOKENTAPE_POLICIES__JUDGE__TRAIN", "false")
    monkeypatch.setenv("TOKENTAPE_POLICIES__CRITIC__MODELS", '["critic"]')
    policies = load(file).policies

    assert {
        "planner": PolicySettings(**PLANNER),
        "judge": PolicySettings(models=["judge"], train=False),
        "critic": PolicySettings(models=["critic"]),
    } == policies
    assert [name for name in policies if name != "critic"] == ["planner", "judge"]


def test_the_default_policy_is_trained_if_no_other_is_configured():
    """`policies.default.train` overrides it."""
    planner = load(policies={"planner": PLANNER}).policies
    trained = load(policies={"planner": PLANNER, "default": {"train": True}}).policies

    assert {name: policy.train for name, policy in with_default({}).items()} == {"default": True}
    assert {name: policy.train for name, policy in with_default(planner).items()} == {"planner": True, "default": False}
    assert {name: policy.train for name, policy in with_default(trained).items()} == {"planner": True, "default": True}


def test_a_scorer_has_endpoints_with_the_fields_of_engines():
    """A model and a version are optional; the settings survive the way to a worker."""
    endpoint = {"url": "http://teacher:8000", "api_key": "secret", "max_in_flight": 4}
    settings = load(rescore={"scorers": {"teacher": {"endpoints": [endpoint], "version": "2"}}})
    (scorer,) = settings.rescore.scorers.values()

    assert (scorer.endpoints[0].url, scorer.model, scorer.version) == ("http://teacher:8000", None, "2")
    assert "secret" not in repr(settings)
    assert settings == load(**settings.to_json())


@pytest.mark.parametrize("name", ["policy", "", "a b", "-x", "x" * 65])
def test_the_name_of_a_scorer_is_short_and_not_the_policys(name):
    with pytest.raises(ValidationError, match="invalid scorer name"):
        load(rescore={"scorers": {name: {"endpoints": [{"url": "http://a"}]}}})


def test_a_scorer_without_endpoints_is_rejected():
    with pytest.raises(ValidationError, match="endpoints"):
        load(rescore={"scorers": {"teacher": {"endpoints": []}}})
