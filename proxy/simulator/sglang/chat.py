"""SGLang's `/v1/chat/completions`, with `reasoning_content`, ids on request and `sglext`.

Shapes are those of the cassettes `sglang-0.5.23/*/chat_*`.

Rule 1: the role chunk of a choice comes with its first token, and all choices finish at the end of the stream.
Rule 2: logprobs are in the first chunk of their token. A token without a chunk gets one for its logprobs if a parser is
        configured; otherwise its logprobs are lost, always those of the end of the turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.generation import Token
from proxy.simulator.model import GenerationOptions
from proxy.simulator.options import Options
from proxy.simulator.parser import CallDelta, ParsedReply, StreamParser, parse
from proxy.simulator.prompts import ChatPrompt
from proxy.simulator.requests import ChatRequest, CommonFields
from proxy.simulator.sglang.requests import SglangFields
from proxy.simulator.sglang.wire import (
    LogprobFormatter,
    ResponseMetadata,
    full_usage,
    matched_stop,
    output_logprobs,
    routed_experts,
)
from proxy.simulator.wire import Head, JsonObject, event, named_event

_IDS_EVENT = b"sglext_ids"


@dataclass(slots=True)
class _StreamedChoice:
    """The state of one choice of a stream."""

    parser: StreamParser
    tokens: list[Token] = field(default_factory=list)
    has_calls: bool = False


@dataclass(slots=True)
class SglangChatResponse:
    """A chat completion; see `wire.Response`. `new_call_id` makes the ids of tool calls."""

    chat: ChatRequest
    common: CommonFields
    fields: SglangFields
    options: Options
    head: Head
    prompt: ChatPrompt
    formatter: LogprobFormatter
    metadata: ResponseMetadata
    new_call_id: Callable[[], str]
    _streamed: list[_StreamedChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._streamed = [
            _StreamedChoice(
                StreamParser(
                    reasoning=self._reasoning,
                    tools=self._tools,
                    reasoning_open=self.prompt.options.reasoning_open,
                    blocks=self.prompt.call_blocks,
                )
            )
            for _ in range(self.common.choices)
        ]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The one prompt."""
        return [(prefix_from(self.prompt.ids), self.prompt.options)]

    @property
    def _reasoning(self) -> bool:
        return self.options.has_parser and self.prompt.options.reasoning

    @property
    def _tools(self) -> bool:
        return self.options.has_parser and bool(self.chat.functions)

    def opening_events(self) -> list[bytes]:
        """Return no events: the role comes with the first token."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the chunks of one token: reasoning, content, calls, and logprobs that none of them has."""
        streamed = self._streamed[index]
        first = not streamed.tokens
        streamed.tokens.append(token)
        parsed = streamed.parser.feed(token.text, ended=token.finish_reason is not None)
        chunks = []
        if first:
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            chunks.append(self._chunk(index, role, None))
        unsent_logprobs = self._logprobs([token])
        if parsed.reasoning:
            chunks.append(self._chunk(index, {"reasoning_content": parsed.reasoning}, unsent_logprobs))
            unsent_logprobs = None
        if parsed.content and self._tools:
            chunks.append(self._parser_chunk(index, content=parsed.content))
        elif parsed.content:
            delta = {"reasoning_content": None, "content": parsed.content}
            chunks.append(self._chunk(index, delta, unsent_logprobs))
            unsent_logprobs = None
        for call in parsed.calls:
            streamed.has_calls = True
            # The name and the arguments are in separate chunks.
            parts = [CallDelta(call.index, call.name)] if call.name is not None else []
            parts += [CallDelta(call.index, None, call.arguments)] if call.arguments else []
            chunks += [self._parser_chunk(index, call=part) for part in parts]
        if unsent_logprobs is not None and self.options.has_parser:
            chunks.append(self._chunk(index, {"reasoning_content": None}, unsent_logprobs))
        return [event(chunk) for chunk in chunks]

    def closing_events(self) -> list[bytes]:
        """Return the finish of each choice, then ids and usage if they are requested; all have the id of the last choice."""
        events = []
        last = {"id": self._id_of(len(self._streamed) - 1)}
        for index, streamed in enumerate(self._streamed):
            end = streamed.tokens[-1]
            reason = self._finish(end, has_calls=streamed.has_calls)
            closing = self._chunk(index, {"reasoning_content": None}, None, reason, matched_stop(end))
            events.append(event(closing | last))
        head = self.head.keys("chat.completion.chunk") | last | {"choices": []}
        extension = self._extension([streamed.tokens for streamed in self._streamed])
        if extension:
            chunk = head | {"usage": None, "sglext": extension}
            events.append(named_event(_IDS_EVENT, chunk) if self.fields.framed else event(chunk))
        if self.common.include_usage:
            sampled = sum(len(streamed.tokens) for streamed in self._streamed)
            events.append(event(head | {"usage": full_usage(len(self.prompt.ids), sampled)}))
        return events

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return the chat completion."""
        payload = self.head.keys("chat.completion") | {
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "usage": full_usage(len(self.prompt.ids), sum(map(len, choices))),
            "metadata": self.metadata.metadata(len(choices[0])),
        }
        extension = self._extension(choices)
        return payload | {"sglext": extension} if extension else payload

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        text = "".join(token.text for token in tokens)
        blocks = self.prompt.call_blocks
        parsed = parse(text, reasoning=self._reasoning, tools=self._tools, blocks=blocks)
        reason = self._finish(tokens[-1], has_calls=bool(parsed.calls))
        choice = {
            "index": index,
            "message": self._message(parsed),
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
            "matched_stop": None if reason == "tool_calls" else matched_stop(tokens[-1]),  # streams have it
        }
        if self.fields.prompt_ids:
            choice["prompt_token_ids"] = self.prompt.unexpanded or self.prompt.ids
        if self.fields.return_token_ids:
            choice["response_token_ids"] = [token.id for token in tokens]
        if self.fields.return_meta_info:
            ended = {"finish_reason": {"type": reason, "matched": None}} if reason == "tool_calls" else {}
            choice["meta_info"] = self._meta_info(tokens) | ended
        return choice

    def _message(self, parsed: ParsedReply) -> JsonObject:
        message: JsonObject = {
            "role": "assistant",
            "content": parsed.content or "",
            "reasoning_content": parsed.reasoning,
        }
        if parsed.calls:
            message["tool_calls"] = [
                self._call(CallDelta(index, call.name, call.arguments)) for index, call in enumerate(parsed.calls)
            ]
        return message

    def _meta_info(self, tokens: Sequence[Token]) -> JsonObject:
        logprobs: JsonObject = {}
        if self.chat.logprobs:
            alternatives = self.chat.top_logprobs or 0
            sampled = output_logprobs(self.formatter, tokens, alternatives, with_text=True)
            logprobs = {"input_token_logprobs": []} | sampled
        meta = self.metadata.meta_info(self.prompt.ids, tokens, logprobs)
        if self.fields.return_routed_experts and self.options.routed_experts:
            meta["routed_experts"] = routed_experts(self.prompt.ids, tokens, self.fields.routed_experts_start_len or 0)
        return meta

    def _extension(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return `sglext`; empty if none of its fields are requested."""
        extension: JsonObject = {}
        if self.fields.return_input_ids_in_sglext:
            extension["input_ids"] = self.prompt.unexpanded or self.prompt.ids
        if self.fields.return_output_ids_in_sglext:
            extension["output_ids"] = [[token.id for token in tokens] for tokens in choices]
        if self.fields.return_routed_experts and self.options.routed_experts and not self.fields.return_meta_info:
            extension["routed_experts"] = routed_experts(self.prompt.ids, choices[0])
        return extension

    def _id_of(self, index: int) -> str:
        return self.head.id if index == 0 else f"{self.head.id}-{index}"

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        logprobs: JsonObject | None,
        finish_reason: str | None = None,
        matched: int | str | None = None,
    ) -> JsonObject:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "matched_stop": matched,
        }
        chunk = self.head.keys("chat.completion.chunk") | {"id": self._id_of(index), "choices": [choice]}
        if self.common.continuous_usage and finish_reason is None:
            chunk["usage"] = full_usage(len(self.prompt.ids), len(self._streamed[index].tokens))
        return chunk

    def _parser_chunk(self, index: int, *, content: str | None = None, call: CallDelta | None = None) -> JsonObject:
        """Return a chunk of the tool parser, which has all keys."""
        tool_calls = None if call is None else [self._call(call)]
        delta: JsonObject = {"role": None, "content": content, "reasoning_content": None, "tool_calls": tool_calls}
        chunk = self._chunk(index, delta, None)
        chunk.setdefault("usage", None)
        return chunk

    def _call(self, call: CallDelta) -> JsonObject:
        """Return a tool call, or more of its arguments, with id and name null."""
        return {
            "id": None if call.name is None else self.new_call_id(),
            "index": call.index,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _finish(self, token: Token, *, has_calls: bool) -> str | None:
        """Return the finish reason."""
        return "tool_calls" if token.finish_reason == "stop" and has_calls else token.finish_reason

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        if not self.chat.logprobs:
            return None
        return {"content": [self.formatter.chat_entry(token, self.chat.top_logprobs or 0) for token in tokens]}
