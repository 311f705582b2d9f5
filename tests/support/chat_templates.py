"""Chat templates: the original ones of TRL's wheel, and hostile ones, rendered as transformers and vLLM render them."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache, cached_property
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support.hostile_templates import HOSTILE
from tests.support.trainers import PUBLISHED

FOLDER = PUBLISHED / "trl" / "chat_templates"
_PROBE = "ж"
BOS, OTHER_STOP = "<bos>", "<|endoftext|>"

WIDE = "\uff5c"  # the wide bar in DeepSeek's special tokens

# Templates that cannot render messages of plain text.
SKIPPED: dict[str, str] = {}

# The tokens that end a turn when they are sampled, per family: the one after text, then the one after tool calls.
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": (f"<{WIDE}end▁of▁sentence{WIDE}>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "llama": ("<|eot_id|>", "<|eom_id|>"),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "phi3": ("<|end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
# What models write around reasoning that their template drops, where that is not <think>.
THOUGHTS = {
    "gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
}
THINK = ("<think>\n", "\n</think>\n\n")
CHATML_STOPS = ("<|im_end|>",)

# vLLM parses arguments of history to objects. These templates add them to a text, and are served by engines that do not.
TEXT_ARGUMENTS = ("deepseek_r1_distill", "deepseekv3")

Message = Mapping[str, Any]


class CannotRender(Exception):
    """The template raised an error."""


@dataclass(eq=False)
class ChatTemplate:
    """One chat template. `stops`: the texts of the tokens that end a turn after text, and after tool calls."""

    name: str
    source: str
    stops: tuple[str, ...]
    is_hostile: bool = False

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self.source)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether messages are rendered with lists of parts as their content (vLLM's content format "openai")."""
        return (
            re.search(r"message(\['content'\]|\.content)\[0\]|in message\['content'\] *(%|\|)", self.source) is not None
        )

    @cached_property
    def call_stop(self) -> str | None:
        """The stop that the template writes between a tool call and its result; None if it renders neither."""
        call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": f'{{"x": "{_PROBE}"}}'}}
        messages = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": _PROBE},
        ]
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        try:
            pieces = self.render(messages, [tool]).split(_PROBE)
        except CannotRender:
            return None
        if len(pieces) != 3:
            return None
        return max(self.stops, key=pieces[1].rfind)

    @cached_property
    def thoughts(self) -> tuple[str, str]:
        """What a model writes before and after its reasoning, where the template does not show it."""
        return next((tags for family, tags in THOUGHTS.items() if self.name.startswith(family)), THINK)

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """The special tokens: what is written in angle brackets with bars, and the stops."""
        piped = r"<[|_][^\s<>|_'\"{}]+[|_]?>".replace("_", WIDE) + r"|<[a-z_]+\|>"
        found = re.findall(piped + r"|<(?:start|end)_of_\w+>|\[/?INST\]|</s>", self.source)
        return tuple(dict.fromkeys([BOS, OTHER_STOP, *self.stops, *found]))

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Other tags that tokenizers have one token for."""
        return tuple(dict.fromkeys(re.findall(r"</?(?:think|tool_call|tool_response|function)>", self.source)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = True,
        day: int = 0,
        **options: Any,
    ) -> str:
        """Return the text on a day of 2026, with a generation prompt by default. Raises CannotRender."""
        try:
            return self._compiled.render(
                messages=[self._converted(message) for message in messages],
                tools=deepcopy(tools) or None,
                add_generation_prompt=prompt,
                bos_token=BOS,
                eos_token=self.stops[0],
                strftime_now=(date(2026, 1, 1) + timedelta(day)).strftime,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise CannotRender(f"{self.name}: {error}") from error

    def _converted(self, message: Message) -> dict[str, Any]:
        """Return a message as vLLM passes it to the template (0.32, renderers/chat_utils.py)."""
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        converted: dict[str, Any] = {"role": message["role"], "content": content or ""}
        if self.takes_parts and message["role"] != "tool":
            converted["content"] = [] if content is None else [{"type": "text", "text": content}]
        if message["role"] == "assistant":
            thoughts = message.get("reasoning") or message.get("reasoning_content")
            if thoughts:
                converted |= {"reasoning": thoughts, "reasoning_content": thoughts}
            if message.get("tool_calls"):
                converted["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        elif message.get("tool_call_id"):
            converted["tool_call_id"] = message["tool_call_id"]
        return converted

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        call = deepcopy(dict(call))
        if self.name not in TEXT_ARGUMENTS:
            call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
        return call


def parse_arguments(text: str) -> dict[str, Any]:
    """Return arguments as vLLM passes them to templates: an object, empty if the text is none."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@cache
def originals() -> tuple[ChatTemplate, ...]:
    """Return the original templates of TRL's wheel: those that are not patched for training."""
    names = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
    return tuple(
        ChatTemplate(name, (FOLDER / f"{name}.jinja").read_text(), _stops(name))
        for name in names
        if name not in SKIPPED
    )


@cache
def hostile() -> tuple[ChatTemplate, ...]:
    """Return the hostile templates."""
    return tuple(ChatTemplate(name, source, stops, is_hostile=True) for name, (source, stops) in HOSTILE.items())


def template(name: str) -> ChatTemplate:
    """Return a template by its name."""
    return next(known for known in (*originals(), *hostile()) if known.name == name)


def _stops(name: str) -> tuple[str, ...]:
    return next((stops for family, stops in STOPS.items() if name.startswith(family)), CHATML_STOPS)


class _Generation(jinja2.ext.Extension):
    """Ignore the block `generation`, which marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
