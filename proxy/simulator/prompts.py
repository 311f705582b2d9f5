"""The prompts of requests: text and ids to continue, how many tokens the window leaves, and the replies that are forced.

Prompts of chats can be ids: vLLM's `kv_transfer_params.prompt_token_ids` and SGLang's `input_ids`. A prompt has one
placeholder for each image, which vLLM 0.32 repeats: here as often as the option `image_tokens`, and a few times more,
depending on the data. The text of a message can contain the placeholder as well, as with real models.
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import orjson

from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.model import GenerationOptions, Model
from proxy.simulator.options import Faults, Options
from proxy.simulator.parser import CallBlocks, ToolCall
from proxy.simulator.requests import Body, ChatRequest, CommonFields, CompletionsRequest, PrepareMessages, read_chat
from proxy.simulator.sampler import RandomStream
from proxy.simulator.script import Script, ScriptedCall, Turn
from proxy.simulator.template import (
    COMPACT,
    PLACEHOLDER,
    SPACED,
    Message,
    call_text,
    json_text,
    prepare_for_vllm,
    render,
    to_json,
)

if TYPE_CHECKING:
    from proxy.simulator.jinja_template import JinjaTemplate

_PARAM: Final = "kv_transfer_params.prompt_token_ids"


def reused_ids(body: Body, model: Model, *, has_field: bool = False) -> list[int] | None:
    """Return the ids of a vLLM chat in place of its rendered messages; None if the request has none.

    `has_field`: the ids may be in the field `prompt_token_ids`, which 0.32 ignores. They are ignored with `echo`, and if a
    message has content that is not text (vLLM 0.32, renderers/online_renderer.py, `_reused_prompt_token_ids`). Raises
    RequestError if the ids are not a list of ids of the vocabulary, or the list is empty.
    """
    params = body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if has_field and ids is None:
        ids = body.get("prompt_token_ids")
    if ids is None or body.get("echo") or _has_other_than_text(body.get("messages")):
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise invalid_value(message, _PARAM)
    model.check_ids(ids)
    return ids


def _has_other_than_text(messages: Any) -> bool:
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


def with_fault(ids: Sequence[int] | None, faults: Faults) -> Sequence[int] | None:
    """Return the ids that the engine uses in place of these: the same ids unless it has a fault.

    Raises RequestError if the engine's fault is to reject ids.
    """
    if not ids or faults.prompt_ids is None:
        return ids
    if faults.prompt_ids == "rejected":
        raise invalid_value("The engine does not accept prompts that are given as ids.")
    return None if faults.prompt_ids == "ignored" else [*ids[:-1], (ids[-1] + 1) % 256]


_SIZES: Final = 4


def with_placeholders(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return the messages with a text in place of each image, and the URLs of the images.

    Raises RequestError if an image has no URL, or data that is not base64.
    """
    urls: list[str] = []
    prepared = list(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_image, content)):
            parts = [{"type": "text", "text": PLACEHOLDER} if _is_image(part) else part for part in content]
            urls += [_url(part) for part in content if _is_image(part)]
            prepared[index] = {**message, "content": parts}
    return prepared, urls


def expanded(ids: Sequence[int], token: int, urls: Sequence[str], length: int) -> list[int]:
    """Return the ids with the first placeholders repeated, one for each image."""
    found: list[int] = []
    lengths = iter([length + crc32(url.encode()) % _SIZES for url in urls])
    for i in ids:
        found += [i] * (next(lengths, 1) if i == token else 1)
    return found


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in {"image_url", "input_image"}


def _url(part: Message) -> str:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise invalid_value("image_url must be a URL.", "messages")
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:"):
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error as error:
            raise invalid_value(str(error)) from error
    return url


_REASONING, _REASONING_END = "<think>", "</think>"
_EMPTY_REASONING: Final = re.compile(r"^\s*<think>\s*</think>\s*")
# Of a chat, but not of `/tokenize` (vLLM 0.32, `TokenizeChatRequest`).
_CHAT_ONLY: Final = {"documents", "reasoning_effort"}
_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, which vLLM keeps for completions


def max_tokens_after(prompt_length: int, requested: int | None, common: CommonFields, options: Options) -> int:
    """Return the number of tokens that may be sampled after a prompt, by the engine's rules.

    Raises RequestError if the prompt or the requested length does not fit into the context window.
    """
    rule = sglang_max_tokens if options.shape == "sglang" else vllm_max_tokens
    return rule(prompt_length, requested, common, options)


def vllm_max_tokens(prompt_length: int, requested: int | None, common: CommonFields, options: Options) -> int:
    """See `max_tokens_after`; by the rules of vLLM 0.32."""
    window = options.max_model_len
    if prompt_length > window:
        message = (
            f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
            f"{window + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise invalid_value(message, "input_tokens", window + 1)
    if requested is not None and requested > window:
        message = (
            f"max_tokens={requested} cannot be greater than max_model_len={window}. Please request fewer output tokens."
        )
        raise invalid_value(message, "max_tokens", requested)
    left = window - prompt_length
    max_tokens = left if requested is None else min(requested, left)
    if max_tokens < 1:
        raise invalid_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if common.min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {common.min_tokens}."
        raise invalid_value(message, "min_tokens", common.min_tokens)
    return max_tokens


def sglang_max_tokens(prompt_length: int, requested: int | None, common: CommonFields, options: Options) -> int:
    """See `max_tokens_after`; by the rules of SGLang 0.5.23 (cassette `err_overlong`)."""
    window = options.max_model_len
    if prompt_length >= window:
        message = f"The input ({prompt_length} tokens) is longer than the model's context length ({window} tokens)."
        raise invalid_value(message)
    if requested is not None and prompt_length + requested > window:
        message = (
            f"Requested token count exceeds the model's maximum context length of {window} tokens. You requested a "
            f"total of {prompt_length + requested} tokens: {prompt_length} tokens from the input messages and "
            f"{requested} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
        raise invalid_value(message)
    max_tokens = window - prompt_length if requested is None else requested
    if max_tokens < 1:
        raise invalid_value(f"max_new_tokens must be at least 1, got {max_tokens}.")
    if common.min_tokens > max_tokens:
        raise invalid_value(f"min_new_tokens must be in [0, max_new_tokens({max_tokens})], got {common.min_tokens}.")
    return max_tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of one prompt, and the options of its choices."""

    ids: Sequence[int]
    options: GenerationOptions
    text: str = ""
    call_blocks: CallBlocks = field(default_factory=dict)  # the texts that are tool calls in a reply
    unexpanded: Sequence[int] | None = None  # the ids with one placeholder for each image, None without images
    reasoning_open: bool = False  # the prompt has the beginning of the reasoning
    reasoning_closed: bool = False  # and its end


def render_chat(chat: ChatRequest, template: "JinjaTemplate | None" = None) -> str:
    """Return the text of a chat's prompt.

    Raises RequestError if the text has a lone surrogate, which JSON in `arguments` can contain, or the template fails.
    """
    if template is None:
        text = render(
            chat.messages,
            tools=chat.tools or (),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            enable_thinking=chat.enable_thinking,
        )
    else:
        text = template.render(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.template_variables,
            source=chat.chat_template,
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise invalid_value(message) from error  # the message of vLLM's tokenizer
    return text


def chat_prompt(
    chat: ChatRequest,
    common: CommonFields,
    model: Model,
    options: Options,
    *,
    ids: Sequence[int] | None = None,
) -> Prompt:
    """Return the prompt of a chat; `ids` replace the ids of the rendered text.

    Raises RequestError if the prompt does not fit into the context window, or the script fails the request.
    """
    unexpanded, urls = None, list[str]()
    if options.image_tokens:
        messages, urls = with_placeholders(chat.messages)
        chat = replace(chat, messages=messages)
    if ids is None:
        text = render_chat(chat, model.template)
        ids = model.encode(text, add_special_tokens=bool(chat.add_special_tokens))
        if urls:
            unexpanded = ids
            ids = expanded(ids, model.tokenizer.id(PLACEHOLDER), urls, options.image_tokens)
        starts: Sequence[int] | None = [len(ids)] if chat.add_generation_prompt else None
    else:
        text = model.tokenizer.decode(ids) if chat.return_prompt_text else ""
        starts = reply_starts(chat, ids, model)
    start = starts[-1] if starts else len(ids)
    can_open = model.template is not None and chat.add_generation_prompt
    is_open = can_open and model.tokenizer.decode(ids[:start][-8:]).rstrip().endswith(_REASONING)
    begun = model.tokenizer.decode(ids[start:])
    requested = chat.max_completion_tokens if chat.max_completion_tokens is not None else common.max_tokens
    replies = Replies(chat, model, reasoning_open=is_open)
    function = replies.function
    generation = GenerationOptions(
        max_tokens=max_tokens_after(len(ids), requested, common, options),
        alternatives=chat.top_logprobs or 0,
        make_reply=None if function is None else partial(replies.call, function),
        ends_with_call=function is not None,
        reasoning=(chat.enable_thinking is True or is_open) and chat.add_generation_prompt,
        reasoning_open=is_open,
        starts=starts,
    )
    if options.script is not None:
        generation = _scripted(generation, options.script, replies)
    is_closed = _REASONING_END in begun
    return Prompt(ids, generation, text, replies.blocks, unexpanded, is_open or _REASONING in begun, is_closed)


def _scripted(generation: GenerationOptions, script: Script, replies: "Replies") -> GenerationOptions:
    """Return the options of the script's next turn. Raises RequestError if it fails the request."""
    turn, cut = script.turn(replies.chat.messages)
    return replace(
        generation,
        make_reply=partial(replies.scripted, turn),
        is_scripted=True,
        reasoning=bool(turn.think),
        ends_with_call=bool(turn.call),
        cut=cut,
    )


_MAX_OPENING: Final = 3


def reply_starts(chat: ChatRequest, ids: Sequence[int], model: Model) -> Sequence[int] | None:
    """Return where in the last turn of a prompt a reply may begin: after the last ids of the template's generation prompt.

    None if the prompt does not show it: its last turn begins with text that is not sampled.
    """
    if not chat.add_generation_prompt:
        return None
    shortest = replace(chat, messages=[], tools=None, tool_choice=None)
    try:
        first, second = (
            model.encode(render_chat(replace(shortest, messages=[{"role": "user", "content": text}]), model.template))
            for text in ("a", "b")
        )
    except RequestError:  # the template requires other messages
        return None
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
    opening = [token for token, _ in pairs][:_MAX_OPENING][::-1]
    size = len(opening)
    last_turn = takewhile(lambda at: at == len(ids) or ids[at] not in model.eos_ids, range(len(ids), size - 1, -1))
    return [at for at in last_turn if opening and list(ids[at - size : at]) == opening][::-1] or None


@dataclass(slots=True)
class Replies:
    """Makes the ids of replies to one chat: tool calls, and the turns of scripts.

    A real model samples calls as its template repeats them, and a parser for this syntax reads them. The simulated model
    takes the syntax from the template itself: it renders the chat with and without the calls. Calls in the syntax of
    `proxy.simulator.template` are parsed as text; calls in other syntax are recognized as a whole, hence only if they are
    complete: `blocks` are their texts.
    """

    chat: ChatRequest
    model: Model
    reasoning_open: bool = False  # the prompt has the tag that opens the reasoning
    blocks: dict[str, Sequence[ToolCall]] = field(default_factory=dict)

    @property
    def function(self) -> dict[str, Any] | None:
        """The function that the reply calls; None unless a user's message or `tool_choice` leads to a call."""
        chat = self.chat
        required = chat.tool_choice == "required" or chat.named_tool is not None
        after_user = chat.messages[-1:] and chat.messages[-1].get("role") == "user" and chat.add_generation_prompt
        if not chat.functions or not (required or after_user):
            return None
        return next(function for function in chat.functions if chat.named_tool in {None, function["name"]})

    def call(self, function: Mapping[str, Any], stream: RandomStream) -> Sequence[int]:
        """Return the ids of a call with drawn arguments."""
        arguments = make_arguments(function.get("parameters"), stream, self.model.words.texts)
        return self.model.tokenizer.encode(self.write([ScriptedCall(function["name"], arguments)], stream))

    def scripted(self, turn: Turn, stream: RandomStream) -> Sequence[int]:
        """Return the ids of a turn."""
        text = turn.text(self.write(turn.call, stream))
        return self.model.tokenizer.encode(text.removeprefix(_REASONING) if self.reasoning_open else text)

    def write(self, calls: Sequence[ScriptedCall], stream: RandomStream) -> str:
        """Return the text of the calls, each at the model's rate in other white space than the template's."""
        rate = self.model.noncanonical_rate
        separators = [
            (COMPACT, SPACED)[stream.below(2)] if rate and stream.unit() < rate else (", ", ": ") for _ in calls
        ]
        arguments = [_object(call.arguments) for call in calls]
        objects = [value for value in arguments if value is not None]
        if calls and self.model.template is not None and len(objects) == len(calls):
            names = [call.name for call in calls]
            block = self._block(names, objects)
            if block is not None and block != "\n".join(map(call_text, names, objects)):
                for value, pair in zip(objects, separators, strict=True):
                    if value:
                        block = block.replace(to_json(value), json_text(value, pair), 1)
                self.blocks[block] = [ToolCall(name, to_json(v)) for name, v in zip(names, objects, strict=True)]
                return block
        pairs = zip(calls, separators, strict=True)
        return "\n".join(call_text(call.name, call.arguments, pair) for call, pair in pairs)

    def _block(self, names: Sequence[str], arguments: Sequence[dict[str, Any]]) -> str | None:
        """Return the calls as the template writes them; None if they are not at the end of its text."""
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": value}}
                for index, (name, value) in enumerate(zip(names, arguments, strict=True))
            ],
        }
        try:
            before = self._render([])
            text = self._render([message])
        except RequestError:
            return None
        if not text.startswith(before):
            return None
        stops = [self.model.tokenizer.decode([token]) for token in self.model.eos_ids]
        block = re.split("|".join(map(re.escape, stops)), text[len(before) :], maxsplit=1)[0]
        block = _EMPTY_REASONING.sub("", block).rstrip()
        return block if all(name in block for name in names) else None

    def _render(self, messages: Sequence[Message]) -> str:
        """Return the text of the chat with more messages; without any, it ends with the generation prompt."""
        longer = replace(self.chat, messages=[*self.chat.messages, *messages], add_generation_prompt=not messages)
        return render_chat(replace(longer, continue_final_message=False), self.model.template)


def _object(arguments: object) -> dict[str, Any] | None:
    """Return arguments as an object; None for text that is not a JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None


def text_prompts(
    completions: CompletionsRequest,
    common: CommonFields,
    model: Model,
    options: Options,
) -> list[Prompt]:
    """Return the prompts of a completions request.

    Raises RequestError if an id is outside the vocabulary, or a prompt is empty or does not fit into the context window.
    """
    requested = _DEFAULT_MAX_TOKENS if common.max_tokens is None else common.max_tokens
    if requested == 0 and completions.echo:
        requested = 1  # vLLM samples one token nevertheless (cassette `cmpl_echo_mt0`)
    prompts = []
    for prompt in completions.prompts:
        if isinstance(prompt, str):
            ids, text = model.encode(prompt, add_special_tokens=bool(completions.add_special_tokens)), prompt
        else:
            model.check_ids(prompt)
            ids = list(with_fault(prompt, options.faults) or prompt)
            text = model.tokenizer.decode(ids)
        if not ids:
            raise invalid_value("Either prompt or prompt_embeds must be provided and non-empty.")
        max_tokens = max_tokens_after(len(ids), requested, common, options)
        prompts.append(Prompt(ids, GenerationOptions(max_tokens, completions.logprobs or 0), text))
    return prompts


def text_to_tokenize(
    body: Body, prepare: PrepareMessages = prepare_for_vllm, template: "JinjaTemplate | None" = None
) -> str:
    """Return the text of a `/tokenize` request: its prompt, or its rendered messages."""
    if "messages" in body:
        chat = read_chat({key: value for key, value in body.items() if key not in _CHAT_ONLY}, prepare)
        return render_chat(chat, template)
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    raise invalid_value("prompt must be a string unless the request has messages.", "prompt")


def ids_to_return(body: Body, model: Model, prepare: PrepareMessages = prepare_for_vllm) -> list[int]:
    """Return the ids of a `/tokenize` request; `add_special_tokens` is true by default, but false for messages."""
    text = text_to_tokenize(body, prepare, model.template)
    return model.encode(text, add_special_tokens=bool(body.get("add_special_tokens", "messages" not in body)))


Schema = Mapping[str, Any]

_MAX_DEPTH: Final = 6  # schemas can refer to themselves
_MAX_VALUES: Final = 200
_MAX_ITEMS: Final = 2
_MAX_LENGTH: Final = 256  # of strings and arrays, even if the schema requires more


def make_arguments(schema: object, stream: RandomStream, words: Sequence[str]) -> dict[str, Any]:
    """Return arguments that fit the `parameters` of a function; empty if it has none. Strings are made of `words`."""
    if not isinstance(schema, Mapping):
        return {}
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    maker = _ValueMaker(stream, words, definitions if isinstance(definitions, Mapping) else {})
    arguments = maker.value({"type": "object", **schema}, 0)
    return arguments if isinstance(arguments, dict) else {}


class _ValueMaker:
    """Makes values that fit schemas; `definitions` are the schemas that `$ref` can name."""

    __slots__ = ("_count", "_definitions", "_stream", "_words")

    def __init__(self, stream: RandomStream, words: Sequence[str], definitions: Schema) -> None:
        self._stream = stream
        self._words = words
        self._definitions = definitions
        self._count = 0

    def value(self, schema: object, depth: int) -> Any:
        """Return a value that fits; None where the schema is too deep or has too many values."""
        self._count += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._count > _MAX_VALUES:
            return None
        if "const" in schema:
            return schema["const"]
        options = schema.get("enum")
        if isinstance(options, list) and options:
            return options[self._stream.below(len(options))]
        target = self._target(schema)
        if target is not None:
            return self.value(target, depth + 1)
        return self._typed_value(schema, depth)

    def _target(self, schema: Schema) -> object:
        """Return the schema that applies instead: the referenced one, or the first alternative."""
        if isinstance(schema.get("$ref"), str):
            return self._definitions.get(schema["$ref"].rpartition("/")[2], {})
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return schema[key][0]
        return None

    def _typed_value(self, schema: Schema, depth: int) -> Any:
        types = schema.get("type", "object" if "properties" in schema else "string")
        kind = types[0] if isinstance(types, list) and types else types
        if kind == "object":
            properties = schema.get("properties")
            fields = properties if isinstance(properties, Mapping) else {}
            return {str(name): self.value(field, depth + 1) for name, field in fields.items()}
        if kind == "array":
            count = max(1 + self._stream.below(_MAX_ITEMS), _bound(schema, "minItems", 0))
            count = min(count, _bound(schema, "maxItems", count))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(min(count, _MAX_LENGTH))]
        if kind in ("integer", "number"):
            low = _bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0) + 1)
            high = _bound(schema, "maximum", _bound(schema, "exclusiveMaximum", low + 10) - 1)
            integer = self._stream.between(low, max(low, high))
            return integer if kind == "integer" else integer + 0.5 * (integer < high)
        if kind == "boolean":
            return self._stream.below(2) == 1
        return None if kind == "null" else self._string(schema)

    def _string(self, schema: Schema) -> str:
        text = self._words[self._stream.below(len(self._words))]
        min_length = min(max(_bound(schema, "minLength", 0), 0), _MAX_LENGTH)
        text *= 1 + min_length // len(text)
        return text[: max(min_length, _bound(schema, "maxLength", len(text)))]


def _bound(schema: Schema, key: str, default: int) -> int:
    """Return a bound of a schema as an integer; the default if it is absent or no reasonable number."""
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 40 else default
