"""Adapters of calls in another format, and the adapter of dialects that are translated to chat.

A translated call is sent as a chat call; its response is rendered in the client's dialect, also from a stored step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Self

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import METHODS, TRANSLATORS
from proxy.protocols.dialects.base import (
    NO_REFERENCES,
    CallIdentity,
    References,
    ResolvedReferences,
    ResponseRenderer,
    TranslationOptions,
    Translator,
    is_on,
)
from proxy.protocols.engines import ENGINES
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.response import MALFORMED
from proxy.protocols.whole_response import render_as_stream
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.step import Step

CHAT: Final = "/v1/chat/completions"

# raised by a stored response that does not have chat's format: it cannot be rendered again
_ODD_SHAPE: Final = (*MALFORMED, UnprocessableRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAdapter:
    """A call in another format: it is converted to an engine's format, and its response converted back."""

    request: Mapping[str, Any]  # the client's body
    body: dict[str, Any]  # in the dialect of `endpoint`
    endpoint: str = CHAT  # of engines
    own: Mapping[str, str] = field(default_factory=dict)  # endpoints that take `request` as it is, by kind of engine
    returns_logprobs: bool = False  # the response has logprobs, so they are requested regardless of the configuration
    retries_by_body: bool = False  # the same body again in a rollout is a retry, without an idempotency key
    needs_steps: bool = False  # the response requires the rollout's earlier steps

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the adapter with the rollout's earlier steps."""
        return self

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the body for an engine of this kind (None: unknown). Raises UnprocessableRequest if it cannot serve it."""
        return self.body

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan with the client's body, and with the differences between that body and the one sent."""
        asked = self.request
        changed = {name: value for name, value in plan.body.items() if name not in asked or asked[name] != value}
        return replace(
            plan, request=dict(asked), sent={"set": changed, "unset": sorted(asked.keys() - plan.body.keys())}
        )

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end of the call in the client's format. Errors of the engine are unchanged."""
        return outcome

    def answer(self, step: Step) -> bytes | None:
        """Return the response of a step in the client's format; None if the dialect of the step renders it."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedCall(CallAdapter):
    """One call of a dialect that is translated to chat."""

    translation: Translator
    options: TranslationOptions  # with which `body` was read, of the engine that is expected to serve the call
    references: References
    received: float = 0.0  # its time of arrival in unix seconds
    resolved: ResolvedReferences = NO_REFERENCES

    def read_for(self, options: TranslationOptions) -> dict[str, Any]:
        """Return the chat body, from which an engine with these options makes the prompt that its own endpoint would make."""
        if options == self.options and self.resolved is NO_REFERENCES and not self.references.items:
            return self.body
        return self.translation.read(self.request, options, self.resolved)

    def recorded(self, plan: Plan) -> Plan:
        """Return the chat call's plan with the client's dialect; it may be called for several endpoints one after the other."""
        model = self.request.get("model")
        requested_model = model if isinstance(model, str) else None
        identity = CallIdentity(plan.step_id, int(self.received), requested_model or "", plan.rollout_id)
        renderer = self.translation.renderer(self.request, identity)
        plan = CallAdapter.recorded(self, plan)
        return replace(
            plan,
            model_asked=requested_model,
            translation=self.translation,
            view=replace(plan.view, translation=self.translation, renderer=renderer),
        )


def read_translated_call(endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> TranslatedCall | None:
    """Return the call of a dialect that is translated to chat; None for other endpoints.

    Raises UnprocessableRequest, except for a call that refers to items, which is read after they are found.
    """
    translation = TRANSLATORS.get(endpoint) or METHODS.get(endpoint)
    if translation is None:
        return None
    references = translation.references(body)
    chat = {} if references.items else translation.read(body, options)
    return TranslatedCall(translation=translation, request=body, body=chat, options=options, references=references)


def _all() -> Iterable[Translator]:
    return chain(TRANSLATORS.values(), METHODS.values())


def error_dialect_for(endpoint: str, headers: Mapping[str, str]) -> Translator | None:
    """Return the error dialect of a path that samples nothing; None: OpenAI's."""
    return next((translator for translator in _all() if translator.is_spoken(endpoint, headers)), None)


def translator_of(step: Step) -> Translator | None:
    """Return the translator of a step's dialect; None for a dialect that engines support."""
    return next((translator for translator in _all() if translator.name == step.dialect), None)


def renderer_for(step: Step) -> ResponseRenderer | None:
    """Return the renderer of a step's response, as it was rendered originally; None for a dialect that engines support.

    Raises UnprocessableRequest for a damaged request.
    """
    translator = translator_of(step)
    return None if translator is None else translator.renderer(step.request, CallIdentity.of(step))


def client_response(step: Step) -> dict[str, Any] | None:
    """Return the unstreamed response of a step; None if it is incomplete or not in chat's format."""
    if step.status != "complete" or step.response is None:
        return None
    try:
        renderer = renderer_for(step)
        return None if renderer is None else renderer.whole(dict(step.response))
    except _ODD_SHAPE:
        return None


def client_response_bytes(step: Step) -> bytes | None:
    """Return the client's response: a JSON body, or a stream, possibly in fewer events; None as in `client_response`."""
    engine = ENGINES.get(step.engine.kind)
    if step.status != "complete" or step.response is None or engine is None:
        return None
    if is_on(step.request.get("stream")):
        try:
            renderer = renderer_for(step)
            return None if renderer is None else render_as_stream(engine, renderer, dict(step.response))
        except _ODD_SHAPE:
            return None
    whole = client_response(step)
    return None if whole is None else to_json_bytes(whole)
