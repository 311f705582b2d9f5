"""Readers of stored steps accept contents of any type, size and depth."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

from hypothesis import HealthCheck, Phase, given, settings
from tests.support.any_json import odd_steps, read_back

from proxy.api.control.steps import recorded, step_json
from proxy.export import FORMATS, Fill, Inexpressible
from proxy.export.containers import CONTAINERS
from proxy.protocols.plan import client_response, client_response_bytes
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import versions_of
from proxy.trajectory.drift import explain, find_boundaries
from proxy.trajectory.facts import RolloutFacts, number_of
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.outline import outline
from proxy.trajectory.retokenize import retokenize
from proxy.trajectory.sequence import Options
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1", "g1", reward=1.0, advantages=0.5, metadata={"env_name": "demo"})
FILL = Fill(prompt_length=64, response_length=64)
FAST = {"suppress_health_check": list(HealthCheck), "deadline": None,
        "phases": [Phase.explicit, Phase.reuse, Phase.generate]}  # fmt: skip  # deep values shrink for minutes


@settings(**FAST)
@given(odd_steps())
def test_steps_trees_and_token_texts_can_be_encoded_as_json(steps):
    steps = read_back(steps)
    rollout = Rollout("r1", "b", 1, 1)
    drift = [explain(boundary, "a", "b") for boundary in find_boundaries(grow(steps))]

    assert to_json_bytes(outline(steps, FACTS, drift))
    assert to_json_bytes({"steps": [step_json(step, rollout) for step in steps]})
    for step in steps:
        for choice in step.choices:
            assert len(recorded(step, choice, 0, 5) or ()) <= len(choice.ids)


@settings(**FAST)
@given(odd_steps())
def test_any_policy_version_is_a_number_or_none(steps):
    for versions in versions_of(read_back(steps)).values():
        for _, version in versions:
            assert number_of(version) is None or int(version) == number_of(version)


@settings(**FAST)
@given(odd_steps())
def test_rows_are_written_to_every_container_or_rejected_with_a_reason(steps):
    """In every format. Each row has an entry of its trained steps."""
    steps = read_back(steps)
    for form, include in product(FORMATS.values(), ("exact", "flagged")):
        with suppress(Inexpressible):
            rows = form.rows(FACTS, steps, Options(include=include), FILL)
            for container in CONTAINERS.values():
                writer = container(form)

                assert writer.opening() is not None
                assert len(rows.trained) == len([writer.row(row) for row in rows.rows])
                assert writer.closing({"skipped": rows.skipped}) is not None


@settings(**FAST)
@given(odd_steps())
def test_a_stored_response_is_replayed_or_not_available(steps):
    for step in read_back(steps):
        if step.dialect in ("messages", "responses", "gemini"):
            client_response_bytes(step)
            client_response(step)


class Letters:
    def render(self, messages, tools, *, reply):
        return list(range(len(list(messages))))

    def encode(self, text):
        return [*map(ord, text)]


@settings(**FAST)
@given(odd_steps())
def test_retokenization_accepts_any_step(steps):
    """A step without usable text is unchanged."""
    for step in read_back(steps):
        bare = replace(step, problems=("no_token_ids",))

        assert retokenize(bare, Letters()).step_id == step.step_id
