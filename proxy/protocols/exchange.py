"""One call without I/O: fed the engine's bytes, returns the client's bytes and, at the end, the step.

exchange = Exchange(plan, status, content_type)
for read in ...:  client.write(exchange.feed(read))
request = exchange.follow_up()           # some engines need one more request: exchange.follow_up_response = its response
outcome = exchange.finish(timing)        # or exchange.abort("client_gone", timing)
... store outcome.step, and only then ...
client.write(outcome.end)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy.protocols.engines.base import FollowUpRequest, Json
from proxy.protocols.number_lists import KnownPrompt
from proxy.protocols.plan import Plan
from proxy.protocols.response import MALFORMED, ClientView, ParsedResponse, ResponseStream, StreamResponse
from proxy.protocols.response_validation import Packed, check_messages, check_usage, pack_tokens
from proxy.protocols.sse import EVENT_STREAM
from proxy.protocols.whole_response import RawResponse, SyntheticStreamResponse, WholeResponse
from proxy.trajectory import fidelity
from proxy.trajectory.images import IMAGES, aligned
from proxy.trajectory.step import Choice, Status, Step, Timing

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_BAD_GATEWAY: Final = 502  # status of a response of another type

# A response with one of these problems is recorded under `unparsed`, apart from valid ones.
_UNREADABLE: Final = frozenset({"unparsed_event", "no_message", "unknown_finish_reason"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished call: the withheld end, the step to store before the client receives it, and whether the engine disconnected.

    If `broken`, the client's connection must end like the engine's: without a proper end. `status` replaces the engine's if
    its response could not be converted.
    """

    end: bytes
    step: Step
    broken: bool
    status: int | None = None


class Exchange:
    """One call, from the engine's first byte to the step."""

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
        self._reply = response_stream_for(status, content_type, plan.view, max_event_bytes, prompt)
        self._conclusion: tuple[bytes, ParsedResponse] | None = None
        # Set by the shell before `finish`, and used by `abort` and `fail` as well.
        self.follow_up_response: Any = None
        self.served_models: Collection[str] | None = (
            None  # the models that the engine lists, if they had to be requested
        )

    @property
    def prompt(self) -> KnownPrompt | None:
        """The prompt ids of the response, with which the next call of the rollout may begin; None if they are not known."""
        return self._reply.prompt

    @property
    def content_type(self) -> str | None:
        """The content type for the client; None: the engine's."""
        stream_type = self._plan.stream_format.content_type
        if isinstance(self._reply, SyntheticStreamResponse):
            return stream_type
        if isinstance(self._reply, StreamResponse):
            return None if stream_type == EVENT_STREAM.content_type else stream_type
        return None if self._plan.translation is None else _JSON

    @property
    def is_over(self) -> bool:
        """Whether a stream's terminal event arrived: the response is complete even if the connection is lost afterwards."""
        return isinstance(self._reply, StreamResponse) and self._reply.ended

    @property
    def forces_usage(self) -> bool | None:
        """Whether the stream showed that its server writes usage to each event even if it is not requested; None: neither."""
        return self._reply.forces_usage if isinstance(self._reply, StreamResponse) else None

    @property
    def pending(self) -> int:
        """The size of the incomplete event in bytes, all of which the next feed may parse."""
        return self._reply.pending if isinstance(self._reply, StreamResponse) else 0

    def feed(self, read: bytes) -> bytes:
        """Feed bytes of the engine; return the bytes that the client may receive now. Raises EngineEventTooLong."""
        return self._reply.feed(read)

    def missing(self) -> tuple[str | None, FollowUpRequest | None]:
        """Return `other_model` and `follow_up`, which the shell looks up before it calls `finish`."""
        return self.other_model(), self.follow_up()

    def other_model(self) -> str | None:
        """Return the model that the response names, if it is not the requested one. Call it after the last bytes."""
        _, answer = self._concluded()
        name = None if answer.response is None else answer.response.get("model")
        return name if isinstance(name, str) and name != self._plan.model_served else None

    def follow_up(self) -> FollowUpRequest | None:
        """Return the request to send to the engine after the last bytes; its response is set as `follow_up_response`."""
        _, answer = self._concluded()
        if answer.response is None or answer.error is not None:
            return None
        try:
            return self._plan.engine.follow_up(self._plan.dialect.name, self._plan.body, answer.response)
        except MALFORMED:
            return None  # `tokens` reports the problem

    def finish(self, timing: Timing, policy_version: str | None = None) -> Outcome:
        """End a complete response; `policy_version` is the current one."""
        end, answer = self._concluded()
        reason = None if answer.ended else "the engine's response ended without its terminal event"
        step = self._step(answer, timing, policy_version, reason=reason, delivered=True)
        return Outcome(end, step, broken=False, status=answer.status)

    def abort(self, reason: str, timing: Timing, *, delivered: bool, policy_version: str | None = None) -> Outcome:
        """End an incomplete call: the client disconnected (`delivered` false), or the engine was lost.

        A partial step is never marked as delivered. A long incomplete body or event is not parsed.
        """
        end, answer = self._concluded(is_cut=True)
        error = answer.error if answer.response is not None else None  # a truncated body is not an error of the engine
        cut = ParsedResponse(answer.response, ended=self.is_over, error=error, problems=answer.problems)
        recorded_reason = None if self.is_over else reason
        return Outcome(
            end, self._step(cut, timing, policy_version, reason=recorded_reason, delivered=delivered), broken=True
        )

    def fail(self, reason: str, timing: Timing) -> Step:
        """Return a partial step after a failure of TokenTape itself: with what was parsed, or empty if parsing failed."""
        try:
            _, answer = self._concluded(is_cut=True)
            cut = ParsedResponse(answer.response, ended=False, problems=answer.problems)
            return self._step(cut, timing, None, reason=reason, delivered=False)
        except (OverflowError, *MALFORMED):
            bare = ParsedResponse(None, ended=False, problems=("unparsed_event",))
            return self._step(bare, timing, None, reason=reason, delivered=False)

    def _concluded(self, *, is_cut: bool = False) -> tuple[bytes, ParsedResponse]:
        """Return the withheld end and the parsed response, computed once."""
        if self._conclusion is None:
            if is_cut:
                self._reply.abandon()
            self._conclusion = self._reply.finish()
        return self._conclusion

    def _step(
        self, answer: ParsedResponse, timing: Timing, version_now: str | None, *, reason: str | None, delivered: bool
    ) -> Step:
        plan = self._plan
        status: Status = "error" if answer.error is not None else "complete" if answer.ended else "partial"
        packed = self._tokens(answer.response)
        prompts, choices = packed.prompts, packed.choices
        usage, wrong_usage = check_usage(None if answer.response is None else answer.response.get("usage"))
        special = {*plan.problems, *answer.problems, *packed.problems, *(() if wrong_usage is None else (wrong_usage,))}
        if IMAGES in plan.extra:
            packed = _with_images(plan.extra[IMAGES], packed, special)
        if self._is_unlisted_model(answer):
            special.add("other_model")
        evidence = self._evidence(packed, usage, status, special, ended=answer.ended)
        first, last = _versions(choices, plan.policy_version)
        if version_now is not None and not packed.has_versions:
            last = version_now  # the engine does not report which tokens the new weights sampled
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
            policy=plan.policy,
            policy_version=first,
            policy_version_end=last if last != first else None,
            problems=fidelity.check(evidence),
            extra={**plan.extra, **packed.notes},
        )

    def _is_unlisted_model(self, answer: ParsedResponse) -> bool:
        """Return whether the response names a model that is neither the requested one nor among those that are served."""
        if self.served_models is None or answer.response is None:
            return False
        return self.other_model() not in (None, *self.served_models)

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
        """Return the response as the client received it; for an error, its status and body.

        An invalid response is recorded under `unparsed`.
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
        """Return the packed tokens of a response; none, and a problem, for a response of an unknown shape."""
        if response is None:
            return Packed()
        plan = self._plan
        try:
            problems = check_messages(plan.dialect.name, response)
            tokens = plan.engine.tokens(plan.dialect.name, plan.body, response, self.follow_up_response)
            given = plan.dialect.prompt_ids(plan.body) if plan.prompt_ids is None else [plan.prompt_ids]
            packed = pack_tokens(
                tokens, plan.response_options.samples, plan.policy_version, given, epoch=plan.policy_epoch
            )
        except (OverflowError, *MALFORMED):
            return Packed(problems=frozenset({"unparsed_event"}))
        return replace(packed, problems=packed.problems | problems) if problems else packed


def _with_images(images: Mapping[str, Any], packed: Packed, problems: set[str]) -> Packed:
    """Return the tokens with the note of the images' placeholder; add the problems of the prompt."""
    token, found = aligned(images["ids"], images["candidates"], packed.prompts)
    problems.update(found)
    return replace(packed, notes={**packed.notes, IMAGES: {"ids": images["ids"], "token": token}})


def _bound(sampling: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens per choice; None if the body does not limit them.

    Of two bounds the higher one: engines differ in which of them they use.
    """
    found = [sampling[name] for name in ("max_tokens", "max_completion_tokens") if name in sampling]
    return max([bound for bound in found if type(bound) is int and bound > 0], default=None)


def _versions(choices: tuple[Choice, ...], policy_version: str | None) -> tuple[str | None, str | None]:
    """Return the policy versions at the beginning and at the end of a step."""
    spans = [span for choice in choices for span in choice.spans]
    if not spans:
        return policy_version, policy_version
    return spans[0].policy_version, spans[-1].policy_version


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
