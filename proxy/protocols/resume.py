"""Which calls can be resumed after their engine ended them early, and the request for the rest.

The rest is sampled with the prompt and all ids that were sampled of the call as its prompt. So a call is resumed only if
nothing else of its state matters: what an engine counts, parses or matches in the sampled tokens starts anew.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import orjson

from proxy.protocols.dialects.base import GENERATES, Json, ResponseRenderer, is_on
from proxy.protocols.engines.base import changes_distribution, has_grammar, tools_of
from proxy.protocols.json_texts import prompt_of
from proxy.protocols.parts import PARSED, Before, Told
from proxy.protocols.plan import Plan
from proxy.trajectory.images import IMAGES
from proxy.trajectory.step import CUT, RESUMED, Step, answers_of

# Why a call is not resumed.
Refusal = Literal[
    "choices", "grammar", "penalties", "images", "echo", "field", "ids", "parser", "character", "stop", "length",
    "finished", "tokenize", "max_resumes", "timeout", "endpoint",
]  # fmt: skip

# The fields of chat and completions whose effect on the rest is known (vLLM 0.32.0, SGLang 0.5.23). A field that is not
# among them may have any effect on an engine that knows it.
_EXACT: Final = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
     "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logit_bias",
     "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs",
     "top_logprobs", "return_token_ids", "return_meta_info", "return_prompt_token_ids", "return_input_ids_in_sglext",
     "return_output_ids_in_sglext", "input_ids", "prompt_token_ids", "kv_transfer_params", "tools", "tool_choice",
     "parallel_tool_calls", "response_format", "chat_template", "chat_template_kwargs", "add_generation_prompt",
     "reasoning_effort", "include_reasoning", "user", "metadata", "store", "service_tier", "priority", "request_id", "rid",
     "session_id", "routing_key", "cache_salt", "add_special_tokens", "echo"}
)  # fmt: skip
# And of the endpoints that sample from ids, and of their `sampling_params`.
_EXACT_OF_GENERATE: Final = frozenset(
    {"model", "token_ids", "input_ids", "text", "stream", "stream_options", "output_mode", "return_token_ids",
     "return_prompt_token_ids", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs",
     "request_id", "rid", "priority", "cache_salt", "routing_key", "sampling_params"}
)  # fmt: skip
_EXACT_OF_SAMPLING: Final = frozenset(
    {"max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
     "logit_bias", "logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
     "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty"}
)  # fmt: skip
_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")  # they count the sampled tokens
_BOUNDS: Final = ("max_tokens", "max_completion_tokens", "min_tokens")
_NUMBERS: Final = (*_BOUNDS, "seed")
_INT_OR_NONE: Final = (int, type(None))
_BRACKETS: Final = frozenset("<>[]{}|")
_MOST_STOPS: Final = 64
_MOST_STOP: Final = 256  # characters: a longer one is not searched for
_DEFAULT_MAX_TOKENS: Final = {"completions": 16, "sglang_generate": 128}  # vLLM 0.32.0, SGLang 0.5.23
_MOST_SEED: Final = 2**63
_NO_SEED: Final = -1  # vLLM 0.32.0


def refusal(plan: Plan, step: Step | None, *, has_parser: bool | None) -> Refusal | None:
    """Return why a call cannot be resumed exactly from its partial step; None if it can. Without a step: from any.

    `has_parser`: whether the engine has a parser of reasoning or tools; None: unknown.
    """
    body, name, options = fields_of(plan), plan.dialect.name, plan.response_options
    is_generate = name in GENERATES
    asks_ids = options.token_ids or (options.logprobs and name == "completions") or plan.view.tokens is not None
    asks_meta = "return_meta_info" in body and "meta_info" not in plan.view.strip_rules.keys
    others = body.keys() - _EXACT
    if is_generate:
        sampling = plan.dialect.sampling(plan.body)
        others = (plan.body.keys() - _EXACT_OF_GENERATE) | (sampling.keys() - _EXACT_OF_SAMPLING)
    has_others = any(body[field] is not None for field in others)
    # An engine may read "7" or 7.0 as a number; each stop string is searched for in the text.
    is_odd = any(type(body.get(name)) not in _INT_OR_NONE for name in _NUMBERS) or len(stop_strings(body)) > _MOST_STOPS
    # Each event of a stream repeats all of the reply; a list of prompts gets a list of replies.
    is_odd |= name == "sglang_generate" and (is_on(body.get("stream")) or _is_batch(plan.request))
    has_parsed = step is not None and _is_parsed(step)
    is_parsed = name == "chat" and (has_parsed or (offers_tools(body) and has_parser is not False))
    refusals: dict[Refusal, bool] = {
        "choices": options.choices != 1,
        "echo": is_on(body.get("echo")),
        "images": IMAGES in plan.extra,
        "grammar": has_grammar(body, ()),
        "penalties": changes_distribution({**body, **plan.sampling}, _PENALTIES),  # null is the default
        "field": (asks_ids and not is_generate) or asks_meta or has_others or is_odd,
        "stop": is_generate and bool(stop_strings(body)),  # it may straddle the cut
        "ids": plan.engine.prompt_ids_fields(name, []) is None or (step is not None and not _has_ids(step)),
        "finished": step is not None and any(choice.finish_reason not in {None, "abort"} for choice in step.choices),
        "length": step is not None and is_at_limit(plan, step),
        "parser": is_parsed,  # last: the only one that `Engine.parse_request` may resolve
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


def fields_of(plan: Plan) -> Mapping[str, Any]:
    """Return the fields of the sent body, with those of `sampling_params` by the names of other dialects."""
    if plan.dialect.name not in GENERATES:
        return plan.body
    return {**plan.body, "sampling_params": None, **plan.dialect.sampling(plan.body)}


def _is_batch(body: Json) -> bool:
    """Return whether a body of SGLang's `/generate` has its prompt in a list."""
    ids = body.get("input_ids")
    return isinstance(body.get("text"), list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))


def _has_ids(step: Step) -> bool:
    """Return whether the step has the prompt, and a right id for each sampled token."""
    if len(step.prompts) != 1 or len(step.choices) > 1:
        return False
    return not step.sampled or not {*step.problems} - CUT


def _is_parsed(step: Step) -> bool:
    message = answers_of(step).get(0, {}).get("message")
    return isinstance(message, dict) and any(message.get(name) for name in PARSED)


def offers_tools(body: Mapping[str, Any]) -> bool:
    """Return whether a parser of tools reads the reply to a chat body."""
    return bool(tools_of(body)) and body.get("tool_choice") != "none"


def _left(plan: Plan, count: int) -> Json | None:
    """Return the limits of the rest after `count` sampled tokens of this plan; None if nothing is left.

    Without a limit, chat and vLLM's generate sample up to the end of the context window, and others a number of tokens.
    """
    body, fields, default = fields_of(plan), {}, _DEFAULT_MAX_TOKENS.get(plan.dialect.name)
    # SGLang's generate has no limit with null.
    is_default = body.get("max_tokens") is None if plan.dialect.name == "completions" else "max_tokens" not in body
    if default is not None and is_default:
        body = {**body, "max_tokens": default}
    for name in _BOUNDS:
        bound = body.get(name)
        if type(bound) is int:
            fields[name] = max(bound - count, 0)
            if name != "min_tokens" and bound <= count:
                return None
    return fields


def is_at_limit(plan: Plan, step: Step) -> bool:
    """Return whether a partial step has all tokens that its call may sample."""
    return _left(plan, step.sampled - (0 if plan.before is None else plan.before.sampled)) is None


def stop_strings(body: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of a body."""
    stops = body.get("stop")
    listed = stops if isinstance(stops, list) else [stops]
    return [stop for stop in listed if isinstance(stop, str) and stop]


def ends_in_stop(text: str, stops: Iterable[str]) -> bool:
    """Return whether a text ends with a stop string, which SGLang does not see in an aborted call, or a beginning of one."""
    for stop in stops:
        ending = text[-min(len(stop), _MOST_STOP) :]
        if len(stop) > _MOST_STOP or any(stop.startswith(ending[at:]) for at in range(len(ending))):
            return True
    return False


def shown_text(step: Step) -> str:
    """Return the text of the response of a partial step."""
    answer = answers_of(step).get(0, {})
    message = answer.get("message")
    text = message.get("content") if isinstance(message, dict) else answer.get("text")
    return text if isinstance(text, str) else ""


def without_event(step: Step, event: Json) -> Step:
    """Return a partial step whose response lacks the text of its last event, which the client has not received."""
    (choice,) = event["choices"]
    (answer,) = (step.response or {})["choices"]
    if answer.get("message") is None:
        return with_text(step, shown_text(step).removesuffix(choice.get("text") or ""))
    delta, message = choice.get("delta") or {}, {**answer["message"]}
    for name, value in delta.items():
        if name != "role" and isinstance(value, str) and isinstance(message.get(name), str):
            message[name] = message[name].removesuffix(value)
    if delta.get("tool_calls"):
        message["tool_calls"] = _calls_before(message.get("tool_calls") or [], delta["tool_calls"])
    return replace(step, response={**(step.response or {}), "choices": [{**answer, "message": message}]})


def _calls_before(calls: list[Json], deltas: list[Json]) -> list[Json]:
    """Return tool calls without the deltas of one event: without those that begin in it."""
    kept = [*calls]
    for delta in deltas:
        index, function = delta["index"], delta.get("function") or {}
        if index < len(kept):
            own = kept[index]["function"]
            arguments = (own.get("arguments") or "").removesuffix(function.get("arguments") or "")
            kept[index] = {**kept[index], "function": {**own, "arguments": arguments}}
            if function.get("name"):
                del kept[index:]
    return kept


def with_text(step: Step, text: str) -> Step:
    """Return a partial step whose response has this text."""
    (answer,) = (step.response or {})["choices"]
    message = answer.get("message")
    content = {"text": text} if message is None else {"message": {**message, "content": text}}
    return replace(step, response={**(step.response or {}), "choices": [{**answer, **content}]})


def withheld_text(text: str, shown: str, stops: Collection[str], *, is_lost: bool) -> str | None:
    """Return what the client has not received of the text of the sampled ids; None if the engine shows another text.

    With stop strings vLLM (0.32.0) withholds the last characters, and shows them when it aborts a call. What is withheld is
    only known to be text if it has no brackets, which special tokens have.
    """
    rest = text.removeprefix(shown)
    if not rest or (is_lost and stops and len(rest) < len(text) and not _BRACKETS.intersection(rest)):
        return rest if text.startswith(shown) else None
    return None


def first_stop(text: str, start: int, stops: Iterable[str]) -> tuple[int, str] | None:
    """Return where the first stop string after a position ends in a text, and the string; None if there is none."""
    places = [(at + len(stop), stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(places, key=lambda place: place[0], default=None)


def told_reply(plan: Plan, choice: Json, text: str, count: int, stop: str | None) -> Told:
    """Return the reply with this text. `choice` is the engine's of the last part; `stop`: the stop string that ends it."""
    content = {"message": {**choice["message"], "content": text}} if "message" in choice else {"text": text}
    if stop is None:
        return Told(content, count)
    name = plan.engine.shape.choice[0]
    return Told({**content, "finish_reason": "stop", name: stop}, count)


def parsed_reply(body: Json, choice: Json, message: Json, shown: Json, count: int) -> Told:
    """Return the reply with the message that the engine's parsers make of it. Calls that the client knows keep their ids."""
    calls = message.get("tool_calls") or []
    known = shown.get("tool_calls") or []
    calls = [{**call, "id": known[at]["id"]} if at < len(known) else call for at, call in enumerate(calls)]
    fields: Json = {"message": {**message, "tool_calls": calls} if calls else message}
    if calls and choice.get("finish_reason") == "stop" and body.get("tool_choice") in {None, "auto"}:
        fields["finish_reason"] = "tool_calls"  # vLLM 0.32.0 makes it of a chat call, not when it derenders one
    return Told(fields, count)


def resumed_plan(
    plan: Plan, before: Step, renderer: ResponseRenderer | None, *, is_withheld: bool = False, is_stream: bool = False
) -> Plan:
    """Return the plan of the rest of a call. `renderer`: of the stream that the client reads already, if it is translated.

    `is_withheld` and `is_stream`: see `Before`.

    A seeded engine would draw the same random numbers again: the seed of the rest is moved by the sampled tokens.
    """
    ids = before.choices[0].ids if before.choices else before.prompts[0][:0]
    prompt = prompt_of(before.prompts[0] + ids, None)
    fields = plan.engine.prompt_ids_fields(plan.dialect.name, orjson.Fragment(b"[%b]" % prompt.text)) or {}
    sampling = _left(plan, len(ids)) or {}
    if type(seed := fields_of(plan).get("seed")) is int:
        sampling["seed"] = seed if seed == _NO_SEED else (seed + len(ids)) % _MOST_SEED
    fields |= plan.dialect.place_sampling(plan.body, sampling, ())[0]
    view = Before(before.response or {}, len(before.prompts[0]), len(ids), prompt.ids, is_withheld, is_stream)
    return replace(
        plan,
        body={**plan.body, **fields},
        prompt=prompt,
        before=before,
        view=replace(plan.view, before=view, renderer=renderer or plan.view.renderer),
    )


def restarted_plan(plan: Plan, shown: Step, renderer: ResponseRenderer | None) -> Plan:
    """Return the plan of a call that is sampled again from its start, though its client has received the head of a stream."""
    view = Before(shown.response or {})
    return replace(plan, view=replace(plan.view, before=view, renderer=renderer or plan.view.renderer))


def noted(step: Step, resumed: int, attempts: Collection[Mapping[str, Any]]) -> Step:
    """Return a partial step with the number of times that its call was resumed, and the parts that were cut."""
    return replace(step, extra={**step.extra, RESUMED: resumed, "attempts": list(attempts)})
