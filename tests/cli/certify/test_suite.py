"""One shape: what the agent sees, the recorded step, and the engine's own scores, against engines that are wrong in one way."""

from dataclasses import replace

import pytest
from aiohttp import web
from tests.support.certifying import run_shape, suite_of
from tests.support.tampering import tampered

from proxy.cli.certify.shapes import SHAPES
from proxy.cli.certify.suite import Gone
from proxy.server.listener import simulating
from proxy.simulator.options import Options

CHAT = "/v1/chat/completions"
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def certified(change, name="chat", *, stream=False, **options):
    """Return the result of one shape with a simulated engine and changed responses."""
    async with (
        simulating("127.0.0.1:0", Options(**options)) as engine,
        tampered(engine, change) as url,
        suite_of(url) as suite,
    ):
        return await run_shape(suite, name, stream=stream)


def requests_ids(body):
    return body.get("return_token_ids") is True


def unchanged(path, body, answer):
    return answer


@BOTH
@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_an_engine_without_faults_is_exact(shape, stream):
    assert (await certified(unchanged, stream=stream, shape=shape)).verdict == "exact"


async def test_a_slow_engine_gets_shorter_replies():
    """Shapes with a fixed length keep it."""
    async with simulating("127.0.0.1:0", Options()) as engine, suite_of(engine) as suite:
        lengths = {}
        for suite.tokens_per_s in (1000.0, 25.0, 0.1):
            for shape in SHAPES:
                body = suite.body_of(shape, stream=False)
                lengths.setdefault(shape.name, []).append(body.get("max_tokens"))

    assert lengths["chat"] == lengths["completions"] == [24, 12, 8]
    assert lengths["one token"] == [1, 1, 1]


@BOTH
async def test_other_text_for_the_agent_differs(stream):
    """TokenTape's own fields must not change what the agent sees."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if requests_ids(body) and path == CHAT else ():
            part = choice.get("message") or choice["delta"]
            part["content"] = (part.get("content") or "") + "!"
        return answer

    cell = await certified(change, stream=stream)

    assert cell.verdict == "differs"
    assert "the engine alone returns" in cell.why


async def test_an_additional_key_differs():
    """Keys are compared as well as values."""

    def change(path, body, answer):
        return {**answer, "flagged": 1} if requests_ids(body) and path == CHAT else answer

    assert (await certified(change)).why == "the response has more keys ['flagged'], and lacks []"


async def test_an_id_that_the_engine_reports_wrongly_each_time_is_wrong():
    """Text and counts agree, so only scoring shows it."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if requests_ids(body) and path == CHAT else ():
            choice["token_ids"][3] += 1
        return answer

    cell = await certified(change)

    assert (cell.verdict, cell.why.startswith("scored again")) == ("wrong", True)


async def test_an_id_that_is_wrong_beside_logprobs_only_is_wrong():
    """The engine returns other ids for the same request."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if requests_ids(body) and body.get("logprobs") else ():
            choice["token_ids"][-1] += 1
        return answer

    cell = await certified(change)

    assert (cell.verdict, "the engine alone returns" in cell.why) == ("wrong", True)


async def test_a_logprob_of_another_distribution_is_wrong():
    def change(path, body, answer):
        for choice in answer.get("choices", ()) if path == CHAT else ():
            for entry in (choice.get("logprobs") or {}).get("content", ()):
                entry["logprob"] *= 2
        return answer

    assert (await certified(change)).verdict == "wrong"


async def test_scores_that_are_rounded_differently_are_no_fault():
    """In bfloat16, vLLM's scores differ from what it sampled: one token by 0.3, and all by 0.05 on average."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if "prompt_logprobs" in body else ():
            for index, entry in enumerate(choice["prompt_logprobs"]):
                for token in (entry or {}).values():
                    token["logprob"] += 0.3 if index % 8 == 7 else 0.02
        return answer

    assert (await certified(change)).verdict == "exact"


@BOTH
async def test_a_problem_that_no_limitation_explains_is_unexpected(stream):
    """The step is flagged, and the result has the problem's sentence."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if path == CHAT and requests_ids(body) else ():
            if isinstance(choice.get("token_ids"), list):
                choice["token_ids"] = choice["token_ids"][:-1]
        return answer

    cell = await certified(change, stream=stream)

    assert cell.verdict == "unexpected"
    assert "logprob_count" in cell.problems
    assert "A choice has a different number of logprobs and sampled ids." in cell.why


@BOTH
async def test_a_known_limitation_is_flagged_with_its_sentence(stream):
    cell = await certified(unchanged, "echo", stream=stream)

    assert (cell.verdict, "echo" in cell.problems) == ("flagged", True)
    assert "`echo` with ids omits the echoed prompt" in cell.why


@pytest.mark.parametrize("status", [400, 404, 501])
async def test_a_shape_that_the_engine_rejects_is_not_served(status):
    """With its message; it is neither exact nor a failure."""

    def change(path, body, answer):
        if body.get("tool_choice") == "required":
            return web.json_response({"error": {"message": "no parser"}}, status=status)
        return answer

    cell = await certified(change, "required tool")

    assert (cell.verdict, cell.why) == ("not served", f"the engine returns {status}: no parser")


@pytest.mark.parametrize("name", ["chat", "chat sampled"])
async def test_responses_that_differ_each_time_are_compared_by_their_format(name):
    """An additional key still differs; without it the step is exact."""
    counts = {True: 0, False: 0}

    def change(path, body, answer):
        counts[requests_ids(body)] += 1
        for choice in answer.get("choices", ()) if path == CHAT else ():
            choice["message"]["content"] = str(sum(counts.values()))
        return answer | ({"key": 1} if has_key and requests_ids(body) else {})

    has_key = False
    assert (await certified(change, name)).verdict == "exact"
    has_key = True
    assert (await certified(change, name)).verdict == "differs"


@BOTH
async def test_an_error_must_be_the_engines_own(stream):
    """Byte for byte, unstreamed and in a stream; an engine that accepts the call does not serve the shape."""
    assert (await certified(unchanged, "no messages", stream=stream)).verdict == "ok"

    async with simulating("127.0.0.1:0", Options()) as engine, suite_of(engine) as suite:
        (shape,) = (shape for shape in SHAPES if shape.name == "chat")
        assert (await suite.run(replace(shape, treatment="refused"), stream=stream)).verdict == "not served"


async def test_a_request_without_an_answer_fails_and_an_engine_without_any_ends_the_run():
    """With the reason."""
    lost = {CHAT}

    def change(path, body, answer):
        return None if (path in lost and body.get("max_tokens") == 1) or path in lost - {CHAT} else answer

    async with simulating("127.0.0.1:0", Options()) as engine, tampered(engine, change) as url, suite_of(url) as suite:
        cell = await run_shape(suite, "one token")
        lost.add("/v1/models")
        with pytest.raises(Gone, match=r"did not answer /v1/models"):
            await run_shape(suite, "one token")

    assert (cell.verdict, f"did not answer {CHAT}" in cell.why) == ("failed", True)
