"""Feeders of calls: streams and responses of engines, requests of agents, and continuations."""

from array import array
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
from tests.support.feeding import ANSWERED, FEEDERS, FEW, FRAGMENTS, OPTIONS, Work, feeder, many, run, text
from tests.support.forests import make_choice, make_step
from tests.support.recorded import FACTS, plan_of, prepared_of
from tests.support.threaded import user

from proxy.continuation.bridge import continue_text, continue_turn
from proxy.continuation.turns import Match, Sampler, Turns, match, match_text
from proxy.continuation.types import Detokenize, Render
from proxy.errors import BadRequest, ProxyError
from proxy.protocols.dialects import DIALECTS, METHODS, TRANSLATORS
from proxy.protocols.dialects.base import ResolvedReferences
from proxy.protocols.dialects.gemini import (
    COUNT,
    GEMINI,
    STREAM,
    Target,
    alt_from,
    body_to_count,
    bound_fields,
    is_gemini,
    read_target,
)
from proxy.protocols.dialects.gemini.contents import sign
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.responses import resolve_references
from proxy.protocols.dialects.responses.request import rollout_of
from proxy.protocols.dialects.responses.tools import FreeformReader
from proxy.protocols.dialects.translation import PartialObject
from proxy.protocols.engines import ENGINES, PROBE_PATHS, identify_engine
from proxy.protocols.engines.base import CallOptions, ProbeResponse
from proxy.protocols.exchange import Exchange
from proxy.protocols.json_texts import (
    KnownPrompt,
    cut_tokens,
    fresh_bytes,
    prompt_of,
    read_lists,
    read_long,
    repeated_tokens,
)
from proxy.protocols.plan import (
    CHAT,
    Plan,
    PreparedPlans,
    SessionPlace,
    TranslatedCall,
    client_response_bytes,
    error_dialect_for,
    read_translated_call,
    template_of,
    with_continuation,
    with_image_tokens,
    with_session,
)
from proxy.protocols.response import EventParser, TokenAnnotations, read_event
from proxy.protocols.resume import (
    ends_in_stop,
    first_stop,
    noted,
    parsed_reply,
    refusal,
    restarted_plan,
    resumed_plan,
    shown_text,
    stop_strings,
    told_reply,
    with_text,
    withheld_text,
    without_event,
)
from proxy.protocols.sampling import Sampling, engine_model
from proxy.protocols.whole_response import WholeResponse, text_event
from proxy.trajectory.images import IMAGES
from proxy.trajectory.step import Step, Timing

# Streams and responses of engines


@cache
def plan(path: str, kind: str, *, stream: bool) -> Plan:
    """Return the plan of a call of this dialect to an engine of this kind."""
    streamed = {"stream": True, "stream_options": {"unknown": True}} if stream else {}
    if path in {CHAT, "/v1/completions", "/inference/v1/generate"}:
        own = {"prompt": "a"} if path == "/v1/completions" else {"messages": [user("a")]}
        own |= {"token_ids": [1], "sampling_params": {}} if path.startswith("/inf") else {}
        return plan_of(path, {"model": "m", **own, **streamed}, CallOptions(streaming="live"), kind=kind)
    if path == "/generate":
        rules = Sampling(default={"seed": 1})
        return plan_of(path, {"text": "a", "stream": stream}, CallOptions(sampling=rules), kind=kind)
    # Without logprobs, events of a stream repeat the one before.
    call = translated(path, {"stream": True, "include": ["reasoning.encrypted_content"]} if stream else {})
    body = call.read_for(ENGINES[kind].translation_options(OPTIONS, None))
    return call.recorded(plan_of(CHAT, body, CallOptions(streaming="live"), kind=kind))


def translated(path: str, fields: dict[str, Any] | None = None) -> TranslatedCall:
    """Return a call that is translated to chat."""
    bodies = {
        "/v1/messages": {"max_tokens": 9, "messages": [user("a")]},
        "/v1/responses": {"input": "a", "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        STREAM: {"contents": [{"role": "user", "parts": [{"text": "a"}]}]},
    }
    call = read_translated_call(path, {"model": "m", **bodies[path], **(fields or {})}, OPTIONS)
    assert call is not None
    return call


PATHS = (CHAT, "/v1/messages", "/v1/responses", STREAM)


def sent(path: str, kind: str, reads: list[bytes], *, stream: bool = True) -> Work:
    """Return the work of a call that receives its response in these reads."""
    of_call = plan(path, kind, stream=stream)
    content_type = "text/event-stream" if stream else "application/json"

    def work() -> None:
        exchange = Exchange(of_call, 200, content_type)
        for read in reads:
            exchange.response.feed(read)
        exchange.missing()
        step = exchange.finish(Timing(1.0)).step
        exchange.abort("lost", Timing(1.0), delivered=False)
        client_response_bytes(step)

    return work


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def delta(**fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": None, "token_ids": [7]}
    return event({**ANSWERED, "object": "chat.completion.chunk", "choices": [choice]})


END = event({**ANSWERED, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"data: [DONE]\n\n"


def _resumed(path: str, kind: str, pieces: bytes, fragment: str) -> Work:
    """Return the work of a call that is cut after these events, and resumed."""
    of_call = plan(path, kind, stream=True)

    def work() -> None:
        exchange = Exchange(of_call, 200, "text/event-stream")
        exchange.response.feed(pieces)
        _, step = exchange.cut("aborted", Timing(1.0))
        refusal(of_call, step, has_parser=None)
        shown = shown_text(step)
        ends_in_stop(shown, [fragment])
        withheld_text(shown, shown, [fragment], is_lost=True)
        before = noted(with_text(replace(step, prompts=(array("i", [1, 2]),)), shown), 1, ())
        text_event(of_call.engine.shape, "chat", dict(before.response or {}), shown)
        restarted_plan(of_call, before, None)
        rest = resumed_plan(of_call, before, None)
        rest.view.written({**ANSWERED, "choices": []})
        rest.view.is_aborted({"choices": [{"finish_reason": "abort"}]})
        rest.view.before.usage({"completion_tokens": 1})
        exchange = Exchange(rest, 200, "text/event-stream")
        exchange.response.feed(pieces + END)
        exchange.finish(Timing(1.0))

    return work


@feeder("a", " ", "{", '\\"')
def a_resumed_call_that_is_told(fragment: str, size: int) -> Work:
    """Its rest is withheld, and its reply is made of the ids of all parts."""
    of_call = plan(CHAT, "vllm", stream=False)
    message = {"role": "assistant", "content": text(fragment, size)}
    shown = {"choices": [{"index": 0, "message": {**message, "tool_calls": []}}]}
    ids = [7] * len(many(fragment, size))
    step = make_step("S1", [1, 2], make_choice(0, ids), response=shown)
    rest = resumed_plan(of_call, step, None, is_withheld=True, is_stream=True)
    replayed = replace(rest, view=replace(rest.view, replay=True))

    def work() -> None:
        stops = stop_strings({"stop": [fragment]})
        first_stop(message["content"] * 2, size, stops)
        without_event(step, {"choices": [{"delta": {"content": fragment}}]})
        of_call.engine.parse_request(of_call.body, [1, 2], ids)
        exchange = Exchange(replayed, 200, "application/json")
        exchange.response.feed(answer(message, len(ids), prompt_token_ids=[1, 2, *ids]))
        _, choice = exchange.rest()
        told_reply(replayed, choice, message["content"], len(ids), fragment)
        exchange.tell(parsed_reply({}, choice, {**message, "content": message["content"] * 2}, message, 2 * len(ids)))
        exchange.finish(Timing(1.0))

    return work


@feeder("a", " ", "{", '\\"')
def a_resumed_stream(fragment: str, size: int) -> Work:
    return _resumed(CHAT, "vllm", b"".join(delta(content=fragment) for _ in many(fragment, size)), fragment)


def _streams(name: str, kind: str, path: str) -> None:
    """Register feeders of a stream of this dialect."""

    def a_stream_of_pieces(fragment: str, size: int) -> Work:
        return sent(path, kind, [b"".join(delta(content=fragment) for _ in many(fragment, size)) + END])

    def a_stream_in_small_reads(fragment: str, size: int) -> Work:
        return sent(path, kind, [delta(content=fragment)] * len(many(fragment, size)) + [END])

    def a_stream_with_a_long_event(fragment: str, size: int) -> Work:
        whole = delta(role="assistant", content=text(fragment, size)) + END
        return sent(path, kind, [whole[at : at + 4096] for at in range(0, len(whole), 4096)])

    def a_stream_of_reasoning_and_text(fragment: str, size: int) -> Work:
        pieces = (delta(reasoning=fragment) + delta(content=fragment) for _ in many(fragment, size, 128))
        return sent(path, kind, [b"".join(pieces) + END])

    def a_stream_of_arguments(fragment: str, size: int) -> Work:
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
        piece = delta(tool_calls=[{"index": 0, "function": {"arguments": fragment}}])
        return sent(path, kind, [delta(tool_calls=[call]), piece * len(many(fragment, size)), END])

    def a_stream_of_arguments_before_the_name(fragment: str, size: int) -> Work:
        piece = delta(tool_calls=[{"index": 0, "function": {"arguments": fragment}}])
        return sent(path, kind, [piece * len(many(fragment, size)), END])

    def a_stream_of_calls(fragment: str, size: int) -> Work:
        calls = (
            delta(tool_calls=[{"index": at, "id": "c", "function": {"name": fragment, "arguments": "{}"}}])
            for at in many(fragment, size)
        )
        return sent(path, kind, [b"".join(calls) + END])

    def a_stream_of_mixed_events(fragment: str, size: int) -> Work:
        usual = b"".join(delta(content="a") for _ in range(9))
        mixed = (delta(content=fragment) + delta(refusal=fragment) for _ in many(fragment, size, 128))
        return sent(path, kind, [usual, b"".join(mixed) + END])

    for feed in (
        a_stream_of_pieces, a_stream_in_small_reads, a_stream_with_a_long_event, a_stream_of_reasoning_and_text,
        a_stream_of_arguments, a_stream_of_arguments_before_the_name, a_stream_of_calls, a_stream_of_mixed_events,
    ):  # fmt: skip
        fragments = FRAGMENTS if feed is a_stream_with_a_long_event and path == CHAT else ("a", " ", "{", '\\"')
        FEEDERS[f"{feed.__name__}_{name}"] = feed, fragments


for _name, _path in zip(("chat", "messages", "responses", "gemini"), PATHS, strict=True):
    _streams(_name, "vllm", _path)
_streams("sglang", "sglang", CHAT)
_streams("llamacpp", "llamacpp", CHAT)
_streams("plain", "plain", CHAT)


@feeder()
def the_bytes_of_a_stream(fragment: str, size: int) -> Work:
    raw = text(fragment, size).encode()
    return sent(CHAT, "vllm", [raw[at : at + 2**18] for at in range(0, len(raw), 2**18)])


@feeder("data: ", "\n", "\r", "\r\n", "data: a\r\n\r\n", "event: a\n")
def the_bytes_of_a_stream_in_small_reads(fragment: str, size: int) -> Work:
    raw = text(fragment, size).encode()
    reads = [raw[at : at + 7] for at in range(0, len(raw), 7)]

    def work() -> None:
        parser = EventParser()
        for read in reads:
            parser.feed(read)
        parser.finish()

    return work


@feeder("data: ", "data: a\r", "event: a\n", "data\n", "\r\n")
def an_event(fragment: str, size: int) -> Work:
    raw = text(fragment, size).encode()
    return lambda: read_event(raw)


@feeder("a", "0", '\\"')
def a_stream_of_completions(fragment: str, size: int) -> Work:
    choice = {"index": 0, "text": fragment, "logprobs": {"token_logprobs": [-1.0]}, "token_ids": [7]}
    pieces = event({**ANSWERED, "choices": [choice]}) * len(many(fragment, size))
    return sent("/v1/completions", "vllm", [pieces, b"data: [DONE]\n\n"])


@feeder("a", "0", '\\"')
def a_stream_of_generate(fragment: str, size: int) -> Work:
    choice = {"index": 0, "text": fragment, "logprobs": {"content": [{"logprob": -1.0}]}, "token_ids": [7]}
    pieces = event({"request_id": "a", "choices": [choice]}) * len(many(fragment, size))
    return sent("/inference/v1/generate", "vllm", [pieces, b"data: [DONE]\n\n"])


def native(fragment: str, ids: int, count: int) -> dict[str, Any]:
    """Return a choice of SGLang's `/generate` with these many ids of a choice that has `count`."""
    meta = {"id": "a", "finish_reason": None, "prompt_tokens": 1, "completion_tokens": count}
    entries = {"output_token_logprobs": [[-1.0, 7, None]] * ids}
    return {"text": fragment, "output_ids": [7] * ids, "prompt_token_ids": [1], "meta_info": meta | entries}


@feeder("a", "0", '\\"')
def a_stream_of_sglangs_generate_that_continues(fragment: str, size: int) -> Work:
    pieces = b"".join([event(native(fragment, 1, count + 1)) for count in many(fragment, size)])
    return sent("/generate", "sglang", [pieces, b"data: [DONE]\n\n"])


@feeder("a", "0", '\\"')
def a_long_event_of_sglangs_generate(fragment: str, size: int) -> Work:
    count = len(many(fragment, size))
    return sent("/generate", "sglang", [event(native(text(fragment, size), count, count)), b"data: [DONE]\n\n"])


@feeder("a", "0", '\\"')
def a_response_of_sglangs_generate(fragment: str, size: int) -> Work:
    return whole("/generate", "sglang", orjson.dumps([native(fragment, 1, 1) for _ in many(fragment, size)]))


def answer(message: dict[str, Any], ids: int = 1, **fields: Any) -> bytes:
    """Return an unstreamed chat response."""
    content = [{"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": []}] * ids
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    choice |= {"logprobs": {"content": content}, "token_ids": [7] * ids}
    usage = {"prompt_tokens": 2, "completion_tokens": ids, "total_tokens": ids + 2}
    return orjson.dumps({**ANSWERED, "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2], **fields})


def whole(path: str, kind: str, body: bytes) -> Work:
    return sent(path, kind, [body[at : at + 2**16] for at in range(0, len(body), 2**16)], stream=False)


def _responses(name: str, kind: str, path: str) -> None:
    """Register feeders of unstreamed responses."""

    def a_long_response(fragment: str, size: int) -> Work:
        return whole(path, kind, answer({"content": text(fragment, size), "reasoning": text(fragment, size)}))

    def a_response_with_calls(fragment: str, size: int) -> Work:
        called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": fragment}}]
        return whole(path, kind, answer({"content": None, "tool_calls": called * len(many(fragment, size))}))

    def a_response_with_long_arguments(fragment: str, size: int) -> Work:
        arguments = '{"input": "' + text(fragment, size)
        called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return whole(path, kind, answer({"content": None, "tool_calls": called}))

    def a_response_with_many_tokens(fragment: str, size: int) -> Work:
        return whole(path, kind, answer({"content": fragment}, len(many(fragment, size))))

    def a_response_with_choices(fragment: str, size: int) -> Work:
        choice = {"message": {"role": "assistant", "content": fragment}, "finish_reason": "stop", "token_ids": [7]}
        choices = [{"index": at, **choice} for at in many(fragment, size)]
        return whole(path, kind, answer({}, choices=choices))

    FEEDERS[f"{a_long_response.__name__}_{name}"] = a_long_response, FRAGMENTS if path == CHAT else FEW
    FEEDERS[f"{a_response_with_long_arguments.__name__}_{name}"] = (
        a_response_with_long_arguments, FRAGMENTS if path != CHAT else FEW,
    )  # fmt: skip
    for feed in (a_response_with_calls, a_response_with_many_tokens, a_response_with_choices):
        FEEDERS[f"{feed.__name__}_{name}"] = feed, FEW[:2]


for _name, _path in zip(("chat", "messages", "responses", "gemini"), PATHS, strict=True):
    _responses(_name, "vllm", _path)
_responses("sglang", "sglang", CHAT)
_responses("llamacpp", "llamacpp", CHAT)


@feeder()
def the_bytes_of_a_response(fragment: str, size: int) -> Work:
    return whole(CHAT, "vllm", b'{"choices":[' + text(fragment, size).encode())


@feeder("1,", "0", "-1", "true,", "]", "[")
def a_list_of_ids_in_a_response(fragment: str, size: int) -> Work:
    body = b'{"prompt_token_ids":[' + text(fragment, size).encode() + b'1],"choices":[{"index":0,"token_ids":[1,2],'
    body += b'"logprobs":{"content":[{"logprob":-1}]},"finish_reason":"stop"}]}'
    known = KnownPrompt(text(fragment, size // 2).encode(), array("i", [1]))
    view = plan(CHAT, "vllm", stream=False).view

    def work() -> None:
        read_lists(body, None)
        read_lists(body, known)
        tokens = body.replace(b"prompt_token_ids", b"tokens")
        cut_tokens(tokens, known)
        repeated_tokens(tokens, known)
        response = WholeResponse(view)
        response.feed(body)
        response.repeat(known)
        response.weight()

    return work


@feeder(*FEW)
def tokens_with_annotations(fragment: str, size: int) -> Work:
    count = len(many(fragment, size))
    response = orjson.loads(answer({"content": fragment}, count))
    of_call = plan(CHAT, "vllm", stream=False)
    notes = TokenAnnotations(pieces=lambda ids: [fragment] * len(ids), ids=True)
    return lambda: notes.annotate(response, of_call.engine.tokens("chat", {}, response))


@feeder(*FEW, " ", "{", "[1,", '"', ',"a":')
def sampled_arguments_in_small_pieces(fragment: str, size: int) -> Work:
    pieces = [fragment] * (size // len(fragment))

    def work() -> None:
        for parser in (PartialObject(), PartialObject()):
            found = []
            for piece in ['{"a":'][: parser is not None] + pieces:
                found += [parser.feed(piece)]
            parser.whole("".join(found))
        bare, reader = PartialObject(), FreeformReader()
        for piece in pieces:
            bare.feed(piece)
            reader.feed(piece)
        reader.end()

    return work


# Requests of agents


def read(path: str, fields: dict[str, Any], resolved: ResolvedReferences | None = None) -> Work:
    """Return the work of reading a body that is translated to chat."""
    translation = translated(path).translation
    body = {"model": "m", "max_tokens": 9, **fields} if path == "/v1/messages" else {"model": "m", **fields}

    def work() -> None:
        translation.references(body)
        with suppress(Exception):
            translation.read(body, OPTIONS, resolved or ResolvedReferences())
        read_translated_call(path, body, OPTIONS)

    return work


def sampled_calls(fragment: str, size: int) -> ResolvedReferences:
    """Return the references to a call with arguments of half of a size."""
    arguments = orjson.dumps({"a": text(fragment, size // 2)}).decode()
    return ResolvedReferences(calls={"c": {"name": "f", "arguments": arguments}})


@feeder(*FEW)
def a_messages_body(fragment: str, size: int) -> Work:
    count = len(many(fragment, size, 128))
    turns = [user(fragment), {"role": "assistant", "content": [{"type": "text", "text": fragment}]}]
    return read("/v1/messages", {"messages": turns * count, "system": text(fragment, size)})


@feeder(*FEW)
def blocks_of_a_messages_turn(fragment: str, size: int) -> Work:
    count = len(many(fragment, size, 128))
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    mixed = [{"type": "text", "text": fragment}, {"type": "thinking", "thinking": fragment}, called]
    results = [{"type": "tool_result", "tool_use_id": "c", "content": fragment}] * count
    turns = [{"role": "assistant", "content": mixed * count}, {"role": "user", "content": results}]
    return read("/v1/messages", {"messages": turns}, sampled_calls(fragment, size))


@feeder(*FEW)
def tools_of_a_messages_body(fragment: str, size: int) -> Work:
    tools = [{"name": f"{fragment}{at}", "input_schema": {}} for at in many(fragment, size)]
    names = [{"type": "tool_reference", "name": tool["name"]} for tool in tools]
    changes = [{"type": "tool_addition", "tool": name} for name in names]
    return read("/v1/messages", {"messages": [user("a"), {"role": "system", "content": changes}], "tools": tools})


def _step_id(at: int) -> str:
    return f"{at:026}"


@feeder(*FEW)
def items_of_a_responses_body(fragment: str, size: int) -> Work:
    items: list[dict[str, Any]] = []
    for at in many(fragment, size, 256):
        items += [
            {"type": "message", "role": "assistant", "id": f"msg_{_step_id(1)}_{at}", "content": fragment},
            {"type": "reasoning", "id": f"rs_{_step_id(1)}_{at}", "content": [{"type": "text", "text": fragment}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": fragment},
            {"type": "function_call_output", "call_id": "c", "output": fragment},
        ]
    return read("/v1/responses", {"input": items}, sampled_calls(fragment, size))


@feeder(*FEW)
def assistant_messages_of_a_responses_body(fragment: str, size: int) -> Work:
    message = {"role": "assistant", "id": f"msg_{_step_id(1)}_0", "content": text(fragment, 4096)}
    return read("/v1/responses", {"input": [message] * (size // 1024 + 1), "instructions": text(fragment, size)})


@feeder(*FEW)
def tools_of_a_responses_body(fragment: str, size: int) -> Work:
    tools = [{"type": "function", "name": f"{fragment}{at}", "parameters": {}} for at in many(fragment, size)]
    return read("/v1/responses", {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": tools}, *tools]})


@feeder(*FEW)
def references_of_a_responses_body(fragment: str, size: int) -> Work:
    calls = [{"id": "c", "function": {"name": "f", "arguments": fragment}}] * len(many(fragment, size))
    message = {"role": "assistant", "content": text(fragment, size), "tool_calls": calls}
    body, sent = {"input": [user(fragment)] * len(many(fragment, size))}, {"set": {"messages": [user(fragment)]}}
    step = make_step(_step_id(1), [], request=body, sent=sent, response={"choices": [{"message": message}]})
    return lambda: resolve_references(step, [step], {})


@feeder(*FEW)
def contents_of_a_gemini_body(fragment: str, size: int) -> Work:
    count = len(many(fragment, size, 256))
    calls = [{"functionCall": {"id": f"c{at}", "name": "f", "args": {}}} for at in range(count)]
    results = [{"functionResponse": {"name": "f", "response": {"output": fragment}}} for _ in range(count)]
    texts = [{"text": fragment}, {"text": fragment, "thought": True}] * count
    contents = [
        {"role": "user", "parts": [{"text": text(fragment, size)}]},
        {"role": "model", "parts": [*texts, *calls]},
        {"role": "user", "parts": results},
    ]
    return read(
        STREAM, {"contents": contents, "systemInstruction": {"parts": texts[:1] * count}}, sampled_calls("a", size)
    )


@feeder("a", "<think>")
def schemas_of_a_gemini_body(fragment: str, size: int) -> Work:
    fields = {f"{fragment}{at}": {"type": "STRING", "enum": [fragment]} for at in many(fragment, size)}
    schema: dict[str, Any] = {"type": "OBJECT", "properties": fields, "propertyOrdering": list(fields)}
    schema = {"type": "OBJECT", "properties": {text(fragment, size): schema}}
    declared = [{"name": "f", "parameters": schema}]
    contents = [{"role": "user", "parts": [{"text": "a"}]}]
    return read(STREAM, {"contents": contents, "tools": [{"functionDeclarations": declared}]})


@feeder(*FRAGMENTS)
def signatures_of_a_gemini_body(fragment: str, size: int) -> Work:
    signature = sign(call_id="c", thoughts=text(fragment, size))
    parts = [{"text": "a", "thoughtSignature": signature}, {"text": "b", "thoughtSignature": text(fragment, size)}]
    return read(STREAM, {"contents": [{"role": "model", "parts": parts}, {"role": "user", "parts": [{"text": "a"}]}]})


@feeder(*FEW)
def a_plan(fragment: str, size: int) -> Work:
    tools = [{"type": "function", "function": {"name": fragment}}] * len(many(fragment, size))
    body = {"model": "m", "messages": [user(fragment)] * len(many(fragment, size)), "tools": tools, "stop": [fragment]}
    images = [{"type": "image_url", "image_url": {"url": "data:," + text(fragment, size)}}]
    pictured = {**body, "messages": [{"role": "user", "content": images}]}
    return lambda: [plan_of(CHAT, each, kind=kind) for each in (body, pictured) for kind in FACTS]


# Continuation


def a_turn(reply: dict[str, Any], ids: list[int], step_id: str = "s1", index: int = 0, **facts: Any) -> Step:
    response = {"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]}
    body = {"model": "policy", "messages": [user("a")]}
    return make_step(
        step_id, [1, 2], ids, **{"request": body, "response": response, "index": index, "extra": {}, **facts}
    )


def continued(reply: dict[str, Any], new: dict[str, Any], shown: str, ids: list[int]) -> Work:
    """Return the work of continuing a turn with this reply and this rendered text."""
    step = a_turn(reply, ids)
    body = {"model": "policy", "messages": [user("a"), reply, new]}
    rendered = array("i", [1, 2, *[5] * len(ids), 99, 7])

    def answered(lookup: Any) -> Any:
        if isinstance(lookup, Render):
            words = sum(len(str(message)) for message in lookup.messages) % 3
            return array("i", [*rendered[:-2], *[8] * words, 99, 7])
        return shown if isinstance(lookup, Detokenize) else rendered

    def work() -> None:
        turns = Turns()
        turns.add(step)
        for mode in ("faithful", "append"):
            found = match(turns, body, Sampler("vllm", "policy"), mode=mode)
            if isinstance(found, Match):
                run(continue_turn(found, mode=mode, stops=()), answered)

    return work


@feeder()
def a_continued_reply(fragment: str, size: int) -> Work:
    content = text(fragment, size)
    return continued({"role": "assistant", "content": content, "reasoning": content}, user(content), content, [9, 99])


@feeder("a", "0Quartz", "0")
def a_continued_call(fragment: str, size: int) -> Work:
    calls = [
        {"id": f"c{at}", "function": {"name": f"{fragment}{at}", "arguments": "{}"}} for at in many(fragment, size)
    ]
    shown = "".join(call["function"]["name"] for call in calls)
    return continued({"role": "assistant", "content": None, "tool_calls": calls}, user("b"), shown, [9, 99])


@feeder("a")
def continued_ids(fragment: str, size: int) -> Work:
    return continued({"role": "assistant", "content": "a"}, user("b"), "a", [9] * (size // 4) + [99])


@feeder(*FEW)
def a_long_history(fragment: str, size: int) -> Work:
    count = len(many(fragment, size, 128))
    turns = Turns()
    messages = [user(fragment), {"role": "assistant", "content": fragment}] * count
    turns.add(
        a_turn({"role": "assistant", "content": "b"}, [9], request={"model": "policy", "messages": messages[:-1]})
    )
    body = {"model": "policy", "messages": [*messages, user("c")]}
    return lambda: match(turns, body, Sampler("vllm", "policy"), mode="append")


@feeder(*FEW)
def many_turns(fragment: str, size: int) -> Work:
    steps = [a_turn({"role": "assistant", "content": fragment}, [9], f"s{at}", at) for at in many(fragment, size, 256)]
    body = {"model": "policy", "messages": [user("a"), {"role": "assistant", "content": fragment}, user("b")]}

    def work() -> None:
        turns = Turns()
        for step in steps:
            turns.add(step)
        match(turns, body, Sampler("vllm", "policy"), mode="append")
        turns.sampled_call(fragment)

    return work


@feeder(*FEW)
def choices_of_a_turn(fragment: str, size: int) -> Work:
    """Each choice has the tools of the call."""
    count = int((size // 16) ** 0.5) + 1
    choices = [make_choice(at, [9]) for at in range(count)]
    response = {
        "choices": [{"index": at, "message": {"role": "assistant", "content": fragment}} for at in range(count)]
    }
    tools = [{"function": {"name": fragment}}] * len(many(fragment, size))
    step = make_step("s", [1], *choices, request={"messages": [user("a")], "tools": tools}, response=response, index=0)
    return lambda: Turns().add(step)


@feeder(*FEW)
def a_continued_text(fragment: str, size: int) -> Work:
    prompt = text(fragment, size)
    facts = {"dialect": "completions", "response": {"choices": [{"index": 0, "text": fragment}]}}
    step = a_turn({}, [9, 99], request={"model": "policy", "prompt": prompt}, **facts)
    body = {"model": "policy", "prompt": prompt + fragment * 2}

    def work() -> None:
        turns = Turns()
        turns.add(step)
        found = match_text(turns, body, Sampler("vllm", "policy"))
        if found is not None and not isinstance(found, str):
            run(
                continue_text(found, body["prompt"]), lambda lookup: fragment if isinstance(lookup, Detokenize) else [1]
            )

    return work


@feeder(*FEW, '{"error":')
def errors_of_engines(fragment: str, size: int) -> Work:
    body = text(fragment, size)
    exchanges = [plan(path, "vllm", stream=False) for path in PATHS]

    def work() -> None:
        for of_call in exchanges:
            exchange = Exchange(of_call, 500, "application/json")
            exchange.response.feed(body.encode())
            exchange.finish(Timing(1.0))
            Exchange(of_call, 500, "").fail(body, Timing(1.0))
            with_continuation(of_call, prompt_of(array("i", [1]) * size, KnownPrompt(b"1", array("i", [1]))), {})
            of_call.error_events(body.encode())
        error = BadRequest(body, param=fragment)
        for dialect in (*DIALECTS.values(), *TRANSLATORS.values(), *METHODS.values()):
            dialect.error(error)
            if hasattr(dialect, "engine_error"):
                dialect.engine_error(500, body)
        pictured = replace(exchanges[0], extra={IMAGES: {"ids": []}})
        with_image_tokens(pictured, [1] * size)
        with_session(
            replace(pictured, body={"messages": [user(body)] * 4}), SessionPlace("s", None, of_thread=True), {}
        )
        for name in ("vllm", "sglang", "llamacpp", "plain"):
            ENGINES[name].prompt_ids_fields("chat", [1] * size)
            ENGINES[name].must_send_usage("chat", {body: body})
            ENGINES[name].can_replay("chat", {body: body})
            ENGINES[name].must_replay("chat", {body: body}, CallOptions())

    return work


@feeder("a", "{", "[1],", '"')
def a_call_of_a_form_that_is_known(fragment: str, size: int) -> Work:
    long = text(fragment, size)
    rules = Sampling(default={"seed": 1}, cap={"max_tokens": 9})
    parts = [{"role": "user", "content": [{"type": "text", "text": fragment}]}] * len(many(fragment, size))
    bodies = {
        CHAT: {"messages": parts, "stop": [long]},
        "/v1/completions": {"prompt": long, "stop": [long]},
        "/inference/v1/generate": {"token_ids": [1] * size, "sampling_params": {"stop": [long]}},
    }
    raw = orjson.dumps(bodies[CHAT])

    def work() -> None:
        for path, body in bodies.items():
            template = template_of(body, DIALECTS[path], rules, has_lists=path == CHAT)
            PreparedPlans(2**20).keep(orjson.dumps(template), prepared_of(path, body, CallOptions(sampling=rules)))
            plan_of(path, body, CallOptions(sampling=rules))
        long = read_long(raw, None)
        fresh_bytes(raw + b" ", long)
        read_long(raw + b" ", long)

    return work


@feeder(*FEW)
def a_replayed_stream(fragment: str, size: int) -> Work:
    streamed = {"model": "m", "messages": [user("a")], "stream": True}
    of_call = plan_of(CHAT, streamed, CallOptions(streaming="replay"), kind="vllm")
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": fragment}}]
    body = answer({"content": text(fragment, size), "tool_calls": calls * len(many(fragment, size))})

    def work() -> None:
        exchange = Exchange(of_call, 200, "application/json")
        exchange.response.feed(body)
        exchange.finish(Timing(1.0))

    return work


@feeder("a", "/", "%2F", ":", "&")
def paths_and_names(fragment: str, size: int) -> Work:
    long = text(fragment, size)
    bodies = {path: ProbeResponse(200, long, {"data": [{"id": long}], "version": long}) for path in PROBE_PATHS}
    names = {f"{fragment}{at}*": long for at in many(fragment, size)}
    headers = {"x-goog-api-client": long}

    def work() -> None:
        is_gemini(f"/v1/models/{long}", headers)
        with suppress(ProxyError):
            read_target(f"/v1beta/models/{long}:generateContent", "POST")
        with suppress(ProxyError):
            alt_from({"alt": long})
        bound_fields(Target(long, STREAM), "sse")
        body_to_count({"generateContentRequest": {"contents": [long]}}, Target(long, COUNT))
        error_dialect_for(f"/v1/messages/{long}", headers)
        error_dialect_for(f"/v1/models/{long}", headers)
        for engine in ENGINES.values():
            engine.for_traits(identify_engine(bodies)).traits_requests(identify_engine(bodies))
            engine.translation_options(OPTIONS, long)
        engine_model({"model": long}, names, Sampling().over(Sampling(override={"a": 1})))
        rollout_of(f"resp_{_step_id(1)}.{long}")
        for dialect in (GEMINI, MESSAGES):
            dialect.models([{"id": long}])

    return work
