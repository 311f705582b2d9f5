"""What takes more than one request: continued conversations, agents that leave, the mode of logprobs, and admin routes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import OK
from math import exp, isfinite
from time import monotonic
from typing import Any, Final

from proxy.cli.certify.access import Answer
from proxy.cli.certify.certificate import Cell, Ended
from proxy.cli.certify.comparing import payloads
from proxy.cli.certify.shapes import (
    CALL,
    CHAT,
    COMPLETIONS,
    END_OF_TEXT,
    END_OF_TURN,
    IDS,
    QUESTION,
    SEED,
    SGLANG_GENERATE,
    THINKING_OFF,
    TOOL,
    VLLM_GENERATE,
    Body,
    biased,
    constraint,
)
from proxy.cli.certify.suite import Suite, served
from proxy.continuation.types import REASONS

_TURNS: Final = 3
_LONG_S: Final = 5.0  # of a call that is interrupted
_LONGEST: Final = (64, 1500)  # tokens of it
_SEEN: Final = 3  # events after which it is
_PROOF_S: Final = 0.5  # a stream that lasts so much longer was not complete at the engine when it was interrupted
_TOO_FAST: Final = "the call ended before it could be interrupted"
_MIN_GAP: Final = 0.1  # between the logprobs that are compared: more than the noise of a precision
_BETWEEN: Final = 1.5  # ratios of differences: 1 before the temperature, 2 after it
_MAX_SUM: Final = 1.01  # of probabilities
_ZERO: Final = -1e-3  # a logprob above it is 0
_ANNOUNCE: Final = "announce versions with PUT /policy (docs/training-loop.md)"
_POLL_S: Final = 0.05
_STORED_S: Final = 10.0  # in which the step of an agent that left is stored
# Short replies that end with the end of a turn, also of a model with random weights.
_SENTENCE: Final = constraint("[A-Za-z ,.]{5,40}", "root ::= [A-Za-z ,.]{5,40}")
_ENDS: Final = {"logit_bias": {END_OF_TURN: 8.0, END_OF_TEXT: -100.0}, **THINKING_OFF}


async def continued(suite: Suite, mode: str, *, tools: bool, stream: bool) -> Cell:
    """Hold a conversation in a mode of continuation; return whether it stays one sequence."""
    rollout = suite.new_rollout()
    opened = await suite.access.proxy.post("/rollouts", {"rollout_id": rollout, "continuation": mode})
    if opened.status >= 300:
        return Cell("failed", f"TokenTape returns {opened.status}: {opened.message}")
    await _talk(suite, f"/rollouts/{rollout}{CHAT}", tools=tools, stream=stream)
    steps = await suite.steps(rollout)
    for step in steps:
        suite.check_flags(CHAT, step["request"], step)
    reasons: list[str] = []
    for before, step in itertools.pairwise(steps):
        shown = step["extra"].get("continuation") or {}
        kept = before["prompt_ids"] + before["choices"][0]["ids"]
        if "kept" not in shown:
            reasons.append(shown.get("reason", "unsupported"))
        elif step["prompt_ids"][: len(kept)] != kept:
            return Cell("wrong", "a continued prompt does not begin with the recorded ids")
    await suite.check_scores(rollout)
    found = tuple(dict.fromkeys(reasons))
    why = " ".join(REASONS.get(reason, reason) for reason in found)  # type: ignore[call-overload]
    return Cell("forks", f"{len(reasons)} of {len(steps) - 1} later calls: {why}", found) if reasons else Cell("exact")


async def _talk(suite: Suite, path: str, *, tools: bool, stream: bool) -> None:
    """Send the messages back as text, as agents do."""
    calling = await _calling(suite) if tools else {}
    sentence = _SENTENCE.get(suite.kind, {})
    messages: list[Any] = list(QUESTION)
    for turn in range(_TURNS):
        calls = tools and turn != 1
        more = {**({"tools": [TOOL]} if tools else {}), **(calling if calls else sentence)}
        body = _turn(suite, messages, turn, more) | ({"stream": True} if stream else {})
        reply = _read_reply(await suite.access.proxy.post(path, body))
        messages = [*messages, reply]
        made = reply.get("tool_calls", ())
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": str(turn)} for call in made]
        if not made:
            messages.append({"role": "user", "content": f"Continue, {turn}."})


async def _calling(suite: Suite) -> Body:
    """Return the request fields that make the engine respond with a tool call."""
    regex = constraint(CALL, "").get(suite.kind, {})
    for fields in (regex, {"tool_choice": "required"}):
        body = _turn(suite, QUESTION, 0, {"tools": [TOOL], **fields})
        with suppress(Ended):
            if (_read_reply(await suite.access.engine.post(CHAT, body))).get("tool_calls"):
                return fields
    raise Ended("not served", "the engine parses no tool call: it needs the tool parser of its model")


def _turn(suite: Suite, messages: list[Any], turn: int, more: Body) -> Body:
    body = {"model": suite.model, "messages": messages, "seed": SEED + turn, "max_tokens": 80, **_ENDS, **more}
    return biased(body, suite.words)


def _read_reply(answer: Answer) -> Body:
    """Return the message of a response as an agent sends it back. Raises Ended if there is none."""
    served(answer)
    content, calls = "", dict[int, Body]()
    try:
        for event in payloads(answer.content_type, answer.body):
            for choice in event["choices"] if isinstance(event, dict) else ():
                part = choice.get("message") or choice["delta"]
                content += part.get("content") or ""
                for number, call in enumerate(part.get("tool_calls") or ()):
                    kept = calls.setdefault(
                        call.get("index", number), {"id": call.get("id"), "name": "", "arguments": ""}
                    )
                    for name in ("name", "arguments"):
                        kept[name] += call["function"].get(name) or ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Ended("not served", f"the engine's response has no message: {error!r}") from error
    functions = [
        {"id": call["id"], "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
        for call in calls.values()
    ]
    return {"role": "assistant", "content": content or None, **({"tool_calls": functions} if functions else {})}


async def left(suite: Suite) -> Cell:
    """Leave a stream; return whether the received tokens are recorded."""
    rollout = suite.new_rollout()
    body = _long(suite, CHAT, {"messages": QUESTION, "max_tokens": _tokens(suite)})
    served(await suite.access.proxy.post(f"/rollouts/{rollout}{CHAT}", body, events=_SEEN))
    step = await _stored(suite, rollout)
    counts = [(len(choice["ids"]), len(choice["logprobs"])) for choice in step["choices"]]
    if step["status"] == "complete":
        return Cell("not run", "the reply was complete before the agent left, as a replayed stream is")
    if step["fidelity"]["exact"] or any(ids not in {0, logprobs} for ids, logprobs in counts):
        return Cell("wrong", f"the step has {counts} ids and logprobs, and problems {step['fidelity']['problems']}")
    return Cell("ok", f"a partial step {'with its' if any(ids for ids, _ in counts) else 'without'} ids")


async def _stored(suite: Suite, rollout: str) -> dict[str, Any]:
    """Return the step of an agent that left, which gets no event for it. Raises TimeoutError."""
    async with asyncio.timeout(_STORED_S):
        while True:
            if steps := await suite.steps(rollout):
                return steps[0]
            await asyncio.sleep(_POLL_S)


def _tokens(suite: Suite) -> int:
    """Return how many tokens a call must request to run long enough to be interrupted."""
    least, most = _LONGEST
    window = suite.scorer.window if suite.scorer is not None else None
    return max(least, min(int(suite.tokens_per_s * _LONG_S), most, (window or most) - 100))


def _long(suite: Suite, path: str, fields: Body) -> Body:
    body = {**fields, "stream": True}
    return body if path == SGLANG_GENERATE else body | {"model": suite.model, "ignore_eos": True}


async def logprobs_mode(suite: Suite) -> Cell:
    """Measure what the engine computes logprobs from, and compare it with what steps record."""
    alternatives = []
    for sampling in ({"temperature": 1}, {"temperature": 0.5}, {"temperature": 1, "top_k": 1}):
        body = {"model": suite.model, "messages": QUESTION, "seed": SEED, "max_tokens": 1, **THINKING_OFF}
        answer = await suite.access.engine.post(CHAT, {**body, "logprobs": True, "top_logprobs": 5, **sampling})
        alternatives.append(_alternatives(served(answer).json()))
    mode = measured_mode(*alternatives)
    if mode is None:
        return Cell("not served", "the likely tokens in the engine's responses do not show it")
    suite.certificate.facts["logprobs_mode"] = mode
    recorded = suite.logprobs_mode
    if mode == recorded:
        return Cell("ok", mode)
    fix = f"set engines.endpoints[].logprobs_mode: {mode}"
    return Cell("wrong", f"the engine returns {mode}, steps record {recorded}", fix=fix)


def _alternatives(response: Any) -> dict[str, float]:
    """Return the logprobs of the most likely first tokens; {} if the response has none."""
    try:
        found = response["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {str(entry["token"]): float(entry["logprob"]) for entry in found}
    except (KeyError, IndexError, TypeError, ValueError):
        return {}


def measured_mode(plain: dict[str, float], cold: dict[str, float], one: dict[str, float]) -> str | None:
    """Return the mode of the logprobs of one position; None if they do not show it.

    They are sampled at temperature 1, at 0.5, and at 1 with `top_k: 1`. At half the temperature the differences between
    logprobs double, and among the kept tokens alone the only one has logprob 0, if the mode is after these parameters.
    """
    common = sorted(plain.keys() & cold.keys(), key=lambda token: plain[token])
    gap = plain[common[-1]] - plain[common[0]] if common else 0.0
    if gap < _MIN_GAP or not all(map(isfinite, (*plain.values(), *cold.values()))):
        return None
    is_scaled = (cold[common[-1]] - cold[common[0]]) / gap > _BETWEEN
    if max(plain.values()) > 0 or sum(map(exp, plain.values())) > _MAX_SUM:
        return "processed_logits" if is_scaled else "raw_logits"
    is_cut = max(one.values(), default=-1.0) > _ZERO and max(plain.values()) < 10 * _ZERO
    if not is_scaled:
        return "raw_logprobs"
    return "processed_logprobs" if is_cut else "after_temperature_logprobs"


async def reports_versions(suite: Suite) -> Cell:
    """Return whether steps have the version of the weights that sampled each token."""
    calls: list[tuple[str, Body]] = [(CHAT, {"messages": QUESTION, "max_tokens": 4})]
    calls += [(path, body) for path, body in _native(suite, tokens=4)]
    found = []
    for path, body in calls:
        rollout = suite.new_rollout()
        named = body if path == SGLANG_GENERATE else body | {"model": suite.model}
        await suite.access.proxy.post(f"/rollouts/{rollout}{path}", named)
        steps = await suite.steps(rollout)
        if any(span.get("policy_version") for step in steps for choice in step["choices"] for span in choice["spans"]):
            found.append(path)
    if not found:
        return Cell("not served", "the engine's responses do not name the version of its weights", fix=_ANNOUNCE)
    return Cell("ok", f"for each token, in {', '.join(found)}")


def _native(suite: Suite, tokens: int) -> list[tuple[str, Body]]:
    """Return the engine's own call with ids, if it has one."""
    sampling = {"ignore_eos": True, "temperature": 1}
    calls: dict[str, tuple[str, Body]] = {
        "vllm": (VLLM_GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": tokens, **sampling}}),
        "sglang": (SGLANG_GENERATE, {"input_ids": IDS, "sampling_params": {"max_new_tokens": tokens, **sampling}}),
    }
    return [calls[suite.kind]] if suite.kind in calls else []


@dataclass(frozen=True, slots=True)
class AdminRoutes:
    """The admin routes of an engine type: paths with bodies, and where it shows the version of its weights."""

    version: str
    pause: tuple[str, Body]
    resume: tuple[str, Body]
    abort: tuple[str, Body]


# vLLM 0.32 (in development mode) and SGLang 0.5.23.
ADMIN: Final = {
    "vllm": AdminRoutes("/weight_info", ("/pause?mode=keep", {}), ("/resume", {}), ("/pause?mode=abort", {})),
    "sglang": AdminRoutes(
        "/model_info",
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/abort_request", {"rid": "", "abort_all": True}),
    ),
}
_UPDATE: Final = "/update_weight_version"
_OTHER: Final = "tokentape-certify"


async def new_version(suite: Suite) -> Cell:
    """Change the label of the weights within a call, and restore it; return whether the step has both."""
    answer = await suite.access.engine.get(ADMIN[suite.kind].version)
    shown = answer.json()
    before = shown.get("weight_version") if isinstance(shown, dict) else None
    if answer.status != OK or not isinstance(before, str):
        return Cell("not served", f"the engine returns {answer.status} for its version: {answer.message}")

    async def change() -> Answer:
        return await suite.access.engine.post(_UPDATE, {"new_version": _OTHER, "abort_all_requests": False})

    ((path, body),) = _native(suite, tokens=_tokens(suite))
    try:
        step, rest_s = await _interrupted(suite, path, body, change)
    finally:
        await suite.access.restoring.post(_UPDATE, {"new_version": before, "abort_all_requests": False})
    versions = [span["policy_version"] for choice in step["choices"] for span in choice["spans"]]
    if versions == [before] and rest_s < _PROOF_S:
        return Cell("not run", _TOO_FAST)
    if versions != [before, _OTHER]:
        return Cell("wrong", f"the step has versions {versions}, the engine had {[before, _OTHER]}")
    suite.check_flags(path, body, step)
    return Cell("exact")


async def paused(suite: Suite) -> Cell:
    """Pause the engine within a call, and resume it; return whether the step is exact."""
    routes = ADMIN[suite.kind]

    async def pause() -> Answer:
        answer = await suite.access.engine.post(*routes.pause)
        await suite.access.restoring.post(*routes.resume)
        return answer

    body = {"prompt": IDS, "max_tokens": _tokens(suite)}
    try:
        step, _ = await _interrupted(suite, COMPLETIONS, body, pause)
    finally:
        await suite.access.restoring.post(*routes.resume)  # also if this run ends within the pause
    suite.check_flags(COMPLETIONS, body, step)
    return Cell("exact")


async def aborted(suite: Suite) -> Cell:
    """Abort the engine's calls; return whether the step is flagged as aborted, with the ids until then."""
    routes = ADMIN[suite.kind]
    body = {"prompt": IDS, "max_tokens": _tokens(suite)}
    try:
        abort = routes.abort
        step, rest_s = await _interrupted(suite, COMPLETIONS, body, lambda: suite.access.engine.post(*abort))
    finally:
        await suite.access.restoring.post(*routes.resume)
    counts = [(len(choice["ids"]), len(choice["logprobs"])) for choice in step["choices"]]
    if step["fidelity"]["exact"] and rest_s < _PROOF_S:
        return Cell("not run", _TOO_FAST)
    if "aborted" not in step["fidelity"]["problems"] or any(ids != logprobs for ids, logprobs in counts):
        return Cell("wrong", f"the step has {counts} ids and logprobs, and problems {step['fidelity']['problems']}")
    return Cell("ok", "the step is flagged as aborted, with the ids until then")


async def _interrupted(
    suite: Suite, path: str, body: Body, act: Callable[[], Awaitable[Answer]]
) -> tuple[dict[str, Any], float]:
    """Stream a call, act within it, and return its step, and how long the stream lasted after the act, in seconds."""
    rollout = suite.new_rollout()
    seen, answer, acted = 0, None, 0.0
    async with suite.access.proxy.stream(f"/rollouts/{rollout}{path}", _long(suite, path, body)) as (status, lines):
        if status != OK:
            raise Ended("failed", f"TokenTape returns {status} for {path}")
        async for line in lines:
            seen += line.startswith(b"data:")
            if seen == _SEEN and answer is None:
                answer, acted = await act(), monotonic()
    rest_s = monotonic() - acted
    if answer is None:
        raise Ended("not run", _TOO_FAST)
    served(answer)
    return await suite.only_step(rollout), rest_s
