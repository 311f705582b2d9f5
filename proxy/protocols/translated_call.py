"""Dialects by way of chat, as forms: a call in another dialect is sent as a chat, and answered in that dialect.

Holds what such a call is for planning, and its answer told once more from its step. How a dialect reads and tells is its
own; what it leans on by name (`Earlier`) is looked up by `proxy.api.model.references`. It must not await.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from proxy.errors import NotValid
from proxy.protocols.dialects import TRANSLATORS
from proxy.protocols.dialects.base import is_on
from proxy.protocols.dialects.translation import (
    CallIdentity,
    ResolvedReferences,
    ResponseRenderer,
    TranslationOptions,
    Translator,
)
from proxy.protocols.engines import ENGINES
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.response import render_as_stream
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.step import Step

CHAT: Final = "/v1/chat/completions"

# What reading a stored response that is not of chat's shape raises: such an answer cannot be given a second time.
_ODD_SHAPE: Final = (TypeError, KeyError, AttributeError, ValueError, IndexError, NotValid)

# What an engine makes of these dialects by itself (see `TranslationOptions`). Seen: vLLM 0.32.0; read: SGLang 0.5.23
# (entrypoints/anthropic/serving.py:421), llama.cpp 2026.10.
_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {"thought": "reasoning"},
    "sglang": {"thought": "reasoning_content", "system_joint": "\n"},
    "llamacpp": {"thought": "reasoning_content"},
}


@dataclass(frozen=True, slots=True)
class TranslatedCall:
    """One call of a dialect by way of chat.

    `received` is when it came, in unix seconds. `merges_systems` and `has_developers` are what the engine that is to answer
    does with systems (`proxy.upstream.system_messages`).
    """

    translation: Translator
    request: Mapping[str, Any]
    body: dict[str, Any]
    options: TranslationOptions
    received: float = 0.0
    resolved: ResolvedReferences = field(default_factory=ResolvedReferences)
    merges_systems: bool = False
    has_developers: bool = False
    endpoint: str = CHAT
    returns_logprobs: bool = False  # whoever wants them asks for them, as in chat
    retries_by_body: bool = False
    needs_steps: bool = False

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the same call: it needs no earlier step."""
        return self

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """The chat body, of which this kind of engine makes the prompt that its own endpoint would."""
        return self.translation.read(self.request, self.options_for(kind), self.resolved)

    def options_for(self, kind: str | None) -> TranslationOptions:
        """How it is translated for an engine of this kind."""
        own = {"merges_systems": self.merges_systems, "has_developers": self.has_developers, **_OWN.get(kind or "", {})}
        return replace(self.options, **own)

    def recorded(self, plan: Plan) -> Plan:
        """The plan of the chat call, which is told in the client's dialect; it may be made for several endpoints in turn."""
        model = self.request.get("model")
        requested_model = model if isinstance(model, str) else None
        renderer = self.translation.renderer(
            self.request, call_identity(plan.step_id, plan.rollout_id, self.received, requested_model)
        )
        changed = {key: value for key, value in plan.body.items() if _is_new(self.request, key, value)}
        return replace(
            plan,
            request=dict(self.request),
            sent={"set": changed, "unset": sorted(self.request.keys() - plan.body.keys())},
            model_asked=requested_model,
            translation=self.translation,
            view=replace(plan.view, translation=self.translation, renderer=renderer),
        )

    def reshape(self, outcome: Outcome) -> Outcome:
        """It was told in the client's dialect from the beginning."""
        return outcome

    def answer(self, step: Step) -> bytes | None:
        """None: who tells an answer again tells it by its step's dialect."""
        return None


def read_translated_call(endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> TranslatedCall | None:
    """The call of a dialect by way of chat; None if the endpoint is of none.

    Raises NotValid, but for a call that names items, which cannot be read before they are found.
    """
    translation = TRANSLATORS.get(endpoint)
    if translation is None:
        return None
    chat = {} if translation.references(body).items else translation.read(body, options)
    return TranslatedCall(translation, body, chat, options)


def error_dialect_for(endpoint: str, headers: Mapping[str, str]) -> Translator | None:
    """What a client speaks at a path that samples nothing; None: OpenAI's shapes, which chat has."""
    if "anthropic-version" in headers or endpoint.startswith("/v1/messages/"):
        return TRANSLATORS["/v1/messages"]
    return None


def renderer_for(step: Step) -> ResponseRenderer:
    """How the answer of a step by way of chat is told: as it was."""
    identity = call_identity(step.step_id, step.rollout_id, step.timing.received, step.model_asked)
    return TRANSLATORS_BY_NAME[step.dialect].renderer(step.request, identity)


def client_response(step: Step) -> dict[str, Any] | None:
    """Return the unstreamed answer of a step by way of chat; None if it has none that is whole and of chat's shape."""
    if step.status != "complete" or step.response is None:
        return None
    try:
        return renderer_for(step).whole(dict(step.response))
    except _ODD_SHAPE:
        return None


def client_response_bytes(step: Step) -> bytes | None:
    """Return what its client was answered: a JSON body, or a stream, maybe in fewer events; None as in `whole_answer`."""
    engine = ENGINES.get(step.engine.kind)
    if step.status != "complete" or step.response is None or engine is None:
        return None
    if is_on(step.request.get("stream")):
        try:
            return render_as_stream(engine, renderer_for(step), dict(step.response))
        except _ODD_SHAPE:
            return None
    whole = client_response(step)
    return None if whole is None else to_json_bytes(whole)


def call_identity(step_id: str, rollout_id: str, received: float, model: str | None) -> CallIdentity:
    """What is told of a call beside what was sampled."""
    return CallIdentity(step_id=step_id, created_s=int(received), model=model or "", rollout_id=rollout_id)


def _is_new(request: Mapping[str, Any], key: str, value: Any) -> bool:
    return key not in request or request[key] != value


TRANSLATORS_BY_NAME: Final = {translation.name: translation for translation in TRANSLATORS.values()}
