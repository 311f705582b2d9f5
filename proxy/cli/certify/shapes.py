"""The shapes of calls that `tokentape certify` and the tests with real engines make, as literal requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Body = dict[str, Any]
# compared: the agent's response must be what the engine alone returns. translated: the engine has no such endpoint, or
# another one under this path. refused: the engine is expected to reject it, byte for byte the same through the proxy.
Treatment = Literal["compared", "translated", "refused"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
VLLM_GENERATE: Final = "/inference/v1/generate"
SGLANG_GENERATE: Final = "/generate"
# Special tokens in `logit_bias`, in place of their ids, which depend on the model.
END_OF_THINKING: Final = "</think>"
END_OF_TURN: Final = "<|im_end|>"
END_OF_TEXT: Final = "<|endoftext|>"
WORDS: Final = (END_OF_THINKING, END_OF_TURN, END_OF_TEXT)
SEED: Final = 7
TOKENS: Final = 24  # of a reply, unless its shape requires another length
QUESTION: Final = [{"role": "user", "content": "Count to three."}]
TOOL: Final[Body] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one to a number.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
CALL: Final = r'<tool_call>\n\{"name": "add", "arguments": \{"x": [1-9][0-9]{2}\}\}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a call. `topic` is the part of the table in which it is.

    `more` has the fields that are named differently by each engine: with it, only those engines get the shape.
    `draws`: its sampling parameters are part of the shape, so they are never replaced by greedy ones.
    """

    topic: str
    name: str
    path: str
    body: Body
    more: Mapping[str, Body] = field(default_factory=dict)
    modes: tuple[bool, ...] = (False, True)  # whole, streamed
    treatment: Treatment = "compared"
    draws: bool = False

    def is_for(self, kind: str) -> bool:
        """Return whether this engine type gets the shape."""
        return not self.more or kind in self.more

    def body_for(self, kind: str, model: str, words: Mapping[str, int]) -> Body:
        """Return the body for a model, with the ids of its special tokens. A bias of one that it lacks is dropped."""
        body = {**self.body, **self.more.get(kind, {})}
        if self.path != SGLANG_GENERATE:  # it has no such field
            body = {"model": model, **body}
        return biased(body, words)


def biased(body: Body, words: Mapping[str, int]) -> Body:
    """Return a body with the ids of special tokens in its `logit_bias`."""
    if "logit_bias" not in body:
        return body
    bias = {str(words[word]): value for word, value in body["logit_bias"].items() if word in words}
    rest = {key: value for key, value in body.items() if key != "logit_bias"}
    return rest | ({"logit_bias": bias} if bias else {})


def constraint(pattern: str, grammar: str) -> dict[str, Body]:
    """Return the fields that constrain the text, by engine type; llama.cpp has grammars and no patterns."""
    found: dict[str, Body] = {"vllm": {"structured_outputs": {"regex": pattern}}, "sglang": {"regex": pattern}}
    return found | ({"llamacpp": {"grammar": grammar}} if grammar else {})


_OPTIONS: Final = ("more", "modes", "treatment", "draws")


def _shape(topic: str, name: str, path: str, fields: dict[str, Any]) -> Shape:
    body = {key: value for key, value in fields.items() if key not in _OPTIONS}
    return Shape(topic, name, path, body, **{key: fields[key] for key in _OPTIONS if key in fields})


def _chat(topic: str, name: str, **fields: Any) -> Shape:
    return _shape(topic, name, CHAT, {"messages": QUESTION, "seed": SEED, "max_tokens": TOKENS, **fields})


def _text(name: str, topic: str = "completions", **fields: Any) -> Shape:
    return _shape(
        topic, name, COMPLETIONS, {"prompt": "Once upon a time", "seed": SEED, "max_tokens": TOKENS, **fields}
    )


def _vllm(name: str, **fields: Any) -> Shape:
    """Return a call of vLLM's own endpoint, with token ids in and out."""
    body = {"token_ids": IDS, "sampling_params": _SAMPLING, **fields}
    return Shape("native generate", name, VLLM_GENERATE, body, {"vllm": {}})


def _sglang(name: str, **fields: Any) -> Shape:
    """Return a call of SGLang's own endpoint. SGLang 0.5.23 ignores seeds by default, so the call is greedy."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 24, "temperature": 1, "top_k": 1}, **fields}
    body = {key: value for key, value in body.items() if value is not None}
    return Shape("native generate", name, SGLANG_GENERATE, body, {"sglang": {}})


THINKING_OFF: Final = {"chat_template_kwargs": {"enable_thinking": False}}
# Calls that are forced by their text: vLLM's and SGLang's parsers for Hermes and Qwen read them, others show them as text.
_FORCED: Final[dict[str, Any]] = {"tools": [TOOL], "max_tokens": 100, "more": constraint(CALL, "")}
_REASONING: Final[Body] = {"logit_bias": {END_OF_THINKING: 6.5}, "max_tokens": 60}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "add", "schema": TOOL["function"]["parameters"]}}
_CONVERSATION: Final = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello <|im_end|>"},
    {"role": "assistant", "content": "Hi  there 🦙"},
    *QUESTION,
]
_RESULT: Final = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]
_EMOJI: Final = constraint("a🦙🎉", 'root ::= "a🦙🎉"')
_SAMPLING: Final = {"seed": SEED, "max_tokens": 24}
IDS: Final = [46, 77, 98, 105]  # in the vocabulary of any model

SHAPES: Final[tuple[Shape, ...]] = (
    _chat("chat", "chat"),
    _chat("chat", "chat greedy", temperature=0),
    _chat("chat", "chat sampled", temperature=0.7, top_p=0.9, top_k=50, draws=True),
    _chat("chat", "temperature 1", temperature=1, draws=True),
    _chat("chat", "conversation", messages=_CONVERSATION),
    _chat("chat", "one token", max_tokens=1),
    _chat("chat", "stop string", stop=["e"], **THINKING_OFF),
    _chat("chat", "untrimmed stop", stop=["e"], more={"sglang": {"no_stop_trim": True}}, **THINKING_OFF),
    _chat("chat", "stop token", stop_token_ids=list(range(300, 4000, 7)), more={"vllm": {}, "sglang": {}}, **THINKING_OFF),
    _chat("chat", "special tokens", logit_bias={END_OF_TURN: 6.0}, more={"sglang": {"skip_special_tokens": False}},
          **THINKING_OFF),
    _chat("chat", "penalties", presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.2),
    _chat("chat", "split characters", more=_EMOJI, **THINKING_OFF),
    _chat("chat", "cut inside a character", more=constraint("🦙", ""), max_tokens=2, **THINKING_OFF),
    _chat("chat", "extras", unknown_field={"a": [1, 2.5, None]}, user="u", metadata=None),
    _chat("several choices", "chat n=2", n=2),
    _text("completions n=2", "several choices", n=2),
    _text("two prompts", "several choices", prompt=["Once upon", "The quick brown fox"], n=2),
    _chat("reasoning", "reasoning", **_REASONING),
    _chat("reasoning", "reasoning in content", **_REASONING, more={"sglang": {"separate_reasoning": False}}),
    _chat("reasoning", "reasoning in one event", **_REASONING, more={"sglang": {"stream_reasoning": False}}),
    _chat("reasoning", "no thinking", **THINKING_OFF),
    _chat("reasoning", "reasoning hidden", include_reasoning=False, **_REASONING, more={"vllm": {}}),
    _chat("tools", "tool call", **_FORCED, **THINKING_OFF),
    _chat("tools", "tool call after thinking", **_FORCED, logit_bias={END_OF_THINKING: 100}),
    _chat("tools", "one tool call", parallel_tool_calls=False, **_FORCED, **THINKING_OFF),
    _chat("tools", "required tool", tools=[TOOL], tool_choice="required", max_tokens=60, **THINKING_OFF),
    _chat("tools", "named tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}},
          max_tokens=60, **THINKING_OFF),
    _chat("tools", "tools unused", tools=[TOOL], **THINKING_OFF),
    _chat("tools", "tool result", messages=_RESULT, tools=[TOOL], **THINKING_OFF),
    _chat("structured output", "structured", more=constraint("[a-z]{3} [0-9]{2}", 'root ::= [a-z] [a-z] [a-z] " " [0-9] [0-9]'),
          **THINKING_OFF),
    _chat("structured output", "JSON schema", response_format=_SCHEMA, max_tokens=60, **THINKING_OFF),
    _chat("structured output", "JSON object", response_format={"type": "json_object"}, **THINKING_OFF),
    _chat("requested by the agent", "logprobs asked", logprobs=True, top_logprobs=2),
    _chat("requested by the agent", "ids asked", more={key: {"return_token_ids": True} for key in ("vllm", "sglang")}),
    _chat("requested by the agent", "tool call, logprobs asked", logprobs=True, **_FORCED, **THINKING_OFF),
    _chat("requested by the agent", "tool call, usage asked", stream_options={"include_usage": True}, modes=(True,), **_FORCED,
          **THINKING_OFF),
    _chat("requested by the agent", "usage asked", stream_options={"include_usage": True}, modes=(True,)),
    _chat("requested by the agent", "prompt ids in", more={"sglang": {"input_ids": IDS}}),
    _chat("requested by the agent", "meta info asked", more={"sglang": {"return_meta_info": True}}),
    _chat("requested by the agent", "cached tokens asked", more={"sglang": {"return_cached_tokens_details": True}}),
    _chat("requested by the agent", "verbose asked", more={"llamacpp": {"verbose": True}}, modes=(False,)),
    _text("prompt logprobs", "requested by the agent", prompt=IDS, more={"vllm": {"prompt_logprobs": 0}}, modes=(False,)),
    _text("completions logprobs 0", "requested by the agent", logprobs=0),
    _text("completions logprobs 2", "requested by the agent", logprobs=2),
    _text("completions"),
    _text("ids in", prompt=IDS),
    _text("completions stop", stop=["e"]),
    _text("completions, split characters", more=_EMOJI),
    _text("no tokens", max_tokens=0),
    _text("echo", echo=True),
    _vllm("generate"),
    _vllm("generate n=2", sampling_params={**_SAMPLING, "n": 2}),
    _vllm("generate, stop string", sampling_params={**_SAMPLING, "stop": ["e"]}, output_mode="text"),
    _vllm("generate, logprobs asked", sampling_params={**_SAMPLING, "logprobs": 2}),
    _vllm("generate, ids asked", return_token_ids=True),
    _sglang("generate"),
    _sglang("generate with logprobs", return_logprob=True, logprob_start_len=0),
    _sglang("generate from text", input_ids=None, text="Once upon a time"),
    _sglang("generate a batch", input_ids=[IDS, IDS[:2]]),
    Shape("translated dialects", "Messages", "/v1/messages",
          {"messages": QUESTION, "max_tokens": 24, "system": "Be brief."}, treatment="translated"),
    Shape("translated dialects", "Responses", "/v1/responses",
          {"input": "Count to three.", "max_output_tokens": 24, "store": False}, treatment="translated"),
    _chat("errors", "invalid temperature", temperature=-1, treatment="refused"),
    _chat("errors", "no messages", messages=[], treatment="refused"),
    # No id outside the vocabulary: SGLang 0.5.23 on a CPU exits (seen).
)  # fmt: skip
