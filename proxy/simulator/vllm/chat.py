"""Chat answers: messages in, a chat completion or its chunks out, as vLLM 0.32 writes them.

Holds what only chat has: the template, forced tool calls, parsed messages and deltas; it must not hold
sockets. Shapes are those of the cassettes `chat_*`, `tool_*` and `reasoning/*`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.generation import Scored, Token
from proxy.simulator.model import Manner, Model
from proxy.simulator.parser import CallPiece, Piece, PieceParser, parse
from proxy.simulator.prompts import ChatPrompt
from proxy.simulator.requests import Chat, Common
from proxy.simulator.wire import Answer, Head, event, usage


@dataclass(slots=True)
class ChatReply:
    """One chat answer in the making; see `wire.Reply`. `new_call_id` makes the ids of tool calls."""

    chat: Chat
    common: Common
    model: Model
    head: Head
    prompt: ChatPrompt
    new_call_id: Callable[[], str]
    _parsers: list[PieceParser] = field(init=False)
    _ids: list[list[int]] = field(init=False)
    _called: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        choices = range(self.common.samples)
        self._parsers = [PieceParser(thinking=self._thinking, tools=self._tools) for _ in choices]
        self._ids = [[] for _ in choices]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The one prompt."""
        return [(prefix_of(self.prompt.ids), self.prompt.manner)]

    @property
    def _thinking(self) -> bool:
        return self.prompt.manner.thinking

    @property
    def _tools(self) -> bool:
        return bool(self.chat.functions)

    @property
    def _shows_ids(self) -> bool:
        # With a parser configured, vLLM tells neither ids nor logprobs of a reply whose reasoning is hidden
        # (cassette `tool_include_reasoning_false`).
        return bool(self.common.return_token_ids) and self.chat.include_reasoning

    @property
    def _shows_logprobs(self) -> bool:
        return bool(self.chat.logprobs) and self.chat.include_reasoning

    @property
    def _told_prompt(self) -> Answer:
        return {
            "prompt_token_ids": self.prompt.ids if self.common.return_token_ids else None,
            "prompt_text": self.prompt.text if self.chat.return_prompt_text else None,
        }

    def opening(self) -> list[bytes]:
        """The role chunk of each choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            event(self._chunk({"index": index, **choice}, 0) | self._told_prompt)
            for index in range(self.common.samples)
        ]

    def events(self, index: int, token: Token) -> list[bytes]:
        """The chunk of one token.

        One whose text is withheld is sent only for its ids or logprobs.
        """
        ids = self._ids[index]
        ids.append(token.id)
        ended = token.finish_reason is not None
        piece = self._parsers[index].feed(token.text, ended=ended)
        if piece.calls:
            self._called.add(index)
        delta = self._delta(piece)
        if not delta and not ended and not self._shows_ids and not self._shows_logprobs:
            return []
        choice: Answer = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([token]),
            "finish_reason": self._finish(token, called=index in self._called),
        }
        if ended:
            choice["stop_reason"] = token.stop_reason
        choice["token_ids"] = [token.id] if self._shows_ids else None
        chunk = self._chunk(choice, len(ids))
        if ended and not self.common.include_usage:
            chunk["system_fingerprint"] = self.head.fingerprint
        return [event(chunk)]

    def closing(self) -> list[bytes]:
        """The usage chunk, if it was asked for."""
        if not self.common.include_usage:
            return []
        details = {"completion_tokens_details": self._details(self._ids)} if self._thinking else {}
        told = {
            "choices": [],
            "usage": usage(len(self.prompt.ids), sum(map(len, self._ids)), **details),
            "system_fingerprint": self.head.fingerprint,
        }
        return [event(self.head.keys("chat.completion.chunk") | told)]

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """The chat completion."""
        ids = [[token.id for token in tokens] for tokens in choices]
        counted = usage(
            len(self.prompt.ids),
            sum(map(len, ids)),
            prompt_tokens_details=None,
            completion_tokens_details=self._details(ids) if self._thinking else None,
        )
        asked = self.common.prompt_logprobs
        scores = None if asked is None else self.model.prompt_logprobs(self.prompt.ids, asked)
        return (
            self.head.keys("chat.completion")
            | {
                "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": self.head.fingerprint,
                "usage": counted,
                "prompt_logprobs": scores,
            }
            | self._told_prompt
            | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        )

    def _choice(self, index: int, tokens: Sequence[Token]) -> Answer:
        parsed = parse("".join(token.text for token in tokens), thinking=self._thinking, tools=self._tools)
        message: Answer = {
            "role": "assistant",
            "content": "" if parsed.calls and self.chat.named_tool else parsed.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": self.new_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        message["reasoning"] = parsed.reasoning if self.chat.include_reasoning else None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finish(tokens[-1], called=bool(parsed.calls)),
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens] if self._shows_ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choice: Answer, sampled: int) -> Answer:
        chunk = self.head.keys("chat.completion.chunk") | {"choices": [choice]}
        if self.common.usage_on_chunks:
            chunk["usage"] = usage(len(self.prompt.ids), sampled, completion_tokens_details=None)
        return chunk

    def _delta(self, piece: Piece) -> Answer:
        """The delta of a chunk; empty if the piece adds nothing that is to be seen."""
        delta: Answer = {}
        if piece.content or piece.calls:
            delta["content"] = piece.content or None
            if not self.chat.include_reasoning:
                delta["reasoning"] = None
        if piece.reasoning and self.chat.include_reasoning:
            delta["reasoning"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in piece.calls]
        return delta

    def _call_delta(self, call: CallPiece) -> Answer:
        opened: Answer = {}
        function: Answer = {}
        if call.name is not None:
            opened = {"id": self.new_call_id(), "type": "function"}
            function["name"] = call.name
        if call.arguments:
            function["arguments"] = call.arguments
        return opened | {"index": call.place, "function": function}

    def _finish(self, token: Token, *, called: bool) -> str | None:
        if token.finish_reason == "stop" and called and self.chat.named_tool is None:
            return "tool_calls"
        return token.finish_reason

    def _logprobs(self, tokens: Sequence[Token]) -> Answer | None:
        if not self._shows_logprobs:
            return None
        count, by_id = self.prompt.manner.alternatives, bool(self.common.return_tokens_as_token_ids)
        return {
            "content": [
                # Its bytes are those of its string in any case, and those of the others of what stands there.
                _scored(token.scores[0], by_id=by_id)
                | {"bytes": list(token.scores[0].string.encode())}
                # vLLM cuts the list that begins with the token itself, so top_logprobs 1 tells nothing else.
                | {"top_logprobs": [_scored(each, by_id=by_id) for each in token.scores[:count]]}
                for token in tokens
            ]
        }

    def _details(self, choices: Sequence[Sequence[int]]) -> dict[str, Any]:
        """How many tokens of all choices were thought, without the two that open and close it."""
        close = self.model.tokenizer.id("</think>")
        thoughts = [list(takewhile(close.__ne__, ids[1:])) for ids in choices]
        return {"reasoning_tokens": sum(map(len, thoughts))}


def _scored(score: Scored, *, by_id: bool) -> Answer:
    name = score.name(by_id=by_id)
    return {"token": name, "logprob": score.logprob, "bytes": list(name.encode())}
