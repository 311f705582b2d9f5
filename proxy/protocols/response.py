"""The response of an engine as a stream of bytes: fed the engine's bytes, returns the client's.

Each framing has the same two methods, so callers need one loop. `feed` returns what the client may receive now; `finish`
returns the withheld end and the parsed response. What the client did not request is stripped by the `ClientView`.

Rule 1: the end of the turn is withheld: in a stream, everything from the event with the last open choice's finish reason
        (agents act on it, not only on `[DONE]`), or from an error event; else the whole body.
Rule 2: bytes that need no stripping are forwarded unchanged; events are never reserialized without need.
Rule 3: what cannot be parsed is forwarded, and recorded as a problem.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from proxy.errors import EngineDisconnected
from proxy.protocols import synthetic_stream as replay
from proxy.protocols.dialects.base import Dialect
from proxy.protocols.dialects.translation import ResponseRenderer, Translator
from proxy.protocols.engines.base import Engine, Json, StripRules
from proxy.protocols.lenient_json import NotJson, read_json, write_json
from proxy.protocols.number_lists import KnownPrompt, read_lists
from proxy.protocols.token_annotations import TokenAnnotations

_UNREADABLE: Final = 502  # status of an unreadable response that cannot be forwarded
MALFORMED: Final = (
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ValueError,
    RecursionError,
)  # raised by JSON of an unexpected shape


@dataclass(frozen=True, slots=True)
class ClientView:
    """What the client receives: the dialect, the engine, what is stripped, how many choices are expected.

    `choices` is None if the body does not determine it; `model` is the name that the client requested, if it was replaced.
    `replay`: the client requested a stream, and the engine did not; `usage`: with usage in it. `tokens`: the token annotations
    that the client requested, for whole responses only. `translation` and `renderer`: the client's dialect and this response in
    it, if the call is translated to chat.
    """

    dialect: Dialect
    engine: Engine
    strip_rules: StripRules
    choices: int | None
    model: str | None = None
    replay: bool = False
    usage: bool = False
    tokens: TokenAnnotations | None = None
    translation: Translator | None = None
    renderer: ResponseRenderer | None = None

    @property
    def hides_lists(self) -> bool:
        """Whether the client receives no token ids and no logprobs, so that they may be parsed apart (`number_lists`)."""
        rules = self.strip_rules
        return rules.token_ids and rules.logprobs and self.tokens is None and self.dialect.name == "chat"

    def whole(self, response: Json) -> Json:
        """Return what the client receives of an unstreamed response; the same dict if it is unchanged."""
        shown = self._renamed(self.engine.strip(self.dialect.name, response, self.strip_rules))
        if self.tokens is None:
            return shown
        return self.tokens.annotate(shown, self.engine.tokens(self.dialect.name, {}, response))

    def chunk(self, chunk: Json) -> Json | None:
        """Return what the client receives of a stream chunk; the same dict if it is unchanged, None if nothing."""
        shown = self.engine.strip_chunk(self.dialect.name, chunk, self.strip_rules)
        return shown if shown is None or self.model is None else self._renamed(shown)

    def _renamed(self, shown: Json) -> Json:
        if self.model is None or not isinstance(shown.get("model"), str):
            return shown
        return {**shown, "model": self.model}


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A parsed response.

    `response` is the unstreamed or accumulated response, with injected values; None if there was none. `ended`: the terminal
    event, or the whole body, arrived. `error` is the engine's error as text. `problems` are fidelity codes. `status`
    replaces the engine's.
    """

    response: Json | None
    ended: bool
    error: str | None = None
    problems: tuple[str, ...] = ()
    status: int | None = None


class ResponseStream(Protocol):
    """One response of an engine, in one framing. `prompt`: its prompt ids, if they were parsed apart (`number_lists`)."""

    prompt: KnownPrompt | None

    def feed(self, read: bytes) -> bytes:
        """Feed bytes of the engine; return the bytes that the client may receive now."""
        ...

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld end and the parsed response, after the last bytes."""
        ...


class RawResponse:
    """An error, or a response that is not JSON: withheld, and forwarded unchanged."""

    prompt: KnownPrompt | None = None

    def __init__(self, view: ClientView, status: int) -> None:
        self._view = view
        self._status = status
        self._reads: list[bytes] = []

    def feed(self, read: bytes) -> bytes:
        """Withhold the bytes: an error ends the turn as well."""
        self._reads.append(read)
        return b""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return everything: unchanged, or in the client's dialect."""
        body = b"".join(self._reads)
        return failed(
            self._view, self._status, body, ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"))
        )


class WholeResponse:
    """An unstreamed JSON response. `prompt`: the prompt ids of the rollout's previous call, then those of this response."""

    def __init__(self, view: ClientView, prompt: KnownPrompt | None = None) -> None:
        self._view = view
        self._reads: list[bytes] = []
        self.prompt = prompt

    def feed(self, read: bytes) -> bytes:
        """Withhold the bytes until the step is stored."""
        self._reads.append(read)
        return b""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the body for the client."""
        body = b"".join(self._reads)
        try:
            response, loosely = self._read(body)
        except NotJson:
            return self._unreadable(body)
        if not isinstance(response, dict) or not isinstance(response.get("choices"), list):
            return self._failed(body)
        try:
            shown = self._view.whole(response)
            return self._render(body, response, shown, loosely=loosely)
        except MALFORMED:
            return self._failed(body)

    def _read(self, body: bytes) -> tuple[Any, bool]:
        """Return the response, and whether it is loose (`read_json`). Raises NotJson."""
        found = read_lists(body, self.prompt) if self._view.hides_lists else None
        self.prompt = None if found is None else found[1]
        return read_json(body) if found is None else (found[0], False)

    def _unreadable(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        """Forward a body that is not JSON; a truncated body becomes an error, so that it cannot pass for a complete one."""
        answer = ParsedResponse(None, ended=False, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        if self._view.translation is not None or body[:64].lstrip()[:1] not in (b"{", b"["):
            return failed(self._view, _UNREADABLE, body, answer)
        error = self._view.dialect.error(
            EngineDisconnected("the engine's response is not valid JSON; it may be truncated")
        )
        return error, replace(answer, status=_UNREADABLE)

    def _failed(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        answer = ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        return failed(self._view, _UNREADABLE, body, answer)

    def _render(self, body: bytes, response: Json, shown: Json, *, loosely: bool) -> tuple[bytes, ParsedResponse]:
        if self._view.renderer is not None:
            shown = self._view.renderer.whole(shown)
        end = body if shown is response else write_json(shown, loosely=loosely)
        return end, self._answer(response)

    def _answer(self, response: Json, *problems: str) -> ParsedResponse:
        """Return the response, and how it contradicts itself."""
        found = list(problems)
        if response.get("usage") is None and self._view.engine.always_sends_usage:
            found.append("no_usage")
        if response.get("error") is not None:
            found.append("engine_error")
        return ParsedResponse(response, ended=True, problems=tuple(found))


class SyntheticStreamResponse(WholeResponse):
    """An unstreamed JSON response to a client that requested a stream."""

    def _render(self, body: bytes, response: Json, shown: Json, *, loosely: bool) -> tuple[bytes, ParsedResponse]:
        view = self._view
        if view.renderer is not None:
            return render_as_stream(view.engine, view.renderer, shown), self._answer(response)
        try:
            events = replay.replay_events(
                view.engine.shape, view.dialect.name, shown, usage=view.usage, loosely=loosely
            )
        except (TypeError, KeyError, AttributeError):  # similar to a response, but it cannot be converted into events
            events = b"data: " + write_json(shown, loosely=loosely) + b"\n\n" + replay.DONE
            return events, self._answer(response, "unparsed_event")
        return events, self._answer(response)


def render_as_stream(engine: Engine, renderer: ResponseRenderer, shown: Json) -> bytes:
    """Render an unstreamed chat response as a stream of another dialect."""
    first, *others = replay.chunks(engine.shape, "chat", shown, usage=True)
    first = {"usage": shown.get("usage"), **first}  # the first event has the length of the prompt
    return b"".join([*map(renderer.feed, (first, *others)), renderer.finish(shown)])


def failed(view: ClientView, status: int, body: bytes, answer: ParsedResponse) -> tuple[bytes, ParsedResponse]:
    """Return an error response: unchanged, or in the client's dialect if the call is translated to chat."""
    if view.translation is None:
        return body, answer
    body_in_dialect = view.translation.engine_error(status, body.decode("utf-8", "replace"))
    return body_in_dialect, replace(answer, status=status)
