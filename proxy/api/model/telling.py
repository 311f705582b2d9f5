"""The reply of a resumed call whose parts do not show it: a cut was inside what a parser reads, a stop string or a character.

The rest is then withheld until it is complete, and the reply is made of the ids of all parts.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Final

import orjson

from proxy.api.model.call import Call, endpoints_of
from proxy.continuation.types import Detokenize, LookupFailed
from proxy.errors import EngineError, NotFound
from proxy.protocols.dialects.base import Json, is_on
from proxy.protocols.exchange import Exchange
from proxy.protocols.parts import PARSED, PartsDiffer
from proxy.protocols.resume import first_stop, offers_tools, parsed_reply, stop_strings, told_reply
from proxy.rollouts.prompt_continuation import PER_TEXT_TOKEN, PromptLookups
from proxy.trajectory.arrays import Ids
from proxy.trajectory.step import Step, answers_of
from proxy.upstream.concurrency import PLAIN_BYTES, off_loop
from proxy.upstream.endpoint import Endpoint, ranked

CONTEXT_IDS: Final = 8  # of the prompt, so that the text of the first sampled token is complete
SPLIT: Final = "\ufffd"  # a character of which only a part was sampled
INTERVAL_S: Final = 0.1  # until a request is tried again
MOST_INTERVAL_S: Final = 2.0
_TEXT_TIMEOUT_S: Final = 10.0  # of a text: milliseconds, or seconds while an engine is behind with thousands of streams
_NO_TEXTS_S: Final = 1.0


def can_parse(call: Call) -> bool:
    """Return whether the engine of a chat call can parse the ids of a whole reply."""
    return call.plan.dialect.name == "chat" and call.endpoint.known(call.rollout.rollout_id).parses_ids


async def tell(call: Call, exchange: Exchange) -> None:
    """Determine the reply of a resumed call whose last part was withheld. Raises PartsDiffer."""
    plan, before = call.plan, call.before
    assert before is not None
    sampled, choice = await off_loop(call.work_bytes + call.response_bytes, PLAIN_BYTES, exchange.rest)
    if sampled.finish_reason == "abort":
        return
    first = before.choices[0].ids
    ids = first + array("i", sampled.ids or ())
    ends_in_token = sampled.finish_reason in {"stop", "tool_calls"} and not isinstance(sampled.stop_reason, str)
    visible = ids[:-1] if ends_in_token else ids
    context_ids = before.prompts[0][-CONTEXT_IDS:]
    body, shown = plan.body, answers_of(before).get(0, {}).get("message") or {}
    call.go_on_until = call.context.clock.monotonic() + call.context.settings.agents.resume_timeout_s
    try:
        text, known = await text_of(call, context_ids, visible), await text_of(call, context_ids, first)
        if call.endpoint.engine.drops_half_characters:
            text = text.rstrip(SPLIT)
        stops = stop_strings(body)
        start = len(known.rstrip(SPLIT)) - max(map(len, stops), default=0)
        stop = first_stop(text, max(start, 0), stops)
        if _is_parsed(body, before, choice):
            if stop is not None:
                raise PartsDiffer("a stop string ends a reply that the engine's parsers read")
            told = parsed_reply(body, choice, await _parsed(call, before, visible), shown, len(ids))
        elif not _is_shown(choice, text, text[len(known.rstrip(SPLIT)) :]):
            raise PartsDiffer("the engine shows another text of the ids than it detokenizes")
        elif stop is None:
            told = told_reply(plan, choice, text, len(ids), None)
        else:
            end, string = stop
            count = await _count_to(call, context_ids, ids, end, len(first))
            included = end if is_on(body.get("include_stop_str_in_output")) else end - len(string)
            told = told_reply(plan, choice, text[:included], count, string)
    except (LookupFailed, EngineError) as error:
        if isinstance(error, PartsDiffer):
            raise
        raise PartsDiffer(f"the reply of a resumed call is not known: {error}") from error
    exchange.tell(told)


def _is_parsed(body: Json, before: Step, choice: Json) -> bool:
    """Return whether a parser may read the reply: it has read a part of it, or tools are offered."""
    message, shown = choice.get("message") or {}, answers_of(before).get(0, {}).get("message") or {}
    return offers_tools(body) or any(part.get(name) for part in (message, shown) for name in PARSED)


def _is_shown(choice: Json, text: str, rest: str) -> bool:
    """Return whether the last part's own text is in the text of all ids; vLLM 0.32.0 may show more before it.

    Special tokens that an engine hides are in the text of ids.
    """
    shown = (choice.get("message") or {}).get("content") or choice.get("text") or ""
    return shown in text or rest in shown


async def _parsed(call: Call, before: Step, ids: Ids) -> Json:
    """Return the message that the engine makes of sampled ids. Raises PartsDiffer, EngineError."""
    request = call.endpoint.engine.parse_request(call.plan.body, before.prompts[0], ids)
    if request is None or not can_parse(call):
        raise PartsDiffer("the engine has no route that parses token ids")
    body = await off_loop(len(ids) * PER_TEXT_TOKEN, PLAIN_BYTES, orjson.dumps, request.body)
    try:
        async with asyncio.timeout(call.go_on_until - call.context.clock.monotonic()):
            _, response = await call.context.upstream.post_json(call.endpoint, request.path, body)
    except TimeoutError:
        raise PartsDiffer("the engine did not parse the ids of a resumed call in time") from None
    choices = response.get("choices") if isinstance(response, dict) else None
    message = choices[0].get("message") if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(message, dict):
        raise PartsDiffer("the engine does not parse the ids of a resumed call")
    if call.endpoint.engine.drops_half_characters:  # from a reply that it samples at once, not from ids
        return {name: text.rstrip(SPLIT) if isinstance(text, str) else text for name, text in message.items()}
    return message


async def _count_to(call: Call, context_ids: Ids, ids: Ids, end: int, least: int) -> int:
    """Return how many of the ids have a text of at least `end` characters: it takes a request for each halving."""
    low, high = least, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len((await text_of(call, context_ids, ids[:middle])).rstrip(SPLIT)) >= end:
            high = middle
        else:
            low = middle + 1
    return low


async def text_of(call: Call, context_ids: Ids, ids: Ids) -> str:
    """Return the text of sampled ids, from any endpoint of the call; while none responds, it is requested again.

    Raises LookupFailed, at the latest at `go_on_until`.
    """
    pause, interval_s = call.policy.pause, INTERVAL_S
    try:
        async with asyncio.timeout(left_s := call.go_on_until - call.context.clock.monotonic()):
            while True:
                others = [each for each in candidates(call, await endpoints_of(call)) if each is not call.endpoint]
                for endpoint in [call.endpoint, *others]:
                    if (text := await _text_at(call, endpoint, context_ids, ids)) is not None:
                        return text
                await asyncio.sleep(interval_s)
                interval_s = min(2 * interval_s, MOST_INTERVAL_S)
                if pause.mode is not None:  # which does not wait for the call
                    await pause.passed(left_s, is_resumed=True)
    except (TimeoutError, EngineError, NotFound) as error:
        raise LookupFailed("no endpoint returns texts") from error


async def _text_at(call: Call, endpoint: Endpoint, context_ids: Ids, ids: Ids) -> str | None:
    """Return the text of sampled ids; None if the endpoint is lost, asleep or does not respond in time. Raises LookupFailed."""
    lookups = PromptLookups(call.context.upstream, endpoint, call.plan.body, 0, call.plan.rollout_id)
    async with endpoint.texts_at_once:
        now = asyncio.get_running_loop().time
        if now() < endpoint.no_texts_until:
            return None
        try:
            async with asyncio.timeout(_TEXT_TIMEOUT_S):
                before = await lookups.get(Detokenize(context_ids))
                whole = await lookups.get(Detokenize(context_ids + ids))
        except (EngineError, TimeoutError):
            endpoint.no_texts_until = now() + _NO_TEXTS_S
            return None
    if isinstance(before, str) and isinstance(whole, str) and whole.startswith(before):
        return whole[len(before) :]
    raise LookupFailed("the text of the ids depends on what follows")


def candidates(call: Call, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Return the endpoints at which a call may go on: with logprobs of the same kind, and not held; its own one first."""
    own, held = call.endpoint, call.policy.pause.held
    order = [
        each
        for each in ranked(endpoints, call.rollout.rollout_id)
        if each.kind == own.kind
        and each.label not in held
        and each.settings.logprobs_mode == own.settings.logprobs_mode
    ]
    return sorted(order, key=lambda endpoint: (endpoint.health.is_ejected, endpoint is not call.endpoint))
