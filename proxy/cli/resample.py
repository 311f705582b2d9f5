"""`tokentape resample`: samples recorded calls again, each as the only step of a new rollout that branches before it.

The name of such a rollout is made of the step and of the policy's version or model, so that a repeated command continues.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import aiohttp
from rich.console import Console

from proxy.cli.console import count_bar, print_json, print_note
from proxy.cli.control import CONNECT_TIMEOUT_S, Control, ControlAddress, connected
from tokentape.transport import error_from_response

_PATHS: Final = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages",
    "responses": "/v1/responses",
}  # fmt: skip
_OF_URL: Final = ("model", "stream")  # of a Gemini call


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command. `number`: how often each step is sampled."""

    rollouts: tuple[str, ...]
    group: str | None
    status: str | None
    model: str | None
    number: int
    concurrency: int


async def resample(address: ControlAddress, notes: Console, request: Request, *, as_json: bool) -> bool:
    """Sample the steps of rollouts again; print the counts, and return whether none failed. Raises OSError."""
    counts: Counter[str] = Counter()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with connected(address) as control, aiohttp.ClientSession(timeout=timeout) as agents:
        label = request.model or (await control.policy())["version"] or "none"
        wanted, turn = _wanted(control, request, counts), asyncio.Lock()

        async def work(advance: Callable[[], None]) -> None:
            while True:
                async with turn:
                    each = await anext(wanted, None)
                if each is None:
                    return
                step, number = each
                name = f"{step['rollout_id']}~{label}~{step['step_id']}~{number}"
                counts[await _sampled(control, agents, name, step, request.model)] += 1
                advance()

        with count_bar(notes, "resampled calls") as advance:
            await asyncio.gather(*(work(advance) for _ in range(request.concurrency)))
    if as_json:
        print_json(dict(counts))
    else:
        print_note(", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no steps to sample")
    return not any(what.startswith(("failed", "refused")) for what in counts)


async def _wanted(
    control: Control, request: Request, counts: Counter[str]
) -> AsyncGenerator[tuple[Mapping[str, Any], int], None]:
    """Yield each step that can be sampled again, once for each sample; count the others by the reason."""
    names = request.rollouts or [
        rollout["rollout_id"]
        async for rollout in control.rollouts(status=request.status, group_id=request.group)
        if not rollout["metadata"].get("resampled")
    ]
    for name in names:
        async with aclosing(control.steps(name)) as steps:
            async for step in steps:
                if (why := _unfit(step)) is not None:
                    counts[f"left out: {why}"] += 1
                    continue
                for number in range(request.number):
                    yield step, number


def _unfit(step: Mapping[str, Any]) -> str | None:
    """Return why a step is not sampled again; None if it is."""
    if step["status"] != "complete" or not step["fidelity"]["exact"]:
        return "not exact"
    if "inherited" in step["extra"]:
        return "inherited"
    if step["request"].get("previous_response_id") is not None:
        return "it refers to an earlier response"
    return None if step["dialect"] in {*_PATHS, "gemini"} else f"dialect {step['dialect']}"


async def _sampled(
    control: Control, agents: aiohttp.ClientSession, name: str, step: Mapping[str, Any], model: str | None
) -> str:
    """Sample a step again; return what became of it."""
    playback = {"of": step["rollout_id"], "before": step["step_id"]}
    metadata = {"resampled": playback}
    try:
        opened = await control.open_rollout(
            name, playback=playback, metadata=metadata, **({} if model is None else {"model": model})
        )
        if (await control.rollout(name))["status"] == "completed":
            return "sampled before"
        path, body = _call_of(step)
        url, key = opened["base_url"].removesuffix("/v1") + path, opened["api_key"]
        while not (prompts := await _prompts(control, name)):  # the tape answers calls that are equal to an earlier one
            async with agents.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                raw = await response.read()
            if response.status != 200:
                return f"failed: {error_from_response(response.status, {}, raw).message}"
        if step["prompt_ids"] not in prompts:
            await control.delete_rollout(name)
            return "refused: the engine renders the messages otherwise; its tokenizer or template is another"
        await control.finish_rollout(name)
    except (OSError, aiohttp.ClientError) as error:
        return f"failed: {error}"
    return "sampled"


async def _prompts(control: Control, name: str) -> list[list[int] | None]:
    """Return the prompts that were sampled in a rollout: also by a command that was interrupted."""
    steps = control.steps(name)
    return [it["prompt_ids"] async for it in steps if it["status"] == "complete" and "inherited" not in it["extra"]]


def _call_of(step: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the client's call, unstreamed."""
    request = dict(step["request"])
    if step["dialect"] != "gemini":
        return _PATHS[step["dialect"]], {**request, "stream": False}
    model = quote(str(step["model_asked"]), safe="")
    body = {name: value for name, value in request.items() if name not in _OF_URL}
    return f"/v1beta/models/{model}:generateContent", body
