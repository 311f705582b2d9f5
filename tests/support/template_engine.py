"""An engine for one chat template, without a model: a byte-level BPE, a renderer, and turns as a model would write them.

A turn is written as the template writes it in a rendering, except that the white space of tool arguments may differ, stop
tokens occur at its end only, and its tokens may be split in ways that no tokenizer chooses.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from random import Random
from typing import Any

import orjson
from tests.support.chat_templates import CannotRender, ChatTemplate, Message, hostile, originals, parse_arguments
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = (
    "The cat sees seven red birds over the lake in Paris; user, assistant and system are words. Grüße, naïve 你好 🙂\n"
)
THOUGHTS, CONTENT = "Qzthoughts", "Qzcontent"  # placeholders in renderings, which are replaced by sampled texts


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled turn: the message as the engine's parser returns it, the ids, and why it ended."""

    message: dict[str, Any]
    ids: "array[int]"
    finish_reason: str
    stop_reason: int | str | None = None


def common_beginning(one: str, other: str) -> str:
    """Return what two texts begin with."""
    length = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    return min(one, other, key=len) if length is None else one[:length]


@cache
def _base() -> str:
    """Return a byte-level BPE as JSON, trained on the templates' texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=alphabet)
    core.train_from_iterator([*(one.source for one in (*originals(), *hostile())), *[WORDS] * 20], trainer)
    return core.to_str()


@cache
def _tokenizer(template: ChatTemplate) -> tuple[Tokenizer, dict[str, int], set[int]]:
    """Return the tokenizer of a template, its vocabulary, and the ids of the tokens that are never split."""
    made = Tokenizer.from_str(_base())
    made.add_special_tokens([AddedToken(text, special=True) for text in template.specials])
    made.add_tokens([AddedToken(text, special=False) for text in template.tags])
    return made, made.get_vocab(), {made.token_to_id(text) for text in (*template.specials, *template.tags)}


@lru_cache(maxsize=20_000)
def _encoded(template: ChatTemplate, text: str) -> "array[int]":
    """Return the ids of a text; rollouts with one template share most of theirs."""
    return array("i", _tokenizer(template)[0].encode(text, add_special_tokens=False).ids)


@cache
def _texts(template: ChatTemplate, options: bytes) -> dict[bytes, str]:
    """Return the dictionary of a template's renderings with these arguments, which its engines fill."""
    return {}


class TemplateEngine:
    """An engine that serves one template. `options` are the template's arguments."""

    def __init__(self, template: ChatTemplate, **options: Any) -> None:
        self.template = template
        self.options = options
        self.day = 0
        self._tokenizer, self._pieces, self._whole = _tokenizer(template)
        self._texts = _texts(template, orjson.dumps(options, option=orjson.OPT_SORT_KEYS))

    def text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = True) -> str:
        """Return the rendered text. Raises CannotRender."""
        key = orjson.dumps([messages, tools, prompt, self.day])
        if key not in self._texts:
            if len(self._texts) > 1000:
                self._texts.clear()
            self._texts[key] = self.template.render(messages, tools, prompt=prompt, day=self.day, **self.options)
        return self._texts[key]

    def render(self, messages: Sequence[Message], tools: Any = None) -> "array[int]":
        """Return the ids of messages with a generation prompt. Raises CannotRender."""
        return self.encode(self.text(messages, tools))

    def encode(self, text: str) -> "array[int]":
        """Return the ids of a text in which special tokens are written as text."""
        return _encoded(self.template, text)[:]

    def detokenize(self, ids: Sequence[int], *, specials: bool = True) -> str:
        """Return the text of ids, with special tokens by default."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not specials)

    def split(self, ids: Sequence[int], random: Random, rate: float) -> "array[int]":
        """Return ids of the same text in which this share of the tokens is split into shorter ones."""
        pieces = array("i")
        for token in ids:
            pieces.extend(
                self._split(token, random) if token not in self._whole and random.random() < rate else (token,)
            )
        return pieces

    def _split(self, token: int, random: Random) -> list[int]:
        """Return the ids of the parts of a token; its parts are tokens, or else single bytes."""
        piece = self._tokenizer.id_to_token(token)
        if len(piece) == 1:
            return [token]
        cut = random.randrange(1, len(piece))
        parts = [piece[:cut], piece[cut:]]
        if not all(part in self._pieces for part in parts):
            parts = list(piece)
        return [self._pieces[part] for part in parts]

    def sample(self, messages: Sequence[Message], reply: "Reply", tools: Any, random: Random) -> Sample:
        """Return a turn after the rendering of messages."""
        text, message = self.turn_text(messages, reply, tools), reply.message()
        ending = reply.ending
        if ending == "length":
            return self._cut(text, message, reply, random)
        ids = self.split(self.encode(text), random, reply.splits)
        finish = "tool_calls" if reply.calls else "stop"  # also where the limit or a stop string ended the turn
        if ending == "hidden_length":
            return Sample(message, ids, finish if reply.calls else "length")
        if ending == "stop_string":
            ids = self.split(self.encode(text + reply.stop), random, reply.splits)
            return Sample(message, ids, finish, reply.stop_reason or reply.stop)
        if ending == "client_stop":
            stop = self.encode(reply.stop)[-1]
            return Sample(message, ids + array("i", [stop]), finish, stop)
        stop = self.encode(reply.stop_token or self._shown_stop(messages, message, tools))[0]
        # vLLM shows the id of every stop token but the tokenizer's EOS, also beside tool calls (0.32).
        is_eos = self.detokenize([stop]) == self.template.stops[0]
        return Sample(message, ids + array("i", [stop]), finish, None if is_eos else stop)

    def _cut(self, text: str, message: dict[str, Any], reply: "Reply", random: Random) -> Sample:
        """Return a turn that the limit cuts within its content, its reasoning or its last call; `kept` 1: at its end."""
        if reply.calls and reply.kept < 1:
            return self._cut_in_call(text, reply, random)
        last = reply.content or reply.reasoning
        if reply.calls or not last or last not in text:
            return Sample(message, self.split(self.encode(text), random, reply.splits), "length")
        start = text.rindex(last)
        ids = self.split(self.encode(last), random, reply.splits)
        ids = ids[: max(1, round(len(ids) * reply.kept))]
        shown = self.detokenize(ids).replace("\N{REPLACEMENT CHARACTER}", "")
        message = Reply(
            shown if reply.content else "", reply.reasoning if reply.content else shown, parsed=reply.parsed
        ).message()
        return Sample(message, self.encode(text[:start]) + ids, "length")

    def _cut_in_call(self, text: str, reply: "Reply", random: Random) -> Sample:
        """Return a turn that the limit cuts in its calls: its message has their text, or what a stream had of the last one."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        thoughts = reply.reasoning if reply.parsed else ""
        start = text.index(thoughts) + len(thoughts) + 1 if thoughts and thoughts in text else 0
        if reply.streams:
            last = reply.calls[-1]
            at = text.rfind(last.arguments, start)
            length = int(len(last.arguments) * reply.kept)
            cut = text[: at + length] if at >= 0 else text[: (start + len(text)) // 2]
            shown = last if at < 0 else replace(last, arguments=last.arguments[:length])
            message["tool_calls"] = [call.message() for call in (*reply.calls[:-1], shown)]
        else:
            cut = text[: max(1, start, int(len(text) * reply.kept))]
            message["content"] = cut[start:].removeprefix(self.template.thoughts[1].strip())
        if thoughts:
            message["reasoning"] = thoughts
        return Sample(message, self.split(self.encode(cut), random, 0.2), "length")

    def _shown_stop(self, messages: Sequence[Message], message: Message, tools: Any) -> str:
        """Return the stop token that the template writes after a turn; the default if it writes none."""
        rest = self._shown(messages, message, tools)
        found = [(rest.rfind(stop), stop) for stop in self.template.stops if stop in rest]
        return max(found)[1] if found else self.template.stops[-1 if message.get("tool_calls") else 0]

    def turn_text(self, messages: Sequence[Message], reply: "Reply", tools: Any) -> str:
        """Return the text of a turn as a model of this template writes it, without its stop token."""
        shown = self._shown(messages, reply.placeholders(), tools)
        last = max(shown.find(THOUGHTS), shown.find(CONTENT), 0)
        for call in reply.calls:
            last = max(last, shown.find(call.name, last + 1))
        ends = [end for stop in self.template.stops if (end := shown.find(stop, last)) >= 0]
        shown = shown[: min(ends)] if ends else shown.rstrip()
        for stop in self.template.stops:
            shown = shown.replace(stop, "")
        prompt = self.text(messages, tools)
        shown = shown.replace(CONTENT.upper(), CONTENT)
        names = all(shown.count(call.name) >= 1 for call in reply.calls)
        if reply.content and CONTENT not in shown:
            shown = CONTENT + ("\n" + shown if reply.calls and names else "")
        if not names:
            shown = "\n".join([CONTENT] * bool(reply.content) + [call.text() for call in reply.calls])
        if reply.reasoning and THOUGHTS not in shown:
            opening, closing = self.template.thoughts
            rest = shown.partition("</think>")[2].lstrip() if "</think>" in shown else shown
            shown = opening * (not prompt.rstrip().endswith(opening.strip())) + THOUGHTS + closing + rest
        shown = shown.replace(THOUGHTS, reply.reasoning).replace(CONTENT, reply.content)
        for call in reply.calls:
            shown = shown.replace(json.dumps(parse_arguments(call.arguments), ensure_ascii=False), call.arguments)
        return shown

    def _shown(self, messages: Sequence[Message], reply: Message, tools: Any) -> str:
        """Return how the template renders a turn after the generation prompt; empty if it cannot.

        If it renders the messages differently with the turn, it is what it renders after the first user message.
        """
        first = next(index for index, message in enumerate(messages) if message["role"] == "user")
        for before in (messages, messages[: first + 1]):
            try:
                shown = self.text([*before, reply], tools, prompt=False)
                prompt, history = self.text(before, tools), self.text(before, tools, prompt=False)
            except CannotRender:
                return ""
            if shown.startswith(prompt):
                return shown[len(prompt) :]
            common = len(common_beginning(shown, prompt).rstrip("<[|\uff5c"))  # no part of a special token
            if common >= len(common_beginning(prompt, history)):
                return shown[common:]
        return ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is the JSON as sampled."""

    name: str
    arguments: str
    id: str = "call_1"

    def text(self) -> str:
        """Return the call as models of unknown formats write it."""
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {self.arguments}}}\n</tool_call>'

    def message(self) -> dict[str, Any]:
        """Return the entry of `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model writes in one turn.

    `ending`: "stop", "length", "hidden_length" (the limit, but the engine returns "tool_calls"), "stop_string" or
    "client_stop"; the last two end with `stop`, in which `stop_reason` is the stop string, all of it by default. `kept`: the
    share that the limit leaves. `splits`: the share of tokens that are split. `parsed`: the engine has a reasoning parser.
    `trims`: its parsers trim the content. `drops`: they drop it. `stop_token`: a stop token that the template does not write
    there. `shown_calls`: the number of calls in the message, all by default. `streams`: the message of a reply that is cut in
    its last call has the beginning of this call.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    ending: str = "stop"
    stop: str = ""
    stop_reason: str = ""
    kept: float = 1.0
    splits: float = 0.3
    parsed: bool = True
    trims: bool = False
    drops: bool = False
    stop_token: str | None = None
    shown_calls: int | None = None
    streams: bool = False

    def message(self) -> dict[str, Any]:
        """Return the message as the engine returns it."""
        content = "" if self.drops else self.content.strip() if self.trims else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        if self.reasoning and self.parsed:
            message["reasoning"] = self.reasoning
        elif self.reasoning:
            message["content"] = f"<think>\n{self.reasoning}\n</think>\n\n{content}"
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls[: self.shown_calls]]
        return message

    def placeholders(self) -> Mapping[str, Any]:
        """Return the message with placeholders for its content and its reasoning."""
        content = CONTENT if self.content else (None if self.calls else "")
        message = {**replace(self, shown_calls=None).message(), "content": content}
        return {**message, "reasoning": THOUGHTS} if self.reasoning else message
