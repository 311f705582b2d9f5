"""What every engine answers: ask, hide, tokens.

Holds the `Engine` protocol and the values it gives. `ask` and `hide` are a pair: what `ask` adds, `hide` takes away
again, so that the client sees what it would see without us. Nothing here changes a body or a response it was given.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from proxy.protocols.dialects.base import DialectName, ResponseOptions, is_on

Json = dict[str, Any]

# Which logprobs an engine is asked for, beyond what a client asks itself: each sampled id's, in the form that tells most
# or in the one that costs least, or none. Ids are asked for in any case, and with logprobs where they come by those alone.
LogprobsLevel = Literal["full", "sampled", "off"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What was found out about the server at hand. None: not known.

    `has_parser`: a reasoning or tool parser is configured, which decides whether SGLang's chat streams lose logprobs.
    `forces_usage`: its streams have usage on each event, whatever is requested (vLLM's --enable-force-include-usage).
    `sampling_defaults`: what chat and completions are sampled with where a request leaves a field out.
    """

    kind: str
    version: str | None = None
    has_parser: bool | None = None
    forces_usage: bool = False
    sampling_defaults: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class InjectionRequest:
    """A call as it is to be made, before an engine is asked for more than its client asked.

    `asked` is what the client itself wants to see, `headers` are the client's, by lowercase name. `keep_reasoning`:
    whether a wish for no reasoning may be overridden where it would cost the ids. `logprobs`: which ones we want.
    `forces_usage`: see `Traits`.
    """

    dialect: DialectName
    body: Mapping[str, Any]
    response_options: ResponseOptions
    keep_reasoning: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    logprobs: LogprobsLevel = "full"
    forces_usage: bool = False

    @property
    def adds_logprobs(self) -> bool:
        """Whether logprobs are to be asked that the client did not ask."""
        return self.logprobs != "off" and not self.response_options.logprobs


@dataclass(frozen=True, slots=True)
class StripRules:
    """What the client did not ask for and must not see.

    `token_ids`, `logprobs`: to be null again. `keys`: to be deleted, since a plain answer has no such keys.
    `empty_deltas`: drop stream events that exist only because ids or logprobs were asked. `reasoning`: the client
    switched reasoning off, but the engine was asked for it because it would have withheld the ids as well. `usage`: drop the
    usage event of a stream; `running_usage`: remove usage from the other events.
    """

    token_ids: bool = False
    logprobs: bool = False
    empty_deltas: bool = False
    reasoning: bool = False
    usage: bool = False
    running_usage: bool = False
    keys: frozenset[str] = frozenset()

    @property
    def anything(self) -> bool:
        """Whether there is anything to hide at all."""
        return self.of_choices or self.usage or self.running_usage

    @property
    def of_choices(self) -> bool:
        """Whether anything of a response or a choice is to be hidden, usage aside."""
        return self.token_ids or self.logprobs or self.empty_deltas or self.reasoning or bool(self.keys)


@dataclass(frozen=True, slots=True)
class Injection:
    """What to send: fields and headers to set, what to hide of the answer, and problems known beforehand.

    `problems` are codes of `proxy.trajectory.fidelity.PROBLEMS`.
    """

    fields: Mapping[str, Any]
    strip_rules: StripRules
    problems: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One choice as the engine gave it: lists of the response itself, not copies, and values of any type. None: not given.

    `counted` is how many tokens the engine says it sampled for this choice alone. `spans` are (start, end, version of
    the weights) over its sampled ids. `routed_experts` and `sampling_mask` are as the engine wrote them.
    """

    index: int
    prompt_ids: list[int] | None
    ids: list[int] | None
    logprobs: list[float | None] | None
    finish_reason: Any
    stop_reason: Any
    counted: Any = None
    spans: tuple[tuple[Any, Any, Any], ...] | None = None
    routed_experts: Any = None
    sampling_mask: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a whole response.

    `prompt_ids` is the prompt that all choices share, where the engine says it once. `problems` are codes of what only
    this engine's answers can tell; `notes` are facts worth keeping with the step (such as retractions).
    """

    prompt_ids: list[int] | None
    choices: tuple[Sampled, ...]
    problems: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FollowUpRequest:
    """A question to the engine once its answer is there: a POST, whose JSON answer `tokens` gets as `found`."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How an engine's own events look, for answers that are replayed as a stream.

    Of a chat stream: `role` is the delta of a choice's first event, `delta` what each later one begins with, `call_delta`
    what one with a tool call does, and `reasoning` the field of thoughts. `choice` are fields that each choice of an
    event has, null until the finish (which has the response's), `early` those that come with the text instead.
    `head` is what of the response's top level each event repeats, `first` what the first of each choice adds, `last`
    what the very last one does. `null_logprobs`: whether events without logprobs say null; `null_usage`: whether usage
    in a stream has its nulls.
    """

    head: frozenset[str]
    role: Mapping[str, Any]
    delta: Mapping[str, Any]
    call_delta: Mapping[str, Any]
    call: Mapping[str, Any] = field(default_factory=lambda: {"arguments": ""})
    more_call: Mapping[str, Any] = field(default_factory=dict)
    more_function: Mapping[str, Any] = field(default_factory=dict)
    choice: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    null_logprobs: bool = True
    null_usage: bool = True


class Engine(Protocol):
    """One kind of inference server.

    `logprobs_mode` is what its logprobs are of, where the configuration is silent. `always_sends_usage`: each unstreamed
    answer has the counts of its tokens, so one without them is faulty. `unbounded`: finish reasons with which a choice may have
    more tokens than `max_tokens`.
    """

    kind: str
    logprobs_mode: str | None
    always_sends_usage: bool
    unbounded: frozenset[str]
    shape: StreamShape

    def inject(self, request: InjectionRequest) -> Injection:
        """What to add to the client's body so that ids and logprobs come."""
        ...

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Whether the logprobs of this mode are of fewer tokens, or of other odds, than the model's own at the temperature.

        `asked` is the part of the sent body that says how to sample (`Dialect.sampling`). A plain forward pass over the same
        ids does not give such logprobs again. Where the request does not say enough, it is true.
        """
        ...

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Whether a streamed call may be asked unstreamed: not if the engine would refuse it streamed."""
        ...

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        """An unstreamed (or folded) response without what the client did not ask for; a new dict if that differs."""
        ...

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """A streamed chunk likewise; the same dict if nothing in it is to be hidden, None if it is not to be shown."""
        ...

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Whether a stream with this finish event has a usage event, if one was requested: without it, it was lost."""
        ...

    def follow_up(self, dialect: DialectName, body: Mapping[str, Any], response: Json) -> FollowUpRequest | None:
        """What is to be asked after an unstreamed (or folded) response, if its tokens are not all in it."""
        ...

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Where the tokens are in an unstreamed (or folded) response.

        `body` is what was sent; `found` the answer of the `lookup`, None if there was none.
        """
        ...


_HIGHEST_INDEX: Final = 2**31 - 1
# vLLM 0.32.0 names tokens by their ids on request, or with the server flag --return-tokens-as-token-ids.
_NAMED: Final = "token_id:"
_BOOLEANS: Final = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})


def index_of(choice: Json) -> int:
    """The index of a choice. Raises TypeError for what is no index: nothing could be paired by it."""
    index = choice["index"]
    if type(index) is not int or not 0 <= index <= _HIGHEST_INDEX:
        raise TypeError("a choice's index must be a small integer from 0 on")
    return index


def logprobs_of(choice: Json) -> list[float | None] | None:
    """One logprob a sampled token: chat has `logprobs.content[].logprob`, completions `logprobs.token_logprobs`."""
    logprobs: Any = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    return [entry.get("logprob") for entry in content] if content is not None else logprobs.get("token_logprobs")


def without(choice: Json, rules: StripRules) -> Json:
    """A choice, anew, without the keys that flags brought, and its logprobs null again if they were."""
    shown = {key: value for key, value in choice.items() if key not in rules.keys}
    if rules.logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown


def has_other_ids_as_names(choice: Json, ids: Sequence[Any] | None) -> bool:
    """Whether the logprobs of a choice name tokens by ids that are not the sampled ones."""
    logprobs = choice.get("logprobs")
    if not ids or not isinstance(logprobs, dict):
        return False
    content = logprobs.get("content")
    names = logprobs.get("tokens") or () if content is None else [entry.get("token") for entry in content]
    with suppress(TypeError):  # a name that is no string is looked at below
        if _NAMED not in "\n".join(names):
            return False  # tokens are named by their texts, as almost always
    return any(
        isinstance(name, str) and name.startswith(_NAMED) and name != f"{_NAMED}{token}"
        for name, token in zip(names, ids, strict=False)
    )


def usage_options(request: InjectionRequest, *, running: bool) -> Json:
    """What to set of `stream_options`, so that a stream counts its tokens; empty where that is not to be changed.

    `running`: each event counts the tokens of its choice, too. Options that an engine refuses stay as they are.
    """
    if request.forces_usage:
        return {}
    stream_options = request.body.get("stream_options")
    options = {} if stream_options is None else stream_options
    if not is_on(request.body.get("stream")) or not isinstance(options, dict):
        return {}
    if not all(_is_boolean(options.get(name)) for name in ("include_usage", "continuous_usage_stats")):
        return {}
    flags = {"include_usage": True, "continuous_usage_stats": running or has_running_usage(request.body)}
    changed = {name: value for name, value in flags.items() if is_on(options.get(name)) != value}
    return {**options, **changed} if changed else {}


def has_running_usage(body: Mapping[str, Any]) -> bool:
    """Whether a client asks for usage on each event: `continuous_usage_stats` counts for nothing without `include_usage`."""
    options = body.get("stream_options")
    return isinstance(options, dict) and all(map(is_on, map(options.get, ("include_usage", "continuous_usage_stats"))))


def _is_boolean(value: Any) -> bool:
    """Whether pydantic reads it as a boolean or as absent."""
    return value.lower() in _BOOLEANS if isinstance(value, str) else value in (None, True, False)
