"""The plan of a call: what to send upstream, and why it differs from what the client sent.

Holds the pure decisions taken before anything is sent: model names, the rollout's sampling rules and tools, and what the
engine is asked beyond the client's own wishes. It makes new dicts and never changes the client's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from proxy.dialects.base import Asked, Dialect, Spoken
from proxy.dialects.translated import Translation
from proxy.engines.base import Engine, Json, LogprobsAsked, Traits, Wish
from proxy.engines.losses import Circumstances, Framing, Streaming, choose_framing, met
from proxy.errors import NotValid
from proxy.trajectory.step import EngineFacts
from proxy.wire.replay import error_events
from proxy.wire.reply import View
from proxy.wire.token_reply import TokenReply

# The client may name the bound on sampled tokens either way; the first of them wins (vLLM 0.32.0).
_BOUNDS = ("max_completion_tokens", "max_tokens")

_STREAM = frozenset({"stream", "stream_options"})

# What decides which distribution a token was drawn from; recorded with each step: as sent, else the engine's default.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "n", "max_tokens", "max_completion_tokens",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search",
    # A grammar masks the logits before vLLM 0.32 takes its logprobs, raw ones too: they are of what it left.
    "structured_outputs", "response_format", "tool_choice",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules on sampling: `override` wins over the client, `default` yields to it, `cap` bounds numbers from above.

    A cap may be "auto" for the bound on sampled tokens: what the model's window leaves beside the prompt.
    """

    override: Mapping[str, Any] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    cap: Mapping[str, float | Literal["auto"]] = field(default_factory=dict)

    @property
    def caps_by_window(self) -> bool:
        """Whether a bound depends on the prompt's length."""
        return "auto" in self.cap.values()

    def over(self, base: "Sampling") -> "Sampling":
        """These rules on top of more general ones."""
        return Sampling({**base.override, **self.override}, {**base.default, **self.default}, {**base.cap, **self.cap})


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for calls of one rollout, from its opening and the configuration.

    The call's own are `tokens`, and `room_left`: what the window leaves for it, where a cap asks for that.
    """

    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Json, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    keep_reasoning: bool = True
    streaming: Streaming = "auto"
    logprobs: LogprobsAsked = "full"
    tokens: TokenReply | None = None
    room_left: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One call, decided. `request` is the client's body, `body` what is sent, `sent` the difference on the top level.

    `framing` is how it goes upstream; `expected` are the problems that the engine is known to have with such a call.
    `wants_logprobs`: somebody does, so that a step without any lacks them. `translation`: the client's dialect, where it is
    not the engine's.
    """

    step_id: str
    rollout_id: str
    endpoint: str
    dialect: Dialect
    engine: Engine
    engine_facts: EngineFacts
    asked: Asked
    request: Json
    body: Json
    sent: Json
    view: View
    model_asked: str | None
    model_served: str | None
    sampling: Json
    framing: Framing = "whole"
    wants_logprobs: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    policy_version: str | None = None
    translation: Translation | None = None
    problems: tuple[str, ...] = ()
    expected: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spoken(self) -> Spoken:
        """The dialect that the client speaks."""
        return self.translation or self.dialect

    def error_events(self, body: bytes) -> bytes:
        """An error within a stream that has begun: what would have been the whole body, in the client's dialect."""
        telling = self.view.telling
        return error_events(body) if telling is None else telling.finish(None, body.decode("utf-8", "replace"))


def edit(body: Json, terms: Terms, dialect: Dialect) -> tuple[Json, set[str]]:
    """The fields that the terms set in a body, and those they take out of it (ours, which no engine knows)."""
    fields = {} if terms.tokens is None else terms.tokens.fields(body)
    model = body.get("model")
    if isinstance(model, str) and (served := served_as(model, terms.models)) is not None:
        fields["model"] = served
    if dialect.name == "chat" and type(body.get("logprobs")) is int and body["logprobs"] == 1:
        fields["logprobs"] = True  # verifiers (fa7f5fa) sends 1; vLLM takes it for true, llama.cpp's server for nothing
    if terms.tools and dialect.name != "generate" and not body.get("tools"):
        fields["tools"] = list(terms.tools)
    placed, unset = dialect.place_sampling(body, *_sample(dialect.sampling(body), terms.sampling, terms.room_left))
    return {**fields, **placed}, unset | ({"rollout_id"} & body.keys())


def served_as(model: str, models: Mapping[str, str]) -> str | None:
    """What the engine calls the model that is asked for; None if nothing is said of it.

    Its own name goes before the beginning of it with a star behind ("claude-*"), a longer one before a shorter one.
    """
    if model in models:
        return models[model]
    found = [name for name in models if name.endswith("*") and model.startswith(name[:-1])]
    return models[max(found, key=len)] if found else None


def bound_of(sampling: Mapping[str, Any]) -> float | None:
    """The bound on sampled tokens; None if there is none that is a number."""
    bound = next((sampling[name] for name in _BOUNDS if sampling.get(name) is not None), None)
    return bound if isinstance(bound, int | float) else None


def _sample(said: Mapping[str, Any], rules: Sampling, room_left: int | None) -> tuple[Json, set[str]]:
    """What the rules set in a client's sampling, and what they take out of it."""
    fields: Json = {}
    unset: set[str] = set()
    for name, value in rules.default.items():
        if all(said.get(spelling) is None for spelling in _spellings(name)):
            fields[name] = value
    for name, value in rules.override.items():
        spellings = _spellings(name)
        for winning in spellings[: spellings.index(name)]:
            fields.pop(winning, None)
            unset |= {winning} & said.keys()
        fields[name] = value
    for name, bound in rules.cap.items():
        kept = {**{k: v for k, v in said.items() if k not in unset}, **fields}
        if bound != "auto":
            _cap(kept, name, bound, fields)
        elif room_left is not None and bound_of(kept) is not None:
            _cap(kept, name, room_left, fields)
    return fields, unset


def _spellings(name: str) -> tuple[str, ...]:
    """The names that mean the same as this one, itself among them."""
    return _BOUNDS if name in _BOUNDS else (name,)


def _cap(body: Json, name: str, bound: float, fields: Json) -> None:
    """Set in `fields` what keeps `name` at or below the bound; a field that is absent is set to the bound."""
    present = [spelling for spelling in _spellings(name) if body.get(spelling) is not None]
    for spelling in present or [name]:
        value = body.get(spelling)
        if value is None or (isinstance(value, int | float) and value > bound):
            fields[spelling] = bound


def make_plan(  # noqa: PLR0913 - a plan is all of this, and every argument has its name
    body: Json,
    *,
    terms: Terms,
    step_id: str,
    rollout_id: str,
    endpoint: str,
    dialect: Dialect,
    engine: Engine,
    engine_facts: EngineFacts,
    logprobs_mode: str | None,
    traits: Traits | None = None,
    headers: Mapping[str, str] | None = None,
    policy_version: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Plan:
    """Decide a call. `headers` are the client's, by lowercase name. Raises NotValid for tokens no stream can tell."""
    fields, unset = edit(body, terms, dialect)
    edited = {key: value for key, value in body.items() if key not in unset} | fields
    asked = _asked(dialect, body, edited)
    at = Circumstances(dialect.name, edited, traits or Traits(engine.kind), terms.keep_reasoning, _wanted(terms, asked))
    framing = _framing(engine, terms, at)
    edited, taken = _unstreamed(edited) if framing == "replay" else (edited, frozenset[str]())
    ask = engine.ask(_wish(at, edited, asked, terms, headers or {}))
    sent_body = {**edited, **ask.fields}
    model_asked, model_served = _name(body.get("model")), _name(sent_body.get("model"))
    renamed = model_asked if model_asked != model_served else None
    return Plan(
        step_id=step_id,
        rollout_id=rollout_id,
        endpoint=endpoint,
        dialect=dialect,
        engine=engine,
        engine_facts=engine_facts,
        asked=asked,
        request=body,
        body=sent_body,
        sent={"set": _changed(body, {**fields, **ask.fields}), "unset": sorted(unset | (taken & body.keys()))},
        view=View(dialect, engine, ask.hidden, asked.choices, renamed, framing == "replay", asked.usage, terms.tokens),
        model_asked=model_asked,
        model_served=model_served,
        sampling=_sampling(dialect, sent_body, engine, at.traits, logprobs_mode or engine.logprobs_mode),
        framing=framing,
        wants_logprobs=at.wants_logprobs,
        headers=ask.headers,
        policy_version=policy_version,
        problems=ask.problems,
        expected=frozenset(code for loss in met(engine.kind, at, live=framing == "live") for code in loss.codes),
        extra={**(extra or {}), **({} if framing == "whole" else {"streaming": framing})},
    )


def _wish(at: Circumstances, body: Json, asked: Asked, terms: Terms, headers: Mapping[str, str]) -> Wish:
    """The call as it is to be made, for the engine to add to."""
    return Wish(at.dialect, body, asked, terms.keep_reasoning, headers, terms.logprobs, at.traits.forces_usage)


def _asked(dialect: Dialect, body: Json, edited: Json) -> Asked:
    """What may be seen is the client's own wish; how many choices come is decided by what is sent."""
    sent = dialect.asked(edited)
    return replace(dialect.asked(body), samples=sent.samples, choices=sent.choices)


def _wanted(terms: Terms, asked: Asked) -> bool:
    """Whether anybody wants logprobs: then a step without any lacks them."""
    return terms.logprobs != "off" or asked.logprobs


def _unstreamed(body: Json) -> tuple[Json, frozenset[str]]:
    """The body of a call that is to be answered whole, and what that takes out of it."""
    return {key: value for key, value in body.items() if key not in _STREAM}, _STREAM


def _framing(engine: Engine, terms: Terms, at: Circumstances) -> Framing:
    """How the call goes upstream."""
    bears_replay = engine.bears_replay(at.dialect, at.body)
    if terms.tokens is None:
        return choose_framing(terms.streaming, engine.kind, at, bears_replay=bears_replay)
    framing = choose_framing("replay", engine.kind, at, bears_replay=bears_replay)
    if framing == "live":
        raise NotValid(
            "X-Reply-Tokens and X-Reply-Ids are of whole replies: this call cannot be made unstreamed and told as a stream; "
            "leave out `stream`, or what goes with it",
            param="stream",
        )
    return framing


def _changed(body: Json, fields: Json) -> Json:
    """The fields that are not as the client sent them."""
    return {key: value for key, value in fields.items() if key not in body or body[key] != value}


def _sampling(dialect: Dialect, body: Json, engine: Engine, traits: Traits, logprobs_mode: str | None) -> Json:
    """Return what decides which distribution a token was drawn from: as sent, else the engine's default, if that is known.

    And what its logprobs are of. The defaults are those of chat and completions: vLLM (0.32.0) uses none of them for
    `/inference/v1/generate`.
    """
    sent = {key: value for key, value in dialect.sampling(body).items() if value is not None}
    defaults = (traits.sampling_defaults or {}) if dialect.name != "generate" else {}
    said = {key: sent[key] for key in SAMPLING_FIELDS if key in sent}
    is_constrained = engine.constrains({**defaults, **sent}, logprobs_mode)
    return {**defaults, **said, "logprobs_mode": logprobs_mode, "constrained": is_constrained}


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) else None
