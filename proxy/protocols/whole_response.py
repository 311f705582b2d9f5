"""Unstreamed responses: JSON, errors and everything else. The rules are those of `response`."""

from dataclasses import replace
from typing import Any, Final

from proxy.errors import EngineDisconnected
from proxy.protocols import synthetic_stream as replay
from proxy.protocols.dialects.translation import ResponseRenderer
from proxy.protocols.engines.base import Engine, Json
from proxy.protocols.lenient_json import NotJson, read_json, write_json
from proxy.protocols.number_lists import KnownPrompt, read_lists
from proxy.protocols.response import ABANDONED_BYTES, MALFORMED, ClientView, ParsedResponse
from proxy.protocols.sse import EVENT_STREAM

_UNREADABLE: Final = 502  # status of an unreadable response that cannot be forwarded


class _Withheld:
    """A body that is withheld until it is complete and its step is stored."""

    is_over = is_cumulative = False
    pending = 0
    forces_usage: bool | None = None

    def __init__(self, view: ClientView, prompt: KnownPrompt | None = None) -> None:
        self._view = view
        self.prompt = prompt
        self.content_type = None if view.translation is None else "application/json"
        self._reads: list[bytes] = []

    def feed(self, read: bytes) -> bytes:
        """Withhold the bytes."""
        self._reads.append(read)
        return b""

    def abandon(self) -> None:
        """Forget a long incomplete body."""
        if sum(map(len, self._reads)) > ABANDONED_BYTES:
            self._reads.clear()


class RawResponse(_Withheld):
    """An error, or a response that is not JSON: withheld, as an error ends the turn as well, and forwarded unchanged."""

    def __init__(self, view: ClientView, status: int) -> None:
        super().__init__(view)
        self._status = status

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return everything: unchanged, or in the client's dialect."""
        body = b"".join(self._reads)
        return failed(
            self._view, self._status, body, ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"))
        )


class WholeResponse(_Withheld):
    """An unstreamed JSON response. `prompt`: the prompt ids of the rollout's previous call, then those of this response."""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the body for the client."""
        body = b"".join(self._reads)
        try:
            parsed, loosely = self._read(body)
        except NotJson:
            return self._unreadable(body)
        response = self._view.dialect.read_body(parsed)
        if response is None:
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
        answer = self._answer(response, shown)
        if self._view.renderer is not None:
            shown = self._view.renderer.whole(shown)
        end = body if shown is response else write_json(self._view.dialect.write_body(shown), loosely=loosely)
        return end, answer

    @property
    def _sends_usage(self) -> bool:
        """Whether the response must have usage; SGLang's `/generate` has counts in each choice instead (`Engine.tokens`)."""
        return self._view.engine.always_sends_usage and self._view.dialect.name != "sglang_generate"

    def _answer(self, response: Json, shown: Json, *problems: str) -> ParsedResponse:
        """Return the response, and how it contradicts itself."""
        found = list(problems)
        if response.get("usage") is None and self._sends_usage:
            found.append("no_usage")
        if response.get("error") is not None:
            found.append("engine_error")
        return ParsedResponse(response, ended=True, shown=shown, problems=tuple(found))


class SyntheticStreamResponse(WholeResponse):
    """An unstreamed JSON response to a client that requested a stream."""

    def __init__(self, view: ClientView, prompt: KnownPrompt | None = None) -> None:
        super().__init__(view, prompt)
        stream_format = EVENT_STREAM if view.renderer is None else view.renderer.stream_format
        self.content_type = stream_format.content_type

    def _render(self, body: bytes, response: Json, shown: Json, *, loosely: bool) -> tuple[bytes, ParsedResponse]:
        view = self._view
        if view.renderer is not None:
            return render_as_stream(view.engine, view.renderer, shown), self._answer(response, shown)
        try:
            events = replay.replay_events(
                view.engine.shape, view.dialect.name, shown, usage=view.usage, loosely=loosely
            )
        except (TypeError, KeyError, AttributeError):  # similar to a response, but it cannot be converted into events
            events = b"data: " + write_json(shown, loosely=loosely) + b"\n\n" + replay.DONE
            return events, self._answer(response, shown, "unparsed_event")
        return events, self._answer(response, shown)


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
