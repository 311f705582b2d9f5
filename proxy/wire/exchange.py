"""One call in the core: what to send, what came, what to show, what to keep.

Holds the `Exchange`, which is fed the engine's bytes, gives the client's, and at the end gives the step. It never awaits:
sockets, clocks and the store are its callers' business.

    exchange = Exchange(plan, status, content_type)
    for read in ...:  client.write(exchange.feed(read))
    outcome = exchange.finish(timing)        # or exchange.abort("client_gone", timing)
    ... store outcome.step, and only then ...
    client.write(outcome.end)
"""

from dataclasses import dataclass

from proxy.engines.base import Json, Tokens
from proxy.trajectory import fidelity
from proxy.trajectory.packing import pack_ids, pack_logprobs
from proxy.trajectory.step import Choice, Ids, Span, Status, Step, Timing
from proxy.wire.plan import Plan
from proxy.wire.reply import Answer, reply_for


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call that is over: the withheld end, the step to store before it is shown, and whether the engine broke off.

    When `broken`, the client's connection must end as the engine's did: without a proper end.
    """

    end: bytes
    step: Step
    broken: bool


class Exchange:
    """One call, from the engine's first byte to the step."""

    def __init__(self, plan: Plan, status: int, content_type: str) -> None:
        self._plan = plan
        self._status = status
        self._content_type = content_type
        self._reply = reply_for(status, content_type, plan.view)

    def feed(self, read: bytes) -> bytes:
        """Take bytes of the engine; give the bytes that the client may see now."""
        return self._reply.feed(read)

    def finish(self, timing: Timing) -> Outcome:
        """The engine's answer is over."""
        end, answer = self._reply.finish()
        reason = None if answer.ended else "the engine's answer ended without its terminal event"
        return Outcome(end, self._step(answer, timing, reason=reason, delivered=True), broken=False)

    def abort(self, reason: str, timing: Timing, *, delivered: bool) -> Outcome:
        """The call broke off: the client left (`delivered` false), or the engine was lost."""
        end, answer = self._reply.finish()
        error = answer.error if answer.response is not None else None  # a body cut short is no error of the engine
        cut = Answer(answer.response, ended=False, error=error, problems=answer.problems)
        return Outcome(end, self._step(cut, timing, reason=reason, delivered=delivered), broken=True)

    def _step(self, answer: Answer, timing: Timing, *, reason: str | None, delivered: bool) -> Step:
        plan = self._plan
        status: Status = "error" if answer.error is not None else "complete" if answer.ended else "partial"
        prompts, choices, met = self._tokens(answer.response)
        usage = None if answer.response is None else answer.response.get("usage")
        usage = usage if isinstance(usage, dict) else None
        evidence = fidelity.Evidence(
            prompts=prompts,
            choices=choices,
            usage=usage,
            asked=plan.asked.choices,
            ended=answer.ended,
            status=status,
            special={*plan.problems, *answer.problems, *met},
        )
        return Step(
            step_id=plan.step_id,
            rollout_id=plan.rollout_id,
            dialect=plan.dialect.name,
            endpoint=plan.endpoint,
            engine=plan.engine_facts,
            model_asked=plan.model_asked,
            model_served=plan.model_served,
            request=plan.request,
            sent=plan.sent,
            response=self._recorded(answer),
            prompts=prompts,
            choices=choices,
            usage=usage,
            sampling=plan.sampling,
            timing=timing,
            status=status,
            reason=reason,
            delivered=delivered,
            policy_version=plan.policy_version,
            problems=fidelity.check(evidence),
            extra=plan.extra,
        )

    def _recorded(self, answer: Answer) -> Json | None:
        """The response as the client was to see it; of an error, its status and body."""
        shown = None if answer.response is None else self._plan.view.whole(answer.response)
        if answer.error is None:
            return shown
        error = {"status": self._status, "content_type": self._content_type, "body": answer.error}
        return error if shown is None or not shown.get("choices") else {**shown, "error": error}

    def _tokens(self, response: Json | None) -> tuple[tuple[Ids, ...], tuple[Choice, ...], set[str]]:
        """The tokens of a response, packed; a response of an unknown shape has none, and says so."""
        if response is None:
            return (), (), set()
        try:
            tokens = self._plan.engine.tokens(self._plan.dialect.name, response)
            return pack_tokens(tokens, self._plan.asked.samples, self._plan.policy_version)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
            return (), (), {"unparsed_event"}


def pack_tokens(
    tokens: Tokens, samples: int | None, policy_version: str | None
) -> tuple[tuple[Ids, ...], tuple[Choice, ...], set[str]]:
    """The engine's lists as arrays: the prompts, the choices, and the problems met on the way.

    Choice index = prompt index times samples plus sample index, where each choice has a prompt of its own. Raises
    ValueError, TypeError or OverflowError for what are no ids or logprobs.
    """
    problems: set[str] = set()
    prompts: dict[int, list[int]] = {} if tokens.prompt_ids is None else {0: tokens.prompt_ids}
    choices = []
    for sampled in tokens.choices:
        prompt = sampled.index // (samples or 1) if tokens.prompt_ids is None else 0
        if sampled.prompt_ids is not None and prompts.setdefault(prompt, sampled.prompt_ids) != sampled.prompt_ids:
            problems.add("mixed_prompts")
        ids = pack_ids(sampled.ids or [])
        choices.append(
            Choice(
                index=sampled.index,
                ids=ids,
                logprobs=pack_logprobs(sampled.logprobs or []),
                finish_reason=sampled.finish_reason,
                stop_reason=sampled.stop_reason,
                prompt=prompt,
                spans=(Span(0, len(ids), policy_version),) if ids else (),
            )
        )
    if "mixed_prompts" in problems or list(prompts) != list(range(len(prompts))):
        return (), tuple(choices), {*problems, "mixed_prompts"}  # an index would point to the wrong prompt
    return tuple(pack_ids(ids) for ids in prompts.values()), tuple(choices), problems
