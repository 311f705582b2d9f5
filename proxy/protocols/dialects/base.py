"""The interfaces of dialects: `Dialect` for dialects that engines support, `Translator` for dialects translated to chat.

A translator reads a request as a chat call, and renders the chunks of the chat response as events of its dialect. Invariant: if
a client sends a response back, it is read as the chat message that was sampled, as far as the dialect can represent it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias

import orjson

from proxy.errors import ProxyError
from proxy.protocols.accumulators import Accumulator, WriteTexts
from proxy.trajectory import step

Json: TypeAlias = dict[str, Any]
DialectName: TypeAlias = step.Dialect
# The dialects of endpoints that sample from ids without a chat template, and read parameters from `sampling_params`.
GENERATES: Final = frozenset[DialectName]({"generate", "sglang_generate"})


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client requests to receive, from its body."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False
    samples: int | None = 1  # choices per prompt; None if the body does not determine it reliably
    choices: int | None = 1  # over all prompts; None as well


class ErrorDialect(Protocol):
    """The format of a client's errors, whether engines support its dialect or not."""

    name: DialectName

    def error(self, error: ProxyError) -> bytes:
        """Return the response body of an error of TokenTape. The response has the status of the error, in every dialect."""
        ...


class Dialect(ErrorDialect, Protocol):
    """A client protocol that engines support, too. What a dialect does not define is as in OpenAI's."""

    prompt_field: str  # of a body: its text, messages or ids
    accumulator: type[Accumulator]  # of a streamed call
    counts_in_choices: bool = False  # a response has its token counts there, not in `usage`

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Return what the client requests to receive."""
        ...

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a body with the sampling parameters: its top level."""
        return body

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return the prompts of a body with token ids, to compare with the engine's; None if its prompts are text."""
        return None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the top-level fields to set, and the fields to remove, that change a body's `sampling` as given."""
        return dict(fields), set(unset)

    def read_body(self, body: Any) -> dict[str, Any] | None:
        """Return an unstreamed response as an object with `choices`; None if it is no response of this dialect."""
        return body if isinstance(body, dict) and isinstance(body.get("choices"), list) else None

    def write_body(self, response: Mapping[str, Any]) -> Any:
        """Return the JSON body of a response with `choices`."""
        return response

    def error(self, error: ProxyError) -> bytes:
        """Return OpenAI's error body."""
        return openai_error(error)


@dataclass(frozen=True, slots=True)
class TranslationOptions:
    """The configuration of a translation, and how the engine itself translates the dialect."""

    thinking: Mapping[str, Any] = field(default_factory=dict)  # fields of chat bodies that request reasoning
    not_thinking: Mapping[str, Any] = field(default_factory=dict)  # and that disable it
    ignore_hosted_tools: bool = False
    thought: str = "reasoning"  # the field of a chat message with the reasoning text
    system_joint: str = ""  # between the system texts of Messages
    merges_systems: bool = False  # the engine moves system turns between others to the beginning
    has_developers: bool = False  # its chat accepts developer messages, merged into a system message if necessary


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The identity of a call."""

    step_id: str
    created_s: int  # its time of arrival in unix seconds
    model: str  # the requested one
    rollout_id: str = ""  # part of ids that a client may use without naming the rollout

    @classmethod
    def of(cls, recorded: step.Step) -> Self:
        """Return the identity of a recorded call."""
        created_s, model = int(recorded.timing.received), recorded.model_asked or ""
        return cls(recorded.step_id, created_s, model, recorded.rollout_id)


@dataclass(frozen=True, slots=True)
class ResolvedReferences:
    """The resolved references of a call."""

    messages: Sequence[Json] = ()  # the chat messages before the call's own
    items: Mapping[str, Json] = field(default_factory=dict)  # that the call names
    # The functions of earlier tool calls as they were sampled (`name` and `arguments`), by call id: a client's copy loses the
    # argument text.
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


NO_REFERENCES: Final = ResolvedReferences()


@dataclass(frozen=True, slots=True)
class References:
    """What a call refers to by id: the previous response, items, and tool calls."""

    previous_response: str | None = None
    items: Sequence[str] = ()
    calls: Sequence[str] = ()


class StreamFormat(NamedTuple):
    """The content type of a stream, and the bytes without meaning that are sent to a waiting client."""

    content_type: str
    keep_alive: bytes


EVENT_STREAM: Final = StreamFormat("text/event-stream; charset=utf-8", b": keep-alive\n\n")


class ResponseRenderer(Protocol):
    """Renders one response in the dialect. Either feed chunks and finish, or render it whole; never both.

    It is fed what a chat client would receive that requested usage in its stream (and logprobs, if the translated body does).
    Engines split chunks in different ways: several fields in one delta, a finish reason beside text, empty deltas, tool calls
    by index.
    """

    stream_format: StreamFormat
    # Returns what writes the events of further texts in place of the only text of the chunk that was fed last; None if a text
    # there may have another effect than an event of its own. It is None in a dialect without such events.
    text_writer: Callable[[], WriteTexts | None] | None = None

    def feed(self, chunk: Json) -> bytes:
        """Return the events of this chunk, possibly none."""
        ...

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream.

        `response` is the accumulated chat response (None: there was none); `error` is the text of the engine's error event, or
        the reason of a disconnection.
        """
        ...

    def whole(self, response: Json) -> Json:
        """Render an unstreamed response."""
        ...


class Translator(ErrorDialect, Protocol):
    """A dialect that is translated to chat."""

    has_system_turns: bool = False  # its conversations may have system messages between turns

    def read(
        self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES
    ) -> Json:
        """Return the chat body for an engine; `body` remains unchanged.

        Raises UnprocessableRequest, naming the field, for what chat cannot represent.
        """
        ...

    def references(self, body: Mapping[str, Any]) -> References:
        """Return what this body refers to by id."""
        ...

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> ResponseRenderer:
        """Return the renderer of the response to this body (the client's own)."""
        ...

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the error body for an engine's error: the engine's message in the dialect's format."""
        ...

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request that samples nothing uses this dialect instead of OpenAI's."""
        return False

    def models(self, entries: Sequence[Json]) -> Json:
        """Return OpenAI's entries of models in the dialect's format, all on one page."""
        return {"object": "list", "data": entries}

    def model(self, entry: Json) -> Json:
        """Return OpenAI's entry of a model in the dialect's format."""
        return entry


# As in pydantic 2, which vLLM and SGLang parse bodies with.
_FALSE_STRINGS = frozenset({"0", "off", "f", "false", "n", "no"})


def is_on(value: Any) -> bool:
    """Return whether a flag is on. Values other than absent, null and false count as on: the engine validates them."""
    return value.lower() not in _FALSE_STRINGS if isinstance(value, str) else value not in (None, False)


def text_or_none(value: Any) -> str | None:
    """Return the value if it is a string."""
    return value if isinstance(value, str) else None


def sample_count(body: Mapping[str, Any]) -> int | None:
    """Return the number of samples per prompt: `n`, 1 if it is absent, None if it is not a positive integer."""
    n = body.get("n")
    if n is None:
        return 1
    return n if type(n) is int and n > 0 else None


def requested_usage(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a stream was requested with usage, and with usage in each event."""
    options = body.get("stream_options")
    if not isinstance(options, dict) or not is_on(options.get("include_usage")):
        return False, False
    return True, is_on(options.get("continuous_usage_stats"))


def requested_of(
    body: Mapping[str, Any], sampling: Mapping[str, Any], *, logprobs: bool, prompts: int | None = 1
) -> ResponseOptions:
    """Return what a body requests by the usual fields. `sampling`: its part with `n`; `prompts`: how many it has."""
    samples = sample_count(sampling)
    return ResponseOptions(
        token_ids=is_on(body.get("return_token_ids")),
        logprobs=logprobs,
        usage=requested_usage(body)[0],
        samples=samples,
        choices=samples * prompts if samples and prompts else None,
    )


def openai_error(error: ProxyError) -> bytes:
    """Return OpenAI's error body."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )


def engine_message(text: str) -> str:
    """Return the message of an engine's error in any known format; the text itself if it is in none."""
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    for name in ("error", "message", "detail"):  # nested as vLLM's and llama.cpp's, flat as SGLang's, FastAPI's own
        if isinstance(body, dict) and name in body:
            body = body[name]
    return body if isinstance(body, str) else text
