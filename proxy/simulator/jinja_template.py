"""A chat template in Jinja, rendered as transformers 5 and vLLM 0.32 render it. Importing this module requires jinja2."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, Final, Never

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.simulator.errors import invalid_value
from proxy.simulator.template import BOS, content_text

Message = Mapping[str, Any]

# Marks the end of the content that the model continues, as in transformers 5 (`render_jinja_template`).
_END_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class JinjaTemplate:
    """The template of one engine. `eos` is the value of `eos_token`.

    Raises ValueError if the source is not a valid template.
    """

    __slots__ = ("_eos", "_source")

    def __init__(self, source: str, eos: str) -> None:
        self._source = source
        self._eos = eos
        try:
            _compiled(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is invalid: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        source: object = None,
    ) -> str:
        """Return the prompt; `source` is a template in place of the engine's own.

        Raises RequestError if a message has content that is not text, or the template raises an exception.
        """
        source = source if isinstance(source, str) and source else self._source
        conversation = _conversation(messages)
        if not ('"developer"' in source or "'developer'" in source):
            conversation = _without_developer(conversation)
        if continue_final_message:
            conversation[-1]["content"] += _END_TAG
        try:
            if _reads_parts(source):
                conversation = [_with_parts(message) for message in conversation]
            prompt = _compiled(source).render(
                {
                    "documents": None,
                    **variables,
                    "messages": conversation,
                    "tools": [_tool(tool) for tool in tools] if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": BOS,
                    "eos_token": self._eos,
                }
            )
        except Exception as error:  # a template can raise any exception; vLLM sends a 400 with its text
            raise invalid_value(str(error) or type(error).__name__) from error
        return _before_tag(prompt) if continue_final_message else prompt


class _Generation(Extension):
    """The block `{% generation %}` of training templates, which renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of templates (transformers 5, utils/chat_template_utils.py, `_cached_compile_jinja_template`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _reads_parts(source: str) -> bool:
    """Return whether a template reads content as a list of parts: it has a loop over the content of a message.

    vLLM 0.32 detects the content format in the same way (renderers/hf.py, `_detect_content_format`), macros included.
    """

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):
            return is_content(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    return any(is_content(loop.iter) for loop in _environment().parse(source).find_all(nodes.For))


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a list of parts; results of tools are always text."""
    if message["role"] == "tool":
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}] if message["content"] else []}


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature of transformers' filter
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(  # noqa: TID251 - orjson formats differently
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> Never:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates use
    return datetime.now().astimezone().strftime(format)


def _conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as templates receive them: content that is text, reasoning under both of its names.

    Content None becomes "", and a list of calls that is empty is removed (vLLM 0.32, renderers/chat_utils.py,
    `_parse_chat_message_content` and `_postprocess_messages`).
    """
    conversation = []
    for message in messages:
        kept: dict[str, Any] = {"role": message.get("role"), "content": content_text(message.get("content"))}
        if kept["role"] == "assistant":
            reasoning = message.get("reasoning")
            reasoning = message.get("reasoning_content") if reasoning is None else reasoning
            kept |= {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning is not None else {}
            kept |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        if kept["role"] == "tool" and "tool_call_id" in message:
            kept["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            kept["name"] = message["name"]
        conversation.append(kept)
    return conversation


def _without_developer(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developer messages merged into one system message (vLLM 0.32, renderers/hf.py)."""
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    system = [message["content"] for message in conversation if message["role"] in {"developer", "system"}]
    others = [message for message in conversation if message["role"] not in {"developer", "system"}]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *others]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the keys that vLLM keeps, in its order, in which templates write them."""
    function = {key: tool["function"].get(key) for key in ("name", "description", "parameters")}
    optional = {key: tool["function"][key] for key in ("strict", "defer_loading") if key in tool["function"]}
    return {"type": tool.get("type", "function"), "function": function | optional}


def _before_tag(prompt: str) -> str:
    """Return the prompt up to the end of the final message's content."""
    before, tag, after = prompt.rpartition(_END_TAG.strip())
    if not tag:
        raise invalid_value("continue_final_message is set but the final message does not appear in the chat.")
    return before if after.startswith(" ") else before.rstrip()  # the template has stripped the content
