"""vLLM's `/v1/chat/completions`: messages in, a chat completion or its chunks out.

Shapes are those of the cassettes `chat_*`, `tool_*` and `reasoning/*`, recorded from vLLM 0.32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.generation import Token, TokenLogprob
from proxy.simulator.model import GenerationOptions, Model
from proxy.simulator.parser import CallDelta, Delta, StreamParser, parse
from proxy.simulator.prompts import ChatPrompt
from proxy.simulator.requests import ChatRequest, CommonFields
from proxy.simulator.wire import Head, JsonObject, event, usage


@dataclass(slots=True)
class ChatResponse:
    """A chat completion; see `wire.Response`. `new_call_id` makes the ids of tool calls."""

    chat: ChatRequest
    common: CommonFields
    model: Model
    head: Head
    prompt: ChatPrompt
    new_call_id: Callable[[], str]
    _parsers: list[StreamParser] = field(init=False)
    _ids: list[list[int]] = field(init=False)
    _with_calls: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        choices = range(self.common.choices)
        self._parsers = [
            StreamParser(
                reasoning=self._reasoning,
                tools=self._tools,
                reasoning_open=self.prompt.options.reasoning_open,
                blocks=self.prompt.call_blocks,
            )
            for _ in choices
        ]
        self._ids = [[] for _ in choices]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The one prompt."""
        return [(prefix_from(self.prompt.ids), self.prompt.options)]

    @property
    def _reasoning(self) -> bool:
        return self.prompt.options.reasoning

    @property
    def _tools(self) -> bool:
        return bool(self.chat.functions)

    @property
    def _has_ids(self) -> bool:
        # With a parser configured, vLLM returns neither ids nor logprobs of a reply whose reasoning is hidden
        # (cassette `tool_include_reasoning_false`).
        return bool(self.common.return_token_ids) and self.chat.include_reasoning

    @property
    def _has_logprobs(self) -> bool:
        return bool(self.chat.logprobs) and self.chat.include_reasoning

    @property
    def _prompt_keys(self) -> JsonObject:
        return {
            "prompt_token_ids": self.prompt.ids if self.common.return_token_ids else None,
            "prompt_text": self.prompt.text if self.chat.return_prompt_text else None,
        }

    def opening_events(self) -> list[bytes]:
        """Return the role chunk of each choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            event(self._chunk({"index": index, **choice}, 0) | self._prompt_keys)
            for index in range(self.common.choices)
        ]

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the chunk of one token; a token whose text is held back has one only for its ids or logprobs."""
        ids = self._ids[index]
        ids.append(token.id)
        ended = token.finish_reason is not None
        parsed = self._parsers[index].feed(token.text, ended=ended)
        if parsed.calls:
            self._with_calls.add(index)
        delta = self._delta(parsed)
        if not delta and not ended and not self._has_ids and not self._has_logprobs:
            return []
        choice: JsonObject = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([token]),
            "finish_reason": self._finish(token, has_calls=index in self._with_calls),
        }
        if ended:
            choice["stop_reason"] = token.stop_reason
        choice["token_ids"] = [token.id] if self._has_ids else None
        chunk = self._chunk(choice, len(ids))
        if ended and not self.common.include_usage:
            chunk["system_fingerprint"] = self.head.fingerprint
        return [event(chunk)]

    def closing_events(self) -> list[bytes]:
        """Return the usage chunk, if it is requested."""
        if not self.common.include_usage:
            return []
        details = {"completion_tokens_details": self._details(self._ids)} if self._reasoning else {}
        chunk = {
            "choices": [],
            "usage": usage(len(self.prompt.ids), sum(map(len, self._ids)), **details),
            "system_fingerprint": self.head.fingerprint,
        }
        return [event(self.head.keys("chat.completion.chunk") | chunk)]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return the chat completion."""
        ids = [[token.id for token in tokens] for tokens in choices]
        total = usage(
            len(self.prompt.ids),
            sum(map(len, ids)),
            prompt_tokens_details=None,
            completion_tokens_details=self._details(ids) if self._reasoning else None,
        )
        alternatives = self.common.prompt_logprobs
        scores = None if alternatives is None else self.model.prompt_logprobs(self.prompt.ids, alternatives)
        return (
            self.head.keys("chat.completion")
            | {
                "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": self.head.fingerprint,
                "usage": total,
                "prompt_logprobs": scores,
            }
            | self._prompt_keys
            | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        )

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        text = "".join(token.text for token in tokens)
        blocks = self.prompt.call_blocks
        parsed = parse(text, reasoning=self._reasoning, tools=self._tools, blocks=blocks)
        message: JsonObject = {
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
            "finish_reason": self._finish(tokens[-1], has_calls=bool(parsed.calls)),
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens] if self._has_ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choice: JsonObject, sampled: int) -> JsonObject:
        chunk = self.head.keys("chat.completion.chunk") | {"choices": [choice]}
        if self.common.continuous_usage:
            chunk["usage"] = usage(len(self.prompt.ids), sampled, completion_tokens_details=None)
        return chunk

    def _delta(self, parsed: Delta) -> JsonObject:
        """Return the delta of a chunk; empty if nothing visible is added."""
        delta: JsonObject = {}
        if parsed.content or parsed.calls:
            delta["content"] = parsed.content or None
            if not self.chat.include_reasoning:
                delta["reasoning"] = None
        if parsed.reasoning and self.chat.include_reasoning:
            delta["reasoning"] = parsed.reasoning
        if parsed.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in parsed.calls]
        return delta

    def _call_delta(self, call: CallDelta) -> JsonObject:
        identity: JsonObject = {}
        function: JsonObject = {}
        if call.name is not None:
            identity = {"id": self.new_call_id(), "type": "function"}
            function["name"] = call.name
        if call.arguments:
            function["arguments"] = call.arguments
        return identity | {"index": call.index, "function": function}

    def _finish(self, token: Token, *, has_calls: bool) -> str | None:
        if token.finish_reason == "stop" and has_calls and self.chat.named_tool is None:
            return "tool_calls"
        return token.finish_reason

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        if not self._has_logprobs:
            return None
        count, by_id = self.prompt.options.alternatives, bool(self.common.return_tokens_as_token_ids)
        return {
            "content": [
                # `bytes` of the token are those of its string, even by id; `bytes` of alternatives are those of `token`.
                _entry(token.logprobs[0], by_id=by_id)
                | {"bytes": list(token.logprobs[0].string.encode())}
                # vLLM truncates the list that begins with the token itself, so top_logprobs 1 has no alternative.
                | {"top_logprobs": [_entry(entry, by_id=by_id) for entry in token.logprobs[:count]]}
                for token in tokens
            ]
        }

    def _details(self, choices: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the number of reasoning tokens of all choices, without the opening and closing tags."""
        close = self.model.tokenizer.id("</think>")
        start = 0 if self.prompt.options.reasoning_open else 1
        reasoning = [list(takewhile(close.__ne__, ids[start:])) for ids in choices]
        return {"reasoning_tokens": sum(map(len, reasoning))}


def _entry(logprob: TokenLogprob, *, by_id: bool) -> JsonObject:
    name = logprob.name(by_id=by_id)
    return {"token": name, "logprob": logprob.logprob, "bytes": list(name.encode())}
