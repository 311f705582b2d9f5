"""One call in the core: what to send, what came, what to show, what to keep.

Holds the `Exchange`, which is fed the engine's bytes, gives the client's, and at the end gives the step. It never awaits:
sockets, clocks and the store are its callers' business.

    exchange = Exchange(plan, status, content_type)
    for read in ...:  client.write(exchange.feed(read))
    lookup = exchange.lookup()               # some engines have to be asked once more; exchange.found = the answer
    outcome = exchange.finish(timing)        # or exchange.abort("client_gone", timing)
    ... store outcome.step, and only then ...
    client.write(outcome.end)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy.protocols import synthetic_stream as replay
from proxy.protocols.engines.base import FollowUpRequest, Json
from proxy.protocols.plan import Plan
from proxy.protocols.response import (
    MALFORMED,
    ParsedResponse,
    StreamResponse,
    SyntheticStreamResponse,
    response_stream_for,
)
from proxy.protocols.response_validation import Packed, check_messages, check_usage, pack_tokens
from proxy.trajectory import fidelity
from proxy.trajectory.step import Choice, Status, Step, Timing

# A response with one of these is not what readers expect: it is recorded apart from those they read.
_UNREADABLE: Final = frozenset({"unparsed_event", "no_message", "unknown_finish_reason"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call that is over: the withheld end, the step to store before it is shown, and whether the engine broke off.

    When `broken`, the client's connection must end as the engine's did: without a proper end. `status` is told instead of the
    engine's, where its answer could not be told at all.
    """

    end: bytes
    step: Step
    broken: bool
    status: int | None = None


class Exchange:
    """One call, from the engine's first byte to the step."""

    def __init__(self, plan: Plan, status: int, content_type: str, *, max_event_bytes: int | None = None) -> None:
        self._plan = plan
        self._status = status
        self._content_type = content_type
        self._reply = response_stream_for(status, content_type, plan.view, max_event_bytes)
        self._conclusion: tuple[bytes, ParsedResponse] | None = None
        self.found: Any = None
        self.served: Collection[str] | None = None  # the models that the engine lists, where that had to be known

    @property
    def content_type(self) -> str | None:
        """What the client is told that it gets; None: what the engine said."""
        if isinstance(self._reply, SyntheticStreamResponse):
            return replay.CONTENT_TYPE
        is_rendered = self._plan.translation is not None and not isinstance(self._reply, StreamResponse)
        return "application/json" if is_rendered else None

    @property
    def is_over(self) -> bool:
        """Whether a stream's terminal event came: whatever becomes of the connection then, the answer is whole."""
        return isinstance(self._reply, StreamResponse) and self._reply.ended

    @property
    def forces_usage(self) -> bool:
        """Whether a stream showed that its server writes usage on each event, whatever is requested."""
        return isinstance(self._reply, StreamResponse) and self._reply.forces_usage

    @property
    def pending(self) -> int:
        """The bytes of an event that is not whole yet: feeding its end parses all of them."""
        return self._reply.pending if isinstance(self._reply, StreamResponse) else 0

    def feed(self, read: bytes) -> bytes:
        """Take bytes of the engine; give the bytes that the client may see now. Raises EventTooLong."""
        return self._reply.feed(read)

    def other_model(self) -> str | None:
        """The model that the answer names, if it is not the one of the request. Call it when no more bytes come."""
        _, answer = self._concluded()
        name = None if answer.response is None else answer.response.get("model")
        return name if isinstance(name, str) and name != self._plan.model_served else None

    def follow_up(self) -> FollowUpRequest | None:
        """What is to be asked of the engine once more, now that no more bytes come; its answer goes into `found`."""
        _, answer = self._concluded()
        if answer.response is None or answer.error is not None:
            return None
        try:
            return self._plan.engine.follow_up(self._plan.dialect.name, self._plan.body, answer.response)
        except MALFORMED:
            return None  # `tokens` will say what is wrong with it

    def finish(self, timing: Timing, policy_version: str | None = None) -> Outcome:
        """The engine's answer is over; `policy_version` is the one announced now."""
        end, answer = self._concluded()
        reason = None if answer.ended else "the engine's answer ended without its terminal event"
        step = self._step(answer, timing, policy_version, reason=reason, delivered=True)
        return Outcome(end, step, broken=False, status=answer.status)

    def abort(self, reason: str, timing: Timing, *, delivered: bool, policy_version: str | None = None) -> Outcome:
        """The call broke off: the client left (`delivered` false), or the engine was lost.

        What is partial then was not delivered, whoever was there.
        """
        end, answer = self._concluded()
        error = answer.error if answer.response is not None else None  # a body cut short is no error of the engine
        cut = ParsedResponse(answer.response, ended=self.is_over, error=error, problems=answer.problems)
        recorded_reason = None if self.is_over else reason
        return Outcome(
            end, self._step(cut, timing, policy_version, reason=recorded_reason, delivered=delivered), broken=True
        )

    def fail(self, reason: str, timing: Timing) -> Step:
        """The proxy itself failed: a partial step of what was understood, or of nothing where that is what failed."""
        try:
            _, answer = self._concluded()
            cut = ParsedResponse(answer.response, ended=False, problems=answer.problems)
            return self._step(cut, timing, None, reason=reason, delivered=False)
        except (OverflowError, *MALFORMED):
            bare = ParsedResponse(None, ended=False, problems=("unparsed_event",))
            return self._step(bare, timing, None, reason=reason, delivered=False)

    def _concluded(self) -> tuple[bytes, ParsedResponse]:
        """The withheld end and what was understood: asked once of the reply."""
        if self._conclusion is None:
            self._conclusion = self._reply.finish()
        return self._conclusion

    def _step(
        self, answer: ParsedResponse, timing: Timing, version_now: str | None, *, reason: str | None, delivered: bool
    ) -> Step:
        plan = self._plan
        status: Status = "error" if answer.error is not None else "complete" if answer.ended else "partial"
        packed = self._tokens(answer.response)
        prompts, choices = packed.prompts, packed.choices
        usage, is_sound = check_usage(None if answer.response is None else answer.response.get("usage"))
        special = {*plan.problems, *answer.problems, *packed.problems, *(() if is_sound else ("bad_usage",))}
        if self.served is not None and answer.response is not None and self.other_model() not in (None, *self.served):
            special.add("other_model")
        evidence = self._evidence(packed, usage, status, special, ended=answer.ended)
        first, last = _versions(choices, plan.policy_version)
        if version_now is not None and not packed.has_versions:
            last = version_now  # which of its tokens the new weights sampled, the engine does not say
        return Step(
            step_id=plan.step_id,
            rollout_id=plan.rollout_id,
            dialect=plan.error_dialect.name,
            endpoint=plan.endpoint,
            engine=plan.engine_facts,
            model_asked=plan.model_asked,
            model_served=plan.model_served,
            request=plan.request,
            sent=plan.sent,
            response=self._recorded(answer, special),
            prompts=prompts,
            choices=choices,
            usage=usage,
            sampling=plan.sampling,
            timing=timing,
            status=status,
            reason=reason,
            delivered=delivered and status != "partial",
            policy_version=first,
            policy_version_end=last if last != first else None,
            problems=fidelity.check(evidence),
            extra={**plan.extra, **packed.notes},
        )

    def _evidence(
        self, packed: Packed, usage: Json | None, status: Status, special: set[str], *, ended: bool
    ) -> fidelity.Evidence:
        plan = self._plan
        return fidelity.Evidence(
            prompts=packed.prompts,
            choices=packed.choices,
            usage=usage,
            asked=plan.response_options.choices,
            ended=ended,
            status=status,
            wants_logprobs=plan.wants_logprobs,
            max_tokens=_bound(plan.sampling),
            unbounded=plan.engine.unbounded,
            counts_tokens=plan.engine.always_sends_usage,
            special=special,
        )

    def _recorded(self, answer: ParsedResponse, problems: set[str]) -> Json | None:
        """The response as the client was to see it; of an error, its status and body.

        A response that readers cannot rely on is kept under `unparsed`.
        """
        shown = None if answer.response is None else self._shown(answer.response)
        if shown is not None and problems & _UNREADABLE:
            shown = {"unparsed": shown}
        if answer.error is None:
            return shown
        error = {"status": self._status, "content_type": self._content_type, "body": answer.error}
        return error if shown is None or not shown.get("choices") else {**shown, "error": error}

    def _shown(self, response: Json) -> Json:
        try:
            return self._plan.view.whole(response)
        except MALFORMED:
            return response

    def _tokens(self, response: Json | None) -> Packed:
        """The tokens of a response, packed; a response of an unknown shape has none, and says so."""
        if response is None:
            return Packed()
        plan = self._plan
        try:
            problems = check_messages(plan.dialect.name, response)
            tokens = plan.engine.tokens(plan.dialect.name, plan.body, response, self.found)
            given = plan.dialect.prompt_ids(plan.body)
            packed = pack_tokens(tokens, plan.response_options.samples, plan.policy_version, given)
        except (OverflowError, *MALFORMED):
            return Packed(problems=frozenset({"unparsed_event"}))
        return replace(packed, problems=packed.problems | problems) if problems else packed


def _bound(sampling: Mapping[str, Any]) -> int | None:
    """The most tokens that a choice may have; None if the body does not bound them.

    Of two bounds the higher one: which of them an engine takes differs.
    """
    bounds = [sampling.get(name) for name in ("max_tokens", "max_completion_tokens")]
    return max((bound for bound in bounds if type(bound) is int and bound > 0), default=None)


def _versions(choices: tuple[Choice, ...], policy_version: str | None) -> tuple[str | None, str | None]:
    """The policy version that a step began with, and the one that it ended with."""
    spans = [span for choice in choices for span in choice.spans]
    if not spans:
        return policy_version, policy_version
    return spans[0].policy_version, spans[-1].policy_version
