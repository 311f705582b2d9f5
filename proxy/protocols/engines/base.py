"""The `Engine` protocol and its value types.

Invariant: `strip` removes exactly what `inject` added, so the client receives the response that it would receive without
TokenTape. Requests and responses that are passed in are never modified.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, Literal, Protocol

from proxy.protocols.dialects.base import (
    DialectName,
    Json,
    ResponseOptions,
    TranslationOptions,
    is_on,
    requested_usage,
    text_or_none,
)
from proxy.protocols.json_texts import KnownPrompt
from proxy.protocols.sampling import Sampling
from proxy.trajectory.arrays import Ids, has_negative, pack_ids
from proxy.trajectory.images import parts_of

# The logprobs that are requested in addition to the client's: of each sampled id with the most detail ("full"), of each
# sampled id at the lowest cost ("sampled"), or none. Ids are always requested, with logprobs if the engine has no other way.
LogprobsLevel = Literal["full", "sampled", "off"]
Streaming = Literal["auto", "live", "replay"]
Framing = Literal["whole", "live", "replay"]  # how a call is sent; `replay`: a stream that is sent unstreamed


@dataclass(frozen=True, slots=True)
class Traits:
    """The detected properties of a server. None: unknown."""

    kind: str
    version: str | None = None
    has_parser: bool | None = None  # for reasoning or tools; without one, SGLang's chat streams lose logprobs
    # Streams have usage in each event even if it is not requested (vLLM's --enable-force-include-usage). It is requested
    # anyway, since a wrong detection must not hide lost tokens, and not stripped.
    forces_usage: bool = False
    sampling_defaults: dict[str, float] | None = None  # of chat and completions, for fields that a request omits
    model: str | None = None  # of requests that name none
    has_prompt_field: bool = False  # chat requests have the field `prompt_token_ids` (vLLM)
    parses_ids: bool = False  # it makes a chat reply of token ids (`Engine.parse_request`)
    vocabulary_size: int | None = None  # of a server that must not receive an id beyond it (SGLang)
    abort_path: str | None = None  # ends calls by their ids (vLLM with certain flags)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of a call, from its rollout, the configuration, its client and the server's traits."""

    sampling: Sampling = field(default_factory=Sampling)
    tools: Sequence[Json] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    keep_reasoning: bool = True  # a request without reasoning is overridden if the ids would be lost
    streaming: Streaming = "auto"
    logprobs: LogprobsLevel = "full"
    sampling_masks: bool = False  # request the tokens that truncated sampling keeps
    routed_experts: bool = False  # request the experts of each token
    room_left: int | None = None  # in the context window, if a cap requires it
    is_translated: bool = False  # the client reads another dialect, which has no options of chat streams
    traits: Traits = field(default_factory=lambda: Traits("plain"))
    headers: Mapping[str, str] = field(default_factory=dict)  # the client's, by lowercase name
    requested: ResponseOptions = field(default_factory=ResponseOptions)  # what the client itself requests to receive

    @property
    def adds_logprobs(self) -> bool:
        """Return whether to request logprobs that the client does not request."""
        return self.logprobs != "off" and not self.requested.logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Return whether logprobs are configured or requested: a step without them then lacks them."""
        return self.logprobs != "off" or self.requested.logprobs


@dataclass(frozen=True, slots=True)
class StripRules:
    """The parts of a response that the client did not request and must not receive."""

    token_ids: bool = False  # set to null
    logprobs: bool = False  # set to null
    empty_deltas: bool = False  # drop stream events that exist only because ids or logprobs were requested
    reasoning: bool = False  # the client disabled it; it was requested because the engine withholds the ids otherwise
    usage: bool = False  # drop the usage event of a stream
    running_usage: bool = False  # remove usage from the other events
    keys: frozenset[str] = frozenset()  # deleted, because they are absent without injection
    with_logprobs: frozenset[int] = frozenset()  # the choices that keep their logprobs
    meta_keys: frozenset[str] = frozenset()  # deleted from SGLang's `meta_info`
    anything: bool = field(init=False)  # whether there is anything to strip
    of_choices: bool = field(init=False)  # whether there is anything except usage

    def __post_init__(self) -> None:
        of_choices = (
            self.token_ids or self.logprobs or self.empty_deltas or self.reasoning or bool(self.keys or self.meta_keys)
        )
        object.__setattr__(self, "of_choices", of_choices)  # once, as each event of a stream reads it
        object.__setattr__(self, "anything", of_choices or self.usage or self.running_usage)


@dataclass(frozen=True, slots=True)
class FollowUpRequest:
    """A POST to the engine: after its response, which `tokens` receives as `found`, or to abort a call."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class CallId:
    """How a call gets an id: in this field. A POST of `aborting(id)` to the path ends the call."""

    field: str
    path: str
    aborting: Callable[[str], Json]


@dataclass(frozen=True, slots=True)
class Injection:
    """What to send, and what to strip from the response."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    strip_rules: StripRules = StripRules()
    problems: tuple[str, ...] = ()  # known in advance: codes of `step.PROBLEMS`
    headers: Mapping[str, str] = field(default_factory=dict)
    # By which the call can be ended, and its response then has all tokens sampled so far; None if only closing the connection
    # ends it.
    call_id: CallId | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One choice as returned by the engine: the response's own lists, with unchecked values. None: absent."""

    index: int
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    counted: Any = None  # the engine's count of its tokens
    prompt_counted: Any = None  # and of the tokens of its prompt
    spans: tuple[tuple[Any, Any, Any], ...] | None = None  # (start, end, weight version) over the sampled ids
    routed_experts: Any = None  # in the engine's format
    sampling_mask: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a whole response."""

    prompt_ids: list[int] | None  # the prompt that all choices share, if the engine returns it once
    choices: tuple[Sampled, ...]
    problems: tuple[str, ...] = ()  # that only this engine can detect
    notes: Mapping[str, Any] = field(default_factory=dict)  # recorded with the step (such as retractions)
    sampling: Mapping[str, Any] | None = None  # recorded parameters that the response determines, not the request


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The format of an engine's stream events, for responses that are replayed as a stream.

    Of a chat stream: deltas, and parts of a tool call. Then fields of choices, top-level fields, and which nulls there are.
    """

    head: frozenset[str]  # top-level fields of each event
    # The delta of a choice's first event.
    role: Mapping[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": ""})
    delta: Mapping[str, Any] = field(default_factory=dict)  # the base of later deltas
    call_delta: Mapping[str, Any] = field(default_factory=dict)  # the base of deltas with a tool call
    call: Mapping[str, Any] = field(default_factory=lambda: {"arguments": ""})
    more_call: Mapping[str, Any] = field(default_factory=dict)
    more_function: Mapping[str, Any] = field(default_factory=dict)
    choice: tuple[str, ...] = ()  # in each choice of an event, null until the finish, which has the response's values
    early: tuple[str, ...] = ()  # come with the text instead
    first: tuple[str, ...] = ()  # top-level fields of the first event of each choice
    last: tuple[str, ...] = ()  # of the last event
    alone: tuple[str, ...] = ()  # each has a separate event
    null_logprobs: bool = True  # in events without logprobs
    null_usage: bool = True  # usage in a stream keeps its nulls
    no_usage_yet: bool = False  # events with tool calls, and events of completions, have a null usage


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """One response: its status, the `Server` header, the JSON of a body with status 200 (None otherwise), the error's text."""

    status: int
    server: str
    body: Any
    error: str = ""


class Probed:
    """The responses of a server to harmless requests. `owner` owns its first model: all that some gateways forward."""

    def __init__(self, responses: Mapping[str, ProbeResponse]) -> None:
        self.servers = tuple(response.server for response in responses.values())
        self._bodies = {path: body for path, response in responses.items() if isinstance(body := response.body, dict)}
        models = self.facts("/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models else None
        self.owner = str(first.get("owned_by")) if isinstance(first, dict) else None

    def facts(self, *paths: str) -> Json:
        """Return the first JSON object of these paths that is not empty."""
        return next((body for path in paths if (body := self._bodies.get(path))), {})


@dataclass(frozen=True, slots=True)
class TraitsRequest:
    """A harmless request to a detected server; `read` returns the traits that its response shows, by their names."""

    path: str
    body: Json | None
    read: Callable[[ProbeResponse], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Quirk:
    """One known limitation of an engine."""

    dialects: tuple[DialectName, ...]
    framings: Literal["streams", "always"]  # it affects live streams only (replay avoids it), or every call
    what: str
    codes: tuple[str, ...]  # of `step.PROBLEMS`; an affected step may have some of them
    source: str
    applies: Callable[[Mapping[str, Any], CallOptions], bool]  # to a body and its options


class Engine(Protocol):
    """One kind of inference server. The defaults are for an unknown server: nothing is added to its requests."""

    kind: str
    quirks: tuple[Quirk, ...] = ()
    shape: StreamShape
    logprobs_mode: str | None = None  # the default if the configuration sets none
    returns_ids: bool = True
    returns_prompt_ids: bool = False  # beside the ids of all sampled tokens
    drops_half_characters: bool = False  # at the end of a reply; else they are U+FFFD
    hides_ends: bool = False  # the last token of an aborted reply may be one that ends it
    names_alternatives: bool = False  # by token id: `return_tokens_as_token_ids`
    always_sends_usage: bool = True  # in unstreamed responses: one without it is faulty
    sums_usage: bool = True  # over all choices
    # Prompt ids are sent to an endpoint only after it rendered the messages of a step to the step's prompt ids.
    verifies_renderings: bool = False
    unnamed_model: str | None = None  # in responses to requests that name no model
    headers_read: Collection[str] = ()  # of the client, by `inject`

    # Detection: what it serves, and the owner of its models
    probe_paths: tuple[str, ...] = ()
    owners: Collection[str] = ()

    # Other endpoints: paths of POSTs, the field of the text, and further fields
    tokenize_path: str | None = None
    detokenize_path: str | None = None
    detokenized_field: str = ""
    detokenize_fields: Mapping[str, Any] = {}
    counts_messages: bool = False  # /v1/messages/count_tokens
    loads_adapters: bool = False  # /v1/load_lora_adapter

    translation: Mapping[str, Any] = {}  # its fields of `TranslationOptions`

    def identify(self, probed: Probed) -> Traits | None:
        """Return the traits of a server of this kind; None for another kind."""
        return None

    def traits_requests(self, traits: Traits) -> tuple[TraitsRequest, ...]:
        """Return the requests that show further traits of a server."""
        return ()

    def for_traits(self, traits: Traits) -> "Engine":
        """Return the engine for a server with these traits."""
        return self

    def translation_options(self, configured: TranslationOptions, version: str | None) -> TranslationOptions:
        """Return the configured options with how this version translates Messages and Responses itself."""
        own = configured.thinking, configured.not_thinking, configured.ignore_hosted_tools
        return TranslationOptions(*own, **self.translation)

    def template_fields(self, body: Mapping[str, Any]) -> Json:
        """Return the fields of a chat body that determine its prompt, for the tokenize endpoint."""
        return {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}

    def inject(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Injection:
        """Return what to add to a request to obtain ids and logprobs; the rules of `options` are applied to `body` already."""
        return Injection()

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Return whether logprobs of this mode are of a modified distribution, not of the model's at the temperature.

        `sampling` is the part of the sent body with the sampling parameters (`Dialect.sampling`). A plain forward pass over
        the same ids does not reproduce such logprobs. True if the request does not determine it.
        """
        return has_grammar(sampling, ())

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Return whether a streamed call may be sent unstreamed: false if the engine would refuse the stream."""
        return True

    def must_replay(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> bool:
        """Return whether a stream lacks what `options` request."""
        return False

    def expected_quirks(
        self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions, *, live: bool
    ) -> list[Quirk]:
        """Return the known limitations that apply to a call. `live`: the call is sent as a stream."""
        return [
            quirk
            for quirk in self.quirks
            if dialect in quirk.dialects and (live or quirk.framings == "always") and quirk.applies(body, options)
        ]

    def framing(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Framing:
        """Return how a call is sent: `whole` if it is not streamed; else as configured, or as the quirks recommend.

        Only a stream with known options that the engine would not have refused can be replayed.
        """
        if not is_on(body.get("stream")):
            return "whole"
        usage = None if options.is_translated else body.get("stream_options")
        known = usage is None or (isinstance(usage, dict) and usage.keys() <= {"include_usage"})
        if options.streaming == "live" or not known or body["stream"] is not True or not self.can_replay(dialect, body):
            return "live"
        if options.streaming == "replay" or self.must_replay(dialect, body, options):
            return "replay"
        found = self.expected_quirks(dialect, body, options, live=True)
        return "replay" if any(quirk.framings == "streams" for quirk in found) else "live"

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        """Return an unstreamed (or accumulated) response without what the client did not request; a new dict if it differs."""
        return response

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Return a stripped stream chunk; the same dict if nothing is to be stripped, None if the chunk is to be dropped."""
        return chunk

    def prompt_ids_fields(self, dialect: DialectName, ids: Any) -> Json | None:
        """Return the fields of a body that make these ids (a list, or its JSON) its prompt; None if the engine accepts none."""
        return None

    def parse_request(
        self, body: Mapping[str, Any], prompt: Iterable[int], ids: Iterable[int]
    ) -> FollowUpRequest | None:
        """Return the request that makes the message of a chat reply with these ids; None if the engine has none.

        `body` is the sent chat body; `ids` have no stop token at their end.
        """
        return None

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Return whether a stream with this finish event must have a usage event, if one was requested."""
        return False

    def follow_up(self, dialect: DialectName, body: Mapping[str, Any], response: Json) -> FollowUpRequest | None:
        """Return the request to send after an unstreamed (or accumulated) response that lacks some of its tokens."""
        return None

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Return the tokens of an unstreamed (or accumulated) response.

        `body` is the sent body; `found` is the response to the `follow_up` request, None if there was none.
        """
        ...


# The field with the prompt; a body without it is refused.
PROMPT_FIELDS: Final[Mapping[DialectName, str]] = {"chat": "messages", "completions": "prompt"}
# The fields of a chat body that determine its prompt, its messages first.
TEMPLATE_FIELDS: Final = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "reasoning_effort",
)  # fmt: skip


@lru_cache(64)
def version_numbers(version: str) -> tuple[int, ...]:
    """Return `0.5.23.post1` as (0, 5, 23)."""
    return tuple(int(part) for part in takewhile(str.isdecimal, version.split(".")))


def sampling_defaults(shown: Any, field: str) -> dict[str, float] | None:
    """Return an engine's values for sampling fields that a request omits, from this field; None if it shows none."""
    params = shown.get(field) if isinstance(shown, dict) else None
    known = params if isinstance(params, dict) else {}
    return {name: known[name] for name in _DEFAULTED if type(known.get(name)) in (int, float)} or None


_DEFAULTED: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_HIGHEST_INDEX: Final = 2**31 - 1
# vLLM 0.32.0 names tokens by their ids on request, or with the server flag --return-tokens-as-token-ids.
NAMED_BY_ID: Final = "token_id:"
_BOOLEANS: Final = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})


def index_of(choice: Json) -> int:
    """Return the index of a choice. Raises TypeError for an invalid index, which cannot be matched."""
    index = choice["index"]
    if type(index) is not int or not 0 <= index <= _HIGHEST_INDEX:
        raise TypeError("the index of a choice must be a small non-negative integer")
    return index


def logprobs_of(choice: Json) -> list[float | None] | None:
    """Return a logprob per sampled token: `logprobs.content[].logprob` (chat), `logprobs.token_logprobs` (completions)."""
    logprobs: Any = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    return [entry.get("logprob") for entry in content] if content is not None else logprobs.get("token_logprobs")


def spans_of(versions: Any) -> tuple[tuple[Any, Any, Any], ...] | None:
    """Return an engine's spans of weight versions; None if it returned none."""
    return None if versions is None else tuple((span["start"], span["end"], span["version"]) for span in versions)


def without(choice: Json, rules: StripRules) -> Json:
    """Return a copy of a choice without injected keys, with logprobs set to null if they were injected."""
    shown = {key: value for key, value in choice.items() if key not in rules.keys}
    if rules.meta_keys and isinstance(meta := shown.get("meta_info"), dict):
        shown["meta_info"] = {key: value for key, value in meta.items() if key not in rules.meta_keys}
    if rules.logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown


def has_other_ids_as_names(choice: Json, ids: Sequence[Any] | None) -> bool:
    """Return whether the logprobs of a choice name tokens by other ids than the sampled ids."""
    logprobs = choice.get("logprobs")
    if not ids or not isinstance(logprobs, dict):
        return False
    content = logprobs.get("content")
    names = logprobs.get("tokens") if content is None else [entry.get("token") for entry in content]
    if not names:
        return False
    with suppress(TypeError):  # names that are not strings are checked below
        if NAMED_BY_ID not in "\n".join(names):
            return False  # tokens are named by their texts: the usual case
    return any(
        isinstance(name, str) and name.startswith(NAMED_BY_ID) and name != f"{NAMED_BY_ID}{token}"
        for name, token in zip(names, ids, strict=False)
    )


def usage_options(body: Mapping[str, Any], *, running: bool) -> Json:
    """Return the `stream_options` that make a stream count its tokens; empty if they must not change.

    `running`: each event also counts the tokens of its choice. Options that an engine refuses remain unchanged.
    """
    stream_options = body.get("stream_options")
    options = {} if stream_options is None else stream_options
    if not is_on(body.get("stream")) or not isinstance(options, dict):
        return {}
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        if not (value.lower() in _BOOLEANS if isinstance(value, str) else value in (None, True, False)):
            return {}  # pydantic reads neither a boolean nor an absent one
    flags = {"include_usage": True, "continuous_usage_stats": running or has_running_usage(body)}
    changed = {name: value for name, value in flags.items() if is_on(options.get(name)) != value}
    return {**options, **changed} if changed else {}


def has_running_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a client requests usage on each event: `continuous_usage_stats` has no effect without `include_usage`."""
    return body.get("stream_options") is not None and requested_usage(body)[1]


# The request parameters that change the distribution of the recorded logprobs. Each engine decides which of them affect its
# logprobs, and in which modes (`Engine.constrains`). Only the request and the known defaults of the engine are considered,
# not what the server adds itself: vLLM's `--tool-strict-level`, or the grammar that its Mistral parser always sets.
# Values without effect; null and empty values have none either. vLLM 0.32.0 and SGLang 0.5.23 agree on them.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "thinking_token_budget": (),
    "custom_logit_processor": (),
}
BIASES: Final = frozenset(
    {"logit_bias", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "custom_logit_processor"}
)  # fmt: skip
ALL: Final = frozenset(_NEUTRAL)


def has_grammar(sampling: Mapping[str, Any], fields: Iterable[str]) -> bool:
    """Return whether the request has a grammar: a schema, a forced or strict tool, or one of these fields."""
    form, choice = sampling.get("response_format"), sampling.get("tool_choice")
    return (
        (isinstance(form, dict) and form.get("type", "text") != "text")
        or choice == "required"
        or isinstance(choice, dict)
        or (choice != "none" and any(map(_is_strict, tools_of(sampling))))
        or any(sampling.get(name) for name in fields)
    )


def changes_distribution(sampling: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether one of these sampling parameters has a value that takes effect."""
    return any(sampling.get(name) not in (None, [], {}, "", *_NEUTRAL[name]) for name in names)


def tools_of(sampling: Mapping[str, Any]) -> list[Any]:
    """Return the offered tools; empty if they are not a list."""
    tools = sampling.get("tools")
    return tools if isinstance(tools, list) else []


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


# The conditions of known limitations, from which docs/exactness.md is generated. A step that is inexact for a reason that the
# engine's quirks lack is logged as a new finding.
CHAT: Final[tuple[DialectName, ...]] = ("chat",)
COMPLETIONS: Final[tuple[DialectName, ...]] = ("completions",)
BOTH: Final[tuple[DialectName, ...]] = ("chat", "completions")

# The problems that show that an engine lost something; one of these that no quirk explains is a new finding.
QUIRK_CODES: Final = frozenset(
    {"no_token_ids", "no_prompt_ids", "no_logprobs", "logprob_count", "completion_count", "prompt_count", "ids_disagree",
     "bad_logprob"}
)  # fmt: skip


def always(_body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to every call."""
    return True


def has(*fields: str) -> Callable[[Mapping[str, Any], CallOptions], bool]:
    """Apply to bodies with one of these fields."""
    return lambda body, _options: any(is_on(body[field]) for field in fields if field in body)


def several(body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to calls with several choices for a prompt."""
    return body.get("n") not in (None, 1)


def requests_no_tokens(body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to calls that request no tokens."""
    return body.get("max_tokens") == 0


def has_more_than_text(body: Mapping[str, Any], _options: CallOptions | None = None) -> bool:
    """Return whether a message has a part that is not text."""
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts_of(body.get("messages")))


# The requests and responses of the tokenize and detokenize endpoints: vLLM 0.32.0 verified, SGLang 0.5.23 read.


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of tokens of a prompt, and the size of the model's context window (prompt and completion)."""

    tokens: int
    window: int


def token_count_request(engine: Engine, dialect: DialectName, body: Mapping[str, Any]) -> FollowUpRequest | None:
    """Return the request that counts the tokens of a call's prompt; None if the engine cannot count them."""
    path = engine.tokenize_path
    if path is None:
        return None
    if dialect == "chat":
        return FollowUpRequest(path, engine.template_fields(body))
    prompt = body.get("prompt")
    special = {"add_special_tokens": body["add_special_tokens"]} if "add_special_tokens" in body else {}
    return FollowUpRequest(path, {"prompt": prompt, **special}) if isinstance(prompt, str) else None


def read_count(response: Any) -> Counted | None:
    """Read the response of a token count; None if it is invalid."""
    if not isinstance(response, dict):
        return None
    tokens, window = response.get("count"), response.get("max_model_len")
    return Counted(tokens, window) if type(tokens) is int and type(window) is int else None


def render_request(engine: Engine, body: Mapping[str, Any], messages: Sequence[Any]) -> FollowUpRequest | None:
    """Return the request that renders messages with a generation prompt and the template fields of a chat body, as token ids.

    None if the engine has none.
    """
    fields = {**engine.template_fields(body), **_model_of(body), "messages": messages}
    return None if engine.tokenize_path is None else FollowUpRequest(engine.tokenize_path, fields)


def tokenize_request(engine: Engine, body: Mapping[str, Any], text: str) -> FollowUpRequest | None:
    """Return the request that converts text into ids, without special tokens at its beginning; None if the engine cannot."""
    fields = {"prompt": text, "add_special_tokens": False, **_model_of(body)}
    return None if engine.tokenize_path is None else FollowUpRequest(engine.tokenize_path, fields)


def _model_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": body["model"]} if isinstance(body.get("model"), str) else {}


def read_ids(response: Any) -> "Ids | None":
    """Return the ids of a tokenize response; None if it is invalid."""
    tokens = response.get("tokens") if isinstance(response, dict) else None
    if isinstance(tokens, KnownPrompt):
        tokens = tokens.ids
    try:
        ids = pack_ids(tokens) if isinstance(tokens, list | array) else None
    except (ValueError, TypeError, OverflowError):
        return None
    return None if ids is None or has_negative(ids) else ids


def read_window(response: Any) -> int | None:
    """Return the size of the context window in a tokenize response; None if there is none."""
    window = response.get("max_model_len") if isinstance(response, dict) else None
    return window if type(window) is int and window > 0 else None


def text_request(engine: Engine, ids: Sequence[int]) -> FollowUpRequest | None:
    """Return the request that converts ids into text; None if the engine cannot."""
    path = engine.detokenize_path
    return None if path is None else FollowUpRequest(path, {"tokens": list(ids), **engine.detokenize_fields})


def read_text(engine: Engine, response: Any) -> str | None:
    """Read the text of a response; None if there is none."""
    return text_or_none(response.get(engine.detokenized_field)) if isinstance(response, dict) else None
