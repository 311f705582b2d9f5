"""Chat answers as SGLang 0.5.23 writes them.

Holds what only chat has: messages and deltas with `reasoning_content`, the flags that tell ids, `sglext`; it must
not hold sockets. Shapes are those of the cassettes `sglang-0.5.23/chat_*`.

Rule 1: a choice is opened by its role when its first token comes, and finished when all choices are.
Rule 2: logprobs go with the first event of their token. If there is none, they get one of their own where a parser
        is configured, and are lost where none is: those of the end of the turn always.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.generation import Token
from proxy.simulator.model import Manner
from proxy.simulator.options import Options
from proxy.simulator.parser import CallPiece, Parsed, PieceParser, parse
from proxy.simulator.prompts import ChatPrompt
from proxy.simulator.requests import Chat, Common
from proxy.simulator.sglang.requests import Flags
from proxy.simulator.sglang.wire import Behind, Scoring, experts, full_usage, matched, output_logprobs
from proxy.simulator.wire import Answer, Head, event, named_event

_IDS_EVENT = b"sglext_ids"


@dataclass(slots=True)
class _Stream:
    """One choice of a stream: what was told of it so far."""

    parser: PieceParser
    tokens: list[Token] = field(default_factory=list)
    called: bool = False


@dataclass(slots=True)
class SglangChatReply:
    """One chat answer in the making; see `wire.Reply`. `new_call_id` makes the ids of tool calls."""

    chat: Chat
    common: Common
    flags: Flags
    options: Options
    head: Head
    prompt: ChatPrompt
    scoring: Scoring
    behind: Behind
    new_call_id: Callable[[], str]
    _streams: list[_Stream] = field(init=False)

    def __post_init__(self) -> None:
        self._streams = [
            _Stream(PieceParser(thinking=self._thinking, tools=self._tools)) for _ in range(self.common.samples)
        ]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The one prompt."""
        return [(prefix_of(self.prompt.ids), self.prompt.manner)]

    @property
    def _thinking(self) -> bool:
        return self.options.has_parser and self.prompt.manner.thinking

    @property
    def _tools(self) -> bool:
        return self.options.has_parser and bool(self.chat.functions)

    def opening(self) -> list[bytes]:
        """Nothing yet: the role comes with the first token."""
        return []

    def events(self, index: int, token: Token) -> list[bytes]:
        """The events of one token: its thought, its content, its calls, and what is left of its logprobs."""
        stream = self._streams[index]
        opened = not stream.tokens
        stream.tokens.append(token)
        piece = stream.parser.feed(token.text, ended=token.finish_reason is not None)
        chunks = []
        if opened:
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            chunks.append(self._chunk(index, role, None))
        left = self._logprobs([token])
        if piece.reasoning:
            chunks.append(self._chunk(index, {"reasoning_content": piece.reasoning}, left))
            left = None
        if piece.content and self._tools:
            chunks.append(self._parsed_chunk(index, content=piece.content))
        elif piece.content:
            chunks.append(self._chunk(index, {"reasoning_content": None, "content": piece.content}, left))
            left = None
        for call in piece.calls:
            stream.called = True
            # The name has an event of its own, and so have the arguments behind it.
            parts = [CallPiece(call.place, call.name)] if call.name is not None else []
            parts += [CallPiece(call.place, None, call.arguments)] if call.arguments else []
            chunks += [self._parsed_chunk(index, call=part) for part in parts]
        if left is not None and self.options.has_parser:
            chunks.append(self._chunk(index, {"reasoning_content": None}, left))
        return [event(chunk) for chunk in chunks]

    def closing(self) -> list[bytes]:
        """The finish of each choice, the ids, and the usage, as they were asked for."""
        finishes = []
        for index, stream in enumerate(self._streams):
            reason, stop = self._finish(stream.tokens[-1], called=stream.called)
            finishes.append(event(self._chunk(index, {"reasoning_content": None}, None, reason, stop)))
        head = self.head.keys("chat.completion.chunk") | {"choices": []}
        extension = self._extension([stream.tokens for stream in self._streams])
        if extension:
            chunk = head | {"usage": None, "sglext": extension}
            finishes.append(named_event(_IDS_EVENT, chunk) if self.flags.framed else event(chunk))
        if self.common.include_usage:
            finishes.append(event(head | {"usage": full_usage(len(self.prompt.ids), self._sampled)}))
        return finishes

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """The chat completion."""
        answer = self.head.keys("chat.completion") | {
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "usage": full_usage(len(self.prompt.ids), sum(map(len, choices))),
            "metadata": self.behind.metadata(len(choices[0])),
        }
        extension = self._extension(choices)
        return answer | {"sglext": extension} if extension else answer

    def _choice(self, index: int, tokens: Sequence[Token]) -> Answer:
        parsed = parse("".join(token.text for token in tokens), thinking=self._thinking, tools=self._tools)
        reason, stop = self._finish(tokens[-1], called=bool(parsed.calls))
        choice = {
            "index": index,
            "message": self._message(parsed),
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
            "matched_stop": stop,
        }
        if self.flags.prompt_ids:
            choice["prompt_token_ids"] = self.prompt.ids
        if self.flags.return_token_ids:
            choice["response_token_ids"] = [token.id for token in tokens]
        if self.flags.return_meta_info:
            choice["meta_info"] = self._meta_info(tokens)
        return choice

    def _message(self, parsed: Parsed) -> Answer:
        message: Answer = {
            "role": "assistant",
            "content": parsed.content or "",
            "reasoning_content": parsed.reasoning,
        }
        if parsed.calls:
            message["tool_calls"] = [
                self._call(CallPiece(place, call.name, call.arguments)) for place, call in enumerate(parsed.calls)
            ]
        return message

    def _meta_info(self, tokens: Sequence[Token]) -> Answer:
        meta = self.behind.meta_info(self.prompt.ids, tokens)
        if self.chat.logprobs:
            count = self.chat.top_logprobs or 0
            meta |= {"input_token_logprobs": []} | output_logprobs(self.scoring, tokens, count, with_text=True)
        if self.flags.return_routed_experts and self.options.routed_experts:
            meta["routed_experts"] = experts(self.prompt.ids, tokens)
        return meta

    def _extension(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """`sglext`; empty if nothing in it was asked for."""
        extension: Answer = {}
        if self.flags.return_input_ids_in_sglext:
            extension["input_ids"] = self.prompt.ids
        if self.flags.return_output_ids_in_sglext:
            extension["output_ids"] = [[token.id for token in tokens] for tokens in choices]
        if self.flags.return_routed_experts and self.options.routed_experts and not self.flags.return_meta_info:
            extension["routed_experts"] = experts(self.prompt.ids, choices[0])
        return extension

    def _chunk(
        self,
        index: int,
        delta: Answer,
        logprobs: Answer | None,
        finish_reason: str | None = None,
        matched_stop: int | str | None = None,
    ) -> Answer:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "matched_stop": matched_stop,
        }
        chunk = self.head.keys("chat.completion.chunk") | {"choices": [choice]}
        if self.common.usage_on_chunks and finish_reason is None:
            chunk["usage"] = full_usage(len(self.prompt.ids), len(self._streams[index].tokens))
        return chunk

    def _parsed_chunk(self, index: int, *, content: str | None = None, call: CallPiece | None = None) -> Answer:
        """A chunk that the tool parser wrote, which leaves no key out."""
        told = None if call is None else [self._call(call)]
        delta: Answer = {"role": None, "content": content, "reasoning_content": None, "tool_calls": told}
        chunk = self._chunk(index, delta, None)
        chunk.setdefault("usage", None)
        return chunk

    def _call(self, piece: CallPiece) -> Answer:
        """A tool call, or more of its arguments: those have null for what was told before."""
        return {
            "id": None if piece.name is None else self.new_call_id(),
            "index": piece.place,
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }

    def _finish(self, token: Token, *, called: bool) -> tuple[str | None, int | str | None]:
        """The finish reason and what matched, which a tool call hides."""
        if token.finish_reason == "stop" and called:
            return "tool_calls", None
        return token.finish_reason, matched(token)

    def _logprobs(self, tokens: Sequence[Token]) -> Answer | None:
        if not self.chat.logprobs:
            return None
        return {"content": [self.scoring.entry(token, self.chat.top_logprobs or 0) for token in tokens]}

    @property
    def _sampled(self) -> int:
        return sum(len(stream.tokens) for stream in self._streams)
