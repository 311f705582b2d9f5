"""Two frameworks with a real vLLM and a tiny model with constrained output: exact steps, which it scores as recorded."""

import orjson
import pytest
from tests.system.real_engines.calls import CALL
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
async def test_the_steps_of_a_framework_with_a_real_engine_are_exact(file, dialect, vllm, environment, http, tmp_path):  # noqa: F811
    """The tool receives the sampled call, and the agent the sampled answer."""
    async with through_proxy(vllm.url, tmp_path, models={"*": "tiny"}) as proxy:
        where = address(proxy.url, "r1")
        printed = await run("main", PROGRAMS / file, *FIELDS, where=where, environment=environment, folder=tmp_path)
        found, rows = await recorded(http, proxy.url, "r1"), await proxy.rows("r1")
        free = tmp_path / "rows.ndjson"
        free.write_bytes(orjson.dumps(row_of_step(rows, found.steps[1]["step_id"])))
        scored = await scores_as_recorded(free, vllm.url, "r1")
    outcome = orjson.loads(printed.splitlines()[-1])
    called, answered = [step["response"]["choices"][0]["message"] for step in found.steps]

    assert str(orjson.loads(called["tool_calls"][0]["function"]["arguments"])["x"] + 1) == outcome[0]
    assert answered["content"] == outcome[1]
    assert [(step["dialect"], step["status"]) for step in found.steps] == [(dialect, "complete")] * 2
    assert found.inexact == []
    # A random model does not tokenize a constrained text canonically.
    assert found.is_linear or found.drift == "retokenized", found.why
    check_rows(found.steps, rows)
    assert scored["aligned"], scored


def row_of_step(rows, step_id):
    """Return a step's row with only its own free tokens trained: constrained ones score differently without the
    grammar.
    """
    (row,) = [row for row in rows if row["spans"][-1]["step_id"] == step_id]
    start = row["spans"][-1]["start"]
    return {**row, "mask": [0] * start + row["mask"][start:], "logprobs": [None] * start + row["logprobs"][start:]}
