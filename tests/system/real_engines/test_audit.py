"""`tokentape audit` with a real engine: sampled rows are aligned, and each kind of damage is detected and named."""

import asyncio

import orjson
import pytest

from . import environment
from .through import through_proxy

QUESTION = [{"role": "user", "content": "Count to three."}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "minLength": 40}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
TOOL_CALL = "4090"  # the id of <tool_call>
# What constrains a call by a grammar, in vLLM 0.32.
BOUND = {
    "required": {"tools": [TOOL], "tool_choice": "required"},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "schema": {"response_format": SCHEMA},
    "object": {"response_format": {"type": "json_object"}},
}
# What affects sampling but not raw logprobs.
FREE = {
    "odds": {"top_p": 0.7, "extra_body": {"top_k": 20, "min_p": 0.01, "min_tokens": 20}},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1, "extra_body": {"repetition_penalty": 1.3}},
    "biases": {"logit_bias": {"300": 5}, "extra_body": {"bad_words": ["a"]}},
    "allowed": {"extra_body": {"allowed_token_ids": list(range(300, 900))}},
    "tools": {"tools": [TOOL]},
    "text": {"response_format": {"type": "text"}},
}
SAMPLED = 150
# SGLang's logprobs are those after the temperature, which are compared at temperature 1 only.
TEMPERATURES = {"vllm": {"warm": 1.5, "cold": 0.6, "greedy": 0}, "sglang": {"same": 1, "cold": 0.6}}
VERDICTS = {"vllm": {"aligned": 5}, "sglang": {"aligned": 3, "nothing to compare": 1}}
ONLY_VLLM = pytest.mark.parametrize("engine", ["vllm"], indirect=True)


@pytest.fixture
async def recorded(engine, tmp_path):
    """A running proxy with correct rollouts: two turns in one row, other temperatures (raw logprobs), a stream."""
    async with through_proxy(engine.url, tmp_path) as through:
        request = {"model": "tiny", "max_tokens": SAMPLED, "seed": 7, "extra_body": {"ignore_eos": True}}
        async with through.agent("turns") as agent:
            await agent.chat.completions.create(messages=QUESTION, temperature=1, **request)
            ids = [*await ids_of_first(through, "turns"), *range(300, 320)]
            await agent.completions.create(prompt=ids, temperature=1, **request)
        for name, temperature in TEMPERATURES[engine.kind].items():
            async with through.agent(name) as agent:
                await agent.chat.completions.create(messages=QUESTION, temperature=temperature, **request)
        async with through.agent("stream") as agent:
            async for _ in await agent.chat.completions.create(messages=QUESTION, stream=True, **request):
                pass
        yield through


@pytest.fixture
async def row(recorded) -> dict:
    """A row of two turns."""
    (row,) = await recorded.rows("turns")
    assert sum(row["mask"]) == 2 * SAMPLED
    return row


async def ids_of_first(through, rollout) -> list[int]:
    """Return prompt and sampled ids of a rollout's first step."""
    step = (await through.steps(rollout))[0]
    return [*step["prompt_ids"], *step["choices"][0]["ids"]]


async def others(row: dict) -> list[list[float | None]]:
    """The row's logprobs at temperature 1.5, and another model's."""
    made = await asyncio.to_thread(environment.ensure)
    variants = [{"temperature": 1.5, "seed": None}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": None}]
    process = await asyncio.create_subprocess_exec(
        str(made.python),
        str(environment.HERE / "other_scores.py"),
        str(made.model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    response, errors = await process.communicate(orjson.dumps({"ids": row["token_ids"], "asked": variants}))
    assert process.returncode == 0, errors.decode()
    *others, own = orjson.loads(response)
    # It must be the same model; otherwise the tests below prove nothing.
    bound = [range(span["start"], span["end"]) for span in row["spans"] if span["constrained"]]
    compared = [
        (own[index], two) for index, two in enumerate(row["logprobs"]) if not any(index in places for places in bound)
    ]
    pairs = [(own_logprob, two) for own_logprob, two in compared if two is not None]
    assert max(abs(own_logprob - two) for own_logprob, two in pairs) < 1e-3
    return others


def rolled(values: list, by: int) -> list:
    return values[-by:] + values[:-by]


def with_logprobs(row: dict, values: list[float | None]) -> dict:
    return row | {"logprobs": [value if mask else None for value, mask in zip(values, row["mask"], strict=True)]}


async def test_rows_that_the_engine_sampled_are_aligned(engine, recorded, audited):
    """Several turns in one row, any temperature that can be compared, streamed and not: within a thousandth."""
    report = await audited(url=recorded.url)

    assert VERDICTS[engine.kind] == report["verdicts"]
    assert (VERDICTS[engine.kind]["aligned"] + 1) * SAMPLED == report["tokens"]
    assert report["max"] < 1e-3
    aligned = [sequence for sequence in report["sequences"] if sequence["verdict"] == "aligned"]
    assert all(sequence["informative"] > SAMPLED / 2 for sequence in aligned)


async def test_shifts_are_detected_and_measured(row, audited):
    """Ids, the mask, or mask and logprobs, shifted by one; ids shifted so that one is lost."""
    report = await audited(
        row | {"token_ids": rolled(row["token_ids"], 1)},
        row | {"token_ids": rolled(row["token_ids"], -1)},
        row | {"mask": rolled(row["mask"], 1)},
        row | {"mask": rolled(row["mask"], 1), "logprobs": rolled(row["logprobs"], 1)},
        row | {"mask": rolled(row["mask"], -1), "logprobs": rolled(row["logprobs"], -1)},
        row | {"token_ids": [*row["token_ids"][1:], 0]},
    )

    found = [(sequence["verdict"], sequence["offset"]) for sequence in report["sequences"]]
    assert found == [("shifted", -1), ("shifted", 1), ("shifted", 1), ("shifted", 1), ("shifted", -1), ("shifted", 1)]
    assert "about" in report["sequences"][5]["note"]  # no id after the lost one has its own context


@ONLY_VLLM  # a row without a seed may have a token that is as likely in another context
@pytest.mark.parametrize("turn", [0, 1])
async def test_a_replaced_token_is_located(row, audited, turn):
    """In the middle of a turn, at its end, and between two turns."""
    spans = row["spans"]
    middle, last = (spans[turn]["start"] + spans[turn]["end"]) // 2, spans[1]["end"] - 1
    rows = []
    for index in (middle, last, spans[0]["end"] + 5):
        ids = list(row["token_ids"])
        ids[index] = (ids[index] + 1000) % 4000
        rows.append(row | {"token_ids": ids})
    report = await audited(*rows)
    found = [(sequence["verdict"], sequence["first"]["position"]) for sequence in report["sequences"]]

    assert [("wrong tokens", middle), ("wrong tokens", last), ("wrong tokens", spans[1]["start"])] == found
    assert "the ids between were not sampled" in report["sequences"][2]["note"]


async def test_logprobs_of_other_weights_and_temperatures_are_detected(row, audited):
    """The same ids with the logprobs of another temperature, and of another model."""
    warm, foreign = await others(row)
    report = await audited(with_logprobs(row, warm), with_logprobs(row, foreign))
    temperature, model = report["sequences"]

    assert report["verdicts"] == {"other weights": 2}
    assert "the values correlate" in temperature["note"]
    assert "hardly correlate" in model["note"]


@pytest.fixture
async def bound(engine, tmp_path):
    """A function that returns the row of a rollout: a call with a grammar, then one without."""
    (tmp_path / "bound").mkdir()
    async with through_proxy(engine.url, tmp_path / "bound") as through:

        async def made(name: str, *, goes_on: bool = True) -> dict:
            extra = {"chat_template_kwargs": {"enable_thinking": False}}
            async with through.agent(name) as agent:
                request = {"model": "tiny", "seed": 7, "temperature": 1}
                await agent.chat.completions.create(
                    messages=QUESTION, max_tokens=60, **request, **BOUND[name], extra_body=extra
                )
                ids = [*await ids_of_first(through, name), *range(300, 320)]
                if goes_on:
                    body = {"ignore_eos": True}
                    await agent.completions.create(prompt=ids, max_tokens=SAMPLED, **request, extra_body=body)
            (row,) = await through.rows(name)
            return row

        yield made


@pytest.mark.parametrize("name", BOUND)
async def test_tokens_under_a_grammar_are_not_part_of_the_verdict(bound, audited, name):
    """Such a rollout is aligned as far as it can be compared; other weights are still detected by its other tokens."""
    row = await bound(name)
    _, foreign = await others(row)
    unmarked = row | {"spans": [{**span, "constrained": None} for span in row["spans"]]}
    report, wrong, blind = [await audited(audited_row) for audited_row in (row, with_logprobs(row, foreign), unmarked)]
    sampled = row["spans"][0]["end"] - row["spans"][0]["start"]

    assert [span["constrained"] for span in row["spans"]] == [True, False]
    assert (report["aligned"], report["verdicts"]) == (True, {"aligned": 1})
    assert (report["tokens"], report["skipped"]) == (SAMPLED, sampled)
    assert report["max"] < 1e-3
    assert (wrong["aligned"], wrong["verdicts"]) == (False, {"other weights": 1})
    assert not blind["aligned"]  # the mark is required
    assert blind["max"] > 0.5


async def test_a_rollout_under_a_grammar_alone_has_nothing_to_compare(bound, row, audited):
    """This verdict does not fail the audit beside aligned rows, and proves nothing alone."""
    alone = await bound("required", goes_on=False)
    beside, by_itself = await audited(row, alone), await audited(alone)

    assert (beside["aligned"], beside["verdicts"]) == (True, {"aligned": 1, "nothing to compare": 1})
    assert (by_itself["aligned"], by_itself["verdicts"]) == (False, {"nothing to compare": 1})
    assert (0, sum(alone["mask"])) == (by_itself["tokens"], by_itself["skipped"])


@ONLY_VLLM
@pytest.mark.parametrize(
    ("tools", "is_bound"),
    [
        ({"tools": [STRICT]}, True),
        ({"tools": [TOOL], "parallel_tool_calls": False}, True),
        ({"tools": [TOOL]}, False),
    ],
    ids=["strict", "single", "free"],
)
async def test_a_tool_call_is_constrained_if_the_request_requires_it(engine, tmp_path, audited, tools, is_bound):
    """vLLM 0.32 applies a grammar to strict tools and to parallel_tool_calls: false, and to no other tools."""
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    request = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "seed": 7, "logit_bias": {TOOL_CALL: 10}}
    async with through_proxy(engine.url, tmp_path) as through:
        async with through.agent("r1") as agent:
            await agent.chat.completions.create(**request, **tools, extra_body=extra)
        (row,) = await through.rows("r1")
    unmarked = row | {"spans": [{**span, "constrained": None} for span in row["spans"]]}
    blind = await audited(unmarked)

    assert [span["constrained"] for span in row["spans"]] == [is_bound]
    assert is_bound == (blind["max"] > 0.5)
    assert is_bound != blind["aligned"]


@ONLY_VLLM
async def test_raw_logprobs_do_not_depend_on_sampling_parameters(engine, tmp_path, audited):
    """With top-k, penalties, biases and token lists, all tokens are compared."""
    async with through_proxy(engine.url, tmp_path) as through:
        for name, parameters in FREE.items():
            async with through.agent(name) as agent:
                await agent.chat.completions.create(
                    model="tiny", messages=QUESTION, max_tokens=60, seed=7, temperature=0.8, **parameters
                )
        report = await audited(url=through.url)

    assert {"aligned": len(FREE)} == report["verdicts"], report
    assert report["skipped"] == 0
    assert report["max"] < 1e-3
