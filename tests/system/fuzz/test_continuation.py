"""Exact continuation with random rollouts and every chat template: no prompt is wrong."""

from tests.support.bridge_oracle import (
    begins_with_the_recorded_ids,
    ends_as_rendered,
    keeps_the_history,
    not_shown,
    wrong_bridge,
)
from tests.support.continued_rollouts import Rollout
from tests.support.conversation_plans import plans

from proxy.continuation.types import REASONS


async def test_rollouts(fuzz):
    """A prompt that is sent as ids is what was sampled and what the template writes after it; a refusal has a reason."""
    await fuzz(0.05, plans(), check)


def check(plan):
    """Run a rollout, and check the laws of `tests/continuation/test_laws.py`."""
    for boundary in Rollout(plan).run():
        if not boundary.is_continued:
            assert boundary.reason in {*REASONS, "as_it_came", None}, boundary.describe()
            continue
        assert begins_with_the_recorded_ids(boundary), boundary.describe()
        assert ends_as_rendered(boundary), boundary.describe()
        wrong = wrong_bridge(boundary)
        assert wrong is None, f"{wrong}\n{boundary.describe()}"
        if boundary.mode == "faithful":
            assert keeps_the_history(boundary), boundary.describe()
            assert not_shown(boundary) == [], boundary.describe()
