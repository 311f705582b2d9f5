"""Two frameworks before a real vLLM, whose tiny model is told what to say: exact steps, which it scores again as recorded."""

import orjson
import pytest

from tests.system.real_engines.asking import CALL
from tests.system.real_engines.conftest import vllm  # noqa: F401 - a fixture
from tests.system.real_engines.test_conversation import NO_SECOND_END, check_rows, kwargs
from tests.system.real_engines.through import through_proxy

from .recorded import recorded, scores_as_recorded
from .running import PROGRAMS, address, run

FIRM = {"seed": 11, "logit_bias": NO_SECOND_END, **kwargs(preserve=True)}
CALLED, ANSWERED = {"structured_outputs": {"regex": CALL}}, {"stop_token_ids": list(range(0, 4089, 7))}
FIELDS = [orjson.dumps(FIRM | fields).decode() for fields in (CALLED, ANSWERED)]


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize(
    ("file", "dialect"), [("forced_agents.py", "responses"), ("forced_pydantic.py", "messages")], ids=str
)
async def test_a_framework_before_a_real_engine_is_recorded_exactly(file, dialect, vllm, environment, http, tmp_path):  # noqa: F811
    """A call of a tool and an answer to its result: the tool saw the call that was sampled, and the agent the answer."""
    async with through_proxy(vllm.url, tmp_path, models={"*": "tiny"}) as proxy:
        where = address(proxy.url, "r1")
        printed = await run("main", PROGRAMS / file, *FIELDS, where=where, environment=environment, folder=tmp_path)
        found, rows = await recorded(http, proxy.url, "r1"), await proxy.rows("r1")
        free = tmp_path / "rows.ndjson"
        free.write_bytes(orjson.dumps(answer_of(rows, found.steps[1]["step_id"])))
        scored = await scores_as_recorded(free, vllm.url, "r1")
    came_to = orjson.loads(printed.splitlines()[-1])
    called, answered = [step["response"]["choices"][0]["message"] for step in found.steps]

    assert str(orjson.loads(called["tool_calls"][0]["function"]["arguments"])["x"] + 1) == came_to[0]
    assert answered["content"] == came_to[1]
    assert [(dialect, "complete")] * 2 == [(step["dialect"], step["status"]) for step in found.steps]
    assert [] == found.inexact
    assert found.is_linear or "retokenized" == found.drift, found.why  # a random model cuts a forced text anyhow
    check_rows(found.steps, rows)
    assert scored["aligned"], scored


def answer_of(rows, step_id):
    """The row of a step, of which only the step's own tokens count: those under a grammar score otherwise without it."""
    (row,) = [row for row in rows if row["spans"][-1]["step_id"] == step_id]
    start = row["spans"][-1]["start"]
    return {**row, "mask": [0] * start + row["mask"][start:], "logprobs": [None] * start + row["logprobs"][start:]}
