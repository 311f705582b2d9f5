"""One call without I/O: fed the engine's bytes, returns the client's bytes and, at the end, the step.

exchange = Exchange(plan, status, content_type)
for read in ...:  client.write(exchange.response.feed(read))
model, request = exchange.missing()      # some engines need one more request: exchange.follow_up_response = its response
outcome = exchange.finish(timing)        # or exchange.abort("client_gone", timing)
... store outcome.step, and only then ...
client.write(outcome.end)

Any value of a response may have any type. Everything that readers rely on (ids, logprobs, indexes, finish reasons, policy
versions, messages) is checked here, once. An invalid value becomes a problem of the step, and is not passed to readers.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from proxy.protocols.dialects.base import GENERATES, DialectName, Json, is_on
from proxy.protocols.engines.base import FollowUpRequest, Sampled, Tokens
from proxy.protocols.json_texts import KnownPrompt
from proxy.protocols.parts import Before, PartsDiffer, Told
from proxy.protocols.plan import Outcome, Plan
from proxy.protocols.response import MALFORMED, ClientView, ParsedResponse, ResponseStream, StreamResponse
from proxy.protocols.whole_response import RawResponse, SyntheticStreamResponse, WholeResponse
from proxy.trajectory.arrays import Ids, Mask, pack_experts, pack_ids, pack_logprobs, pack_mask
from proxy.trajectory.facts import is_older
from proxy.trajectory.images import IMAGES, aligned
from proxy.trajectory.step import (
    ANNOUNCED,
    CUT,
    FINISH_REASONS,
    PROBLEMS,
    Choice,
    Evidence,
    Span,
    Status,
    Step,
    Timing,
    check_fidelity,
)

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_BAD_GATEWAY: Final = 502  # status of a response of another type
_MAX_REASON_CHARS: Final = 100  # maximum length of a finish reason in characters
_TEXTS: Final = ("reasoning", "reasoning_content", "refusal", "role")
_TEXT_OR_NONE: Final = frozenset({str, type(None)})
_SCALARS: Final = frozenset({int, type(None), bool, float, str})
_USAGE_DEPTH: Final = 3  # counts, objects of counts, and those by modality (vLLM 0.32: multimodal_tokens)

# A response with one of these problems is recorded under `unparsed`, apart from valid ones.
_UNREADABLE: Final = frozenset({"unparsed_event", "no_message", "unknown_finish_reason"})


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of a response as arrays."""

    prompts: tuple[Ids, ...] = ()
    choices: tuple[Choice, ...] = ()
    problems: frozenset[str] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)
    versions: tuple[str | None, str | None] | None = None  # the policy versions of the first and the last token
    has_versions: bool = False  # the engine itself reported them
    usage: Json | None = None  # the sum of the engine's counts by choice
    sampling: Mapping[str, Any] | None = None  # sampling parameters that the response determines


_NO_TOKENS: Final = Packed()


class Exchange:
    """One call, from the engine's first byte to the step. `response` is fed the engine's bytes."""

    def __init__(
        self,
        plan: Plan,
        status: int,
        content_type: str,
        *,
        max_event_bytes: int | None = None,
        prompt: KnownPrompt | None = None,
    ) -> None:
        self._plan = plan
        self._status = status
        self._content_type = content_type
        self.response = response_stream_for(status, content_type, plan.view, max_event_bytes, prompt)
        self._conclusion: tuple[bytes, ParsedResponse] | None = None
        self._told: Told | None = None
        self.is_read = False  # whether all bytes of the response were fed
        # Set by the shell before `finish`, and used by `abort` and `fail` as well.
        self.follow_up_response: Any = None
        self.served_models: Collection[str] | None = None  # that the engine lists, if they had to be requested

    @property
    def is_whole(self) -> bool:
        """Whether the engine has sent all of the response, of which the end of its body may be missing."""
        return self.is_read or self.response.is_over

    @property
    def is_complete(self) -> bool:
        """Whether the engine has sent all of the response and, as far as it is known, has not aborted it."""
        return self.is_whole and not self.response.is_aborted

    def missing(self) -> tuple[str | None, FollowUpRequest | None]:
        """Return what the shell looks up after the last bytes, before it calls `finish`.

        First the model that the response names, if the request names another (`served_models`); second the follow-up request.
        The shell sets its response as `follow_up_response`. Raises PartsDiffer.
        """
        _, answer = self._conclusion or self._conclude()
        if answer.differs is not None:
            raise answer.differs
        if answer.response is None:
            return None, None
        model = self._other_model(answer.response)
        if answer.error is not None:
            return model, None
        try:
            return model, self._plan.engine.follow_up(self._plan.dialect.name, self._plan.body, answer.response)
        except MALFORMED:
            return model, None  # `tokens` reports the problem

    def rest(self) -> tuple[Sampled, Json]:
        """Return the tokens and the choice of the last part of a resumed call, before `tell`. Raises PartsDiffer."""
        try:
            assert isinstance(self.response, WholeResponse)
            response = self.response.parsed()
            (sampled,) = self._plan.engine.tokens(self._plan.dialect.name, self._plan.body, response).choices
            return sampled, response["choices"][0]
        except (AssertionError, *MALFORMED) as error:
            raise PartsDiffer(f"the rest of a resumed call cannot be read: {error}") from None

    def tell(self, told: Told) -> None:
        """Set the reply of all parts of a resumed call, whose last part was withheld."""
        assert isinstance(self.response, WholeResponse)
        self._told = told
        self.response.tell(told)

    def complete(self, reason: str, stop: int | None) -> None:
        """End the only choice of an aborted response with this finish reason. `stop`: the token that ended it."""
        self.response.complete({"finish_reason": reason, self._plan.engine.shape.choice[0]: stop})
        self._conclusion = None

    def finish(self, timing: Timing, policy_version: str | None = None) -> Outcome:
        """End a complete response; `policy_version` is the current one."""
        end, answer = self._conclusion or self._conclude()
        reason = None if answer.ended else "the engine's response ended without its terminal event"
        step = self._step(answer, timing, policy_version, reason=reason, delivered=True)
        return Outcome(end, step, broken=False, status=answer.status)

    def abort(
        self,
        reason: str,
        timing: Timing,
        *,
        delivered: bool,
        policy_version: str | None = None,
        is_aborted: bool = False,
    ) -> Outcome:
        """End an incomplete call: the client disconnected (`delivered` false), or the engine was lost.

        `is_aborted`: the engine aborted it for that reason, and ended its response. A partial step is never marked as
        delivered. A long incomplete body or event is not parsed.
        """
        is_over = self.response.is_over and not is_aborted
        end, answer = self._conclusion or self._conclude(is_cut=not self.is_read)
        error = answer.error if answer.response is not None else None  # a truncated body is not an error of the engine
        cut = replace(answer, ended=is_over, error=error)
        recorded_reason = None if is_over else reason
        return Outcome(
            end, self._step(cut, timing, policy_version, reason=recorded_reason, delivered=delivered), broken=True
        )

    def cut(self, reason: str, timing: Timing) -> tuple[Json | None, Step]:
        """Return an event that the client has not received, or None, and the partial step of a call that may be resumed."""
        event, answer = (None, self._conclusion[1]) if self._conclusion else self.response.cut()
        kept = replace(answer, ended=False, error=None)
        return event, self._step(kept, timing, None, reason=reason, delivered=False)

    def fail(self, reason: str, timing: Timing) -> Step:
        """Return a partial step after a failure of TokenTape itself: with what was parsed, or empty if parsing failed."""
        try:
            _, answer = self._conclusion or self._conclude(is_cut=True)
            cut = replace(answer, ended=False, error=None)
            return self._step(cut, timing, None, reason=reason, delivered=False)
        except (OverflowError, *MALFORMED):
            bare = ParsedResponse(None, ended=False, problems=("unparsed_event",))
            return self._step(bare, timing, None, reason=reason, delivered=False)

    def _conclude(self, *, is_cut: bool = False) -> tuple[bytes, ParsedResponse]:
        if is_cut:
            self.response.abandon()
        self._conclusion = self.response.finish()
        return self._conclusion

    def _step(
        self, answer: ParsedResponse, timing: Timing, version_now: str | None, *, reason: str | None, delivered: bool
    ) -> Step:
        plan, response = self._plan, answer.response
        status: Status = "error" if answer.error is not None else "complete" if answer.ended else "partial"
        packed = _NO_TOKENS if response is None else self._tokens(response)
        usage = None if response is None else response.get("usage")
        special = {*plan.problems, *answer.problems, *packed.problems}
        usage = check_usage(packed.usage if usage is None else usage, special)
        if answer.differs is not None:
            special.add("unparsed_event")
        if IMAGES in plan.extra:
            packed = _with_images(plan.extra[IMAGES], packed, special)
        served = self.served_models
        if served is not None and response is not None and self._other_model(response) not in (None, *served):
            special.add("other_model")
        first, last = packed.versions or (plan.policy_version, plan.policy_version)
        if version_now is not None and not packed.has_versions:
            last = version_now  # the engine does not report which tokens the new weights sampled
        step = Step(
            step_id=plan.step_id,
            rollout_id=plan.rollout_id,
            dialect=(plan.translation or plan.dialect).name,
            endpoint=plan.endpoint,
            engine=plan.engine_facts,
            model_asked=plan.model_asked,
            model_served=plan.model_served,
            request=plan.request,
            sent=plan.sent,
            response=self._recorded(answer, special),
            prompts=packed.prompts,
            choices=packed.choices,
            usage=usage,
            sampling=plan.sampling if packed.sampling is None else {**plan.sampling, **packed.sampling},
            timing=timing,
            status=status,
            reason=reason,
            delivered=delivered and status != "partial",
            policy=plan.policy,
            policy_version=first,
            policy_version_end=last if last != first else None,
            problems=self._problems(packed, usage, status, special, ended=answer.ended),
            extra={**plan.extra, **packed.notes},
        )
        if packed.has_versions and is_older(first, plan.policy_version):
            step = replace(step, extra={**step.extra, ANNOUNCED: plan.policy_version})
        step = step if plan.before is None else joined(plan.before, step)
        return step if self._told is None else _as_told(step, self._told)

    def _problems(
        self, packed: Packed, usage: Json | None, status: Status, special: set[str], *, ended: bool
    ) -> tuple[str, ...]:
        plan, most = self._plan, _bound(self._plan.sampling)
        if most is not None and plan.before is not None:
            most -= plan.before.sampled
        evidence = Evidence(
            prompts=packed.prompts,
            choices=packed.choices,
            usage=usage,
            asked=plan.response_options.choices,
            ended=ended,
            status=status,
            wants_logprobs=plan.wants_logprobs,
            max_tokens=most,
            counts_tokens=plan.engine.always_sends_usage,
            special=special,
        )
        return check_fidelity(evidence)

    def _other_model(self, response: Json) -> str | None:
        """Return the model that the response names, if it is not the requested one."""
        name, plan = response.get("model"), self._plan
        expected = (plan.model_served, plan.engine.unnamed_model if plan.body.get("model") is None else None)
        return name if isinstance(name, str) and name not in expected else None

    def _recorded(self, answer: ParsedResponse, problems: set[str]) -> Json | None:
        """Return the response as the client received it; for an error, its status and body.

        An invalid response is recorded under `unparsed`.
        """
        shown = answer.response if answer.shown is None else answer.shown
        if shown is not None and not problems.isdisjoint(_UNREADABLE):
            shown = {"unparsed": shown}
        if answer.error is None:
            return shown
        error = {"status": self._status, "content_type": self._content_type, "body": answer.error}
        return error if shown is None or not shown.get("choices") else {**shown, "error": error}

    def _tokens(self, response: Json) -> Packed:
        """Return the packed tokens of a response; none, and a problem, for a response of an unknown shape."""
        plan = self._plan
        try:
            problems = check_messages(plan.dialect.name, response)
            tokens = plan.engine.tokens(plan.dialect.name, plan.body, response, self.follow_up_response)
            given = plan.dialect.prompt_ids(plan.body) if plan.prompt is None else [plan.prompt.ids]
            samples, version = plan.response_options.samples, plan.policy_version
            packed = pack_tokens(tokens, samples, version, given, epoch=plan.policy_epoch)
        except (OverflowError, *MALFORMED):
            return Packed(problems=frozenset({"unparsed_event"}))
        if "return_routed_experts" in plan.body and is_on(plan.body["return_routed_experts"]):
            start = plan.body.get("routed_experts_start_len") or 0
            if any(_are_bad_experts(packed, choice, start) for choice in packed.choices):
                problems.add("bad_experts")
        return replace(packed, problems=packed.problems | problems) if problems else packed


def _are_bad_experts(packed: Packed, choice: Choice, start: Any) -> bool:
    """Return whether SGLang's experts of a choice do not fit its prompt and tokens from `start` on, without the last token."""
    experts = choice.routed_experts
    if experts is None:
        return False  # the model has none
    if type(start) is not int or not 0 <= choice.prompt < len(packed.prompts):
        return True
    count = len(packed.prompts[choice.prompt]) + len(choice.ids) - 1 - start
    return experts.form != "int32" or count <= 0 or not experts.raw or len(experts.raw) % (4 * count) != 0


def _with_images(images: Mapping[str, Any], packed: Packed, problems: set[str]) -> Packed:
    token, found = aligned(images["ids"], images["candidates"], packed.prompts)
    problems.update(found)
    return replace(packed, notes={**packed.notes, IMAGES: {"ids": images["ids"], "token": token}})


def _bound(sampling: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens per choice; None if the body does not limit them.

    Of two bounds the higher is returned: engines differ in which they use.
    """
    highest = 0
    for bound in (sampling.get("max_tokens"), sampling.get("max_completion_tokens")):
        if type(bound) is int and bound > highest:
            highest = bound
    return highest or None


def response_stream_for(
    status: int,
    content_type: str,
    view: ClientView,
    max_event_bytes: int | None = None,
    prompt: KnownPrompt | None = None,
) -> ResponseStream:
    """Return the response stream for a response with this status and content type."""
    kind = content_type.partition(";")[0].strip().lower()
    if status != 200 or kind not in {_JSON, _EVENTS}:
        return RawResponse(view, status if status != 200 else _BAD_GATEWAY)
    if kind == _EVENTS:
        return StreamResponse(view, max_event_bytes, prompt)
    return SyntheticStreamResponse(view, prompt) if view.replay else WholeResponse(view, prompt)


def pack_tokens(
    tokens: Tokens,
    samples: int | None,
    policy_version: str | None,
    sent_prompts: Sequence[Sequence[int]] | None = None,
    *,
    epoch: int = 0,
) -> Packed:
    """Pack the engine's lists.

    Choice index = prompt index times `samples` plus sample index, if each choice has a separate prompt. `sent_prompts`
    are the prompts of the request, if it has ids; `epoch` is the policy's epoch when the call was sent. Raises
    ValueError, TypeError or OverflowError for invalid ids.
    """
    problems = set(tokens.problems)
    prompts: dict[int, list[int]] = {} if tokens.prompt_ids is None else {0: tokens.prompt_ids}
    choices: list[Choice] = []
    spans: list[Span] = []
    has_versions = False
    for sampled in tokens.choices:
        prompt = sampled.index // (samples or 1) if tokens.prompt_ids is None else 0
        if sampled.prompt_ids is not None and prompts.setdefault(prompt, sampled.prompt_ids) != sampled.prompt_ids:
            problems.add("mixed_prompts")
        if prompt in prompts and sampled.prompt_counted not in (None, len(prompts[prompt])):
            problems.add("prompt_count")
        choice = _choice(sampled, prompt, policy_version, epoch, problems)
        choices.append(choice)
        has_versions = has_versions or sampled.spans is not None
        spans += choice.spans
    if (
        sent_prompts is not None
        and prompts
        and not _are_equal([ids for _, ids in sorted(prompts.items())], sent_prompts)
    ):
        problems.add("other_prompt")
    packed: tuple[Ids, ...] = ()
    if "mixed_prompts" in problems or [*prompts] != [*range(len(prompts))]:
        problems.add("mixed_prompts")  # an index would point to the wrong prompt
    else:
        packed = tuple(map(pack_ids, prompts.values()))
    return Packed(
        packed,
        tuple(choices),
        frozenset(problems),
        tokens.notes,
        (spans[0].policy_version, spans[-1].policy_version) if spans else None,
        has_versions,
        _usage(tokens.choices, choices),
        tokens.sampling,
    )


def _usage(sampled: Sequence[Sampled], choices: Sequence[Choice]) -> Json | None:
    """Return the sums of the engine's counts, each prompt once; None if a choice has no counts."""
    prompts: dict[int, Any] = {}
    completion = 0
    for counts, choice in zip(sampled, choices, strict=True):
        if type(counts.counted) is not int:
            return None
        completion += counts.counted
        prompts[choice.prompt] = counts.prompt_counted
    if not prompts or {*map(type, prompts.values())} != {int}:
        return None
    prompt = sum(prompts.values())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _are_equal(returned: Sequence[Sequence[int]], sent: Sequence[Sequence[int]]) -> bool:
    """Return whether prompts are equal; each is a list, or an array of ids that were parsed apart."""
    return len(returned) == len(sent) and all(
        ours == theirs if type(ours) is type(theirs) else [*ours] == [*theirs]
        for ours, theirs in zip(returned, sent, strict=True)
    )


def _choice(sampled: Sampled, prompt: int, policy_version: str | None, epoch: int, problems: set[str]) -> Choice:
    """Return the checked choice; what is invalid is a problem, and left away."""
    ids = pack_ids(sampled.ids or [])
    count = len(ids)
    if count and sampled.counted not in (None, count):
        problems.add("completion_count")
    spans: tuple[Span, ...] | None = (Span(0, count, policy_version, epoch),) if count else ()
    if count and sampled.spans is not None:
        spans = _spans(sampled.spans, count, epoch)
        if spans is None:
            problems.add("version_spans")
    reason, stop = sampled.finish_reason, sampled.stop_reason
    if not (reason is None or (isinstance(reason, str) and reason in FINISH_REASONS)):
        reason = _finish_reason(reason, problems)
    if not (
        stop is None or isinstance(stop, str) or (type(stop) is int and 0 <= stop < 2**31)
    ):  # a string or a token's id
        problems.add("unparsed_event")
        stop = None
    return Choice(
        index=sampled.index,
        ids=ids,
        logprobs=pack_logprobs(sampled.logprobs or []),
        finish_reason=reason,
        stop_reason=stop,
        prompt=prompt,
        spans=spans or (),
        routed_experts=None if sampled.routed_experts is None else pack_experts(sampled.routed_experts),
        sampling_mask=None if sampled.sampling_mask is None else _mask(sampled.sampling_mask, ids, problems),
    )


def _mask(positions: Any, ids: Ids, problems: set[str]) -> Mask | None:
    """Return the packed mask; None, with a problem, if it is no mask. Each sampled token must have one that contains it."""
    try:
        mask = pack_mask(positions)
    except (TypeError, ValueError):
        problems.add("bad_mask")
        return None
    if len(positions) != len(ids):
        problems.add("mask_count")
    elif not all(token in kept for token, kept in zip(ids, positions, strict=True)) or min(mask.ids, default=0) < 0:
        problems.add("bad_mask")
    return mask


def _finish_reason(value: Any, problems: set[str]) -> str | None:
    """Return an unusual reason as text: SGLang's native object (0.5.23) has it in `type`."""
    reason = value.get("type") if isinstance(value, dict) else value
    if isinstance(reason, str) and reason in FINISH_REASONS:
        return reason
    problems.add("unknown_finish_reason")
    return reason if isinstance(reason, str) and len(reason) <= _MAX_REASON_CHARS else None


def _spans(given: Sequence[tuple[Any, Any, Any]], count: int, epoch: int) -> tuple[Span, ...] | None:
    """Return the engine's spans of policy versions; None if they do not cover the ids.

    A numeric version is kept as its digits, as in `PUT /policy`.
    """
    spans: list[Span] = []
    covered = 0
    for start, end, version in given:
        named = str(version) if type(version) is int else version
        if type(start) is not int or type(end) is not int or not (named is None or isinstance(named, str)):
            return None
        if start > end or (start < end and start != covered):
            return None
        if start < end:
            spans.append(Span(start, end, named, epoch))
            covered = end
    return tuple(spans) if covered == count else None


def check_usage(usage: Any, problems: set[str]) -> Json | None:
    """Return the usage to record, and add its problem: it must have the counts of both prompt and completion, and their sum."""
    if usage is None:
        return None
    if not isinstance(usage, dict) or not _is_flat(usage, _USAGE_DEPTH):
        problems.add("bad_usage")
        return None
    total = usage.get("total_tokens")
    counted = 0
    for count in (usage.get("prompt_tokens"), usage.get("completion_tokens"), 0 if total is None else total):
        if type(count) is not int or count < 0:
            problems.add("bad_usage")  # without both counts it would confirm nothing
            return usage
        counted += count
    if total is not None and counted != 2 * total:
        problems.add("usage_sum")
    return usage


def _is_flat(counts: Json, depth: int) -> bool:
    """Return whether an object has scalars, and objects of scalars to this depth."""
    for value in counts.values():
        if type(value) not in _SCALARS and not (depth > 1 and isinstance(value, dict) and _is_flat(value, depth - 1)):
            return False
    return True


def check_messages(dialect: DialectName, response: Json) -> set[str]:
    """Return the problems of a whole or accumulated response: each choice must have a message or text of the expected type."""
    problems: set[str] = set()
    choices = response.get("choices")
    if dialect in GENERATES or not isinstance(choices, list):
        return problems
    for choice in choices:
        content = choice.get("message" if dialect == "chat" else "text") if isinstance(choice, dict) else None
        if dialect == "chat" and isinstance(content, dict):
            if not _is_sound(content):
                problems.add("unparsed_event")
        elif dialect == "chat" or not isinstance(content, str):
            problems.add("no_message")
    return problems


def _is_sound(message: Json) -> bool:
    for name in _TEXTS:
        if type(message.get(name)) not in _TEXT_OR_NONE:
            return False
    content, calls = message.get("content"), message.get("tool_calls")
    if not (content is None or isinstance(content, str | list)):
        return False
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str | None)


def joined(before: Step, part: Step) -> Step:
    """Return one step of what was sampled before and of the next part; its response has both parts already.

    An error of the engine ends the step as a partial one: what was sampled before is not an error.
    """
    choices = tuple(_joined_tokens(before, choice) for choice in part.choices) or before.choices
    has_failed = part.status == "error"
    status = "partial" if has_failed else part.status
    cut = {"stream_cut"} if status == "partial" else set()
    # A part that ended before its first token lacks all ids, and is no evidence.
    own = {*part.problems} if part.sampled or status == "complete" else set()
    codes = {*before.problems} - CUT | own | cut
    versions = [span.policy_version for choice in choices for span in choice.spans] or [before.policy_version]
    last = part.policy_version_end or part.policy_version
    parts = Before({"usage": before.usage}, sum(map(len, before.prompts)), before.sampled)
    return replace(
        part,
        sent=before.sent,
        response=before.response if has_failed or part.response is None else part.response,
        prompts=before.prompts,
        choices=choices,
        usage=before.usage if part.usage is None else parts.usage(part.usage),
        timing=replace(
            part.timing, sent=before.timing.sent, first_byte=before.timing.first_byte or part.timing.first_byte
        ),
        status=status,
        reason="the engine returned an error for the rest of the call" if has_failed else part.reason,
        policy_version=versions[0],
        policy_version_end=last if last != versions[0] else None,
        problems=tuple([code for code in PROBLEMS if code in codes]),
        extra={**part.extra, **before.extra},
    )


def _joined_tokens(before: Step, part: Choice) -> Choice:
    if not before.choices:
        return part
    (first,) = before.choices
    count, spans = len(first.ids), list(first.spans)
    for span in part.spans:
        moved = replace(span, start=span.start + count, end=span.end + count)
        if spans and (spans[-1].policy_version, spans[-1].epoch) == (span.policy_version, span.epoch):
            spans[-1] = replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    wide = "d" in {first.logprobs.typecode, part.logprobs.typecode}
    logprobs = array("d" if wide else "f", first.logprobs)
    logprobs.extend(
        part.logprobs if part.logprobs.typecode == logprobs.typecode else array(logprobs.typecode, part.logprobs)
    )
    return replace(part, ids=first.ids + part.ids, logprobs=logprobs, spans=tuple(spans))


def _as_told(step: Step, told: Told) -> Step:
    """Return a step with only the tokens of the told reply: up to the one that completes a stop string."""
    (choice,) = step.choices
    stop = next(
        (told.fields[name] for name in ("stop_reason", "matched_stop") if name in told.fields), choice.stop_reason
    )
    kept = replace(
        choice,
        ids=choice.ids[: told.count],
        logprobs=choice.logprobs[: told.count],
        spans=tuple(replace(span, end=min(span.end, told.count)) for span in choice.spans if span.start < told.count),
        finish_reason=told.fields.get("finish_reason", choice.finish_reason),
        stop_reason=stop,
    )
    usage = step.usage
    if usage is not None and len(kept.ids) < len(choice.ids):
        prompt = sum(map(len, step.prompts))
        usage = {**usage, "completion_tokens": told.count, "total_tokens": prompt + told.count}
    return replace(step, choices=(kept,), usage=usage)
