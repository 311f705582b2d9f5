"""Background audit: a share of the finished steps is scored again by the engine that sampled them.

No call waits for an audit. A step is skipped while another one waits, and if the engine cannot score it as it sampled it
(engine type, constrained decoding, logprobs after temperature).
"""

import asyncio

from proxy.clock import Clock
from proxy.errors import EngineError
from proxy.rollouts.audit.report import NOT_SCORED
from proxy.rollouts.audit.runner import AuditOptions, audit_one
from proxy.rollouts.audit.sample import AuditSample, of_choice
from proxy.rollouts.audit.verdict import Scored, pairs_of
from proxy.rollouts.live import LiveRollout
from proxy.rollouts.scoring.requests import SCORING_KINDS, NotScored, Scorer, find_scorer, sender
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.images import recorded
from proxy.trajectory.step import Step
from proxy.upstream import Endpoint, Upstream
from storage.types import Appended

_RAW = "raw_logprobs"


class BackgroundAudit:
    """Score offered steps, one at a time. Call `start` inside the event loop, `close` before the engines are closed."""

    def __init__(self, rate: float, upstream: Upstream, metrics: Metrics, clock: Clock) -> None:
        self._rate = rate
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._waiting: asyncio.Queue[Step] = asyncio.Queue(maxsize=1)
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<BackgroundAudit of {self._rate:.2%} of steps>"

    def start(self) -> None:
        """Start the audit if its sample rate is above 0."""
        if self._rate > 0:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop, also during the audit of a step."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def offer(self, step: Step, _live: LiveRollout, _appended: Appended, _bytes: int) -> None:
        """Audit a stored step if it is sampled, can be scored, and no other step waits. Never blocks."""
        if self._task is None or self._waiting.full() or not is_scorable(step):
            return
        if int.from_bytes(self._clock.entropy(4), "big") < self._rate * 2**32:
            self._waiting.put_nowait(step)

    async def _work(self) -> None:
        while True:
            step = await self._waiting.get()
            endpoint = next(
                (endpoint for endpoint in self._upstream.endpoints if endpoint.settings.url == step.engine.url), None
            )
            if endpoint is None:
                continue
            try:
                await self._audit(step, endpoint)
            except (NotScored, EngineError) as why:
                self._metrics.audits.labels(step.engine.name, NOT_SCORED).inc()
                LOG.warning("Step not audited: %s", why, extra={"fields": {"step_id": step.step_id}})

    async def _audit(self, step: Step, endpoint: Endpoint) -> None:
        found = await find_scorer(sender(self._upstream, endpoint), step.engine.kind, None)
        scorer = Scorer(found.send, found.kind, step.model_served or found.model, found.window)
        for choice in step.choices[:1]:  # the other choices of the call have the same prompt and engine
            sample = of_choice(step, choice)
            scored, finding = await audit_one(sample, scorer, AuditOptions())
            if finding is None:
                continue
            self._metrics.audits.labels(step.engine.name, finding.verdict).inc()
            await asyncio.to_thread(self._observe, step.engine.name, sample, scored)
            if finding.verdict != "aligned":
                fields = {"step_id": step.step_id, "verdict": finding.verdict, "max": finding.max, "note": finding.note}
                LOG.warning("Audited step is not aligned", extra={"fields": fields})

    def _observe(self, engine: str, recorded: AuditSample, scored: Scored) -> None:
        sizes = self._metrics.audit_logprob_difference.labels(engine)
        for pair in pairs_of(recorded, scored):
            sizes.observe(pair.size)


def is_scorable(step: Step) -> bool:
    """Return whether the engine that sampled a step can score it as it was recorded."""
    temperature, over = step.sampling.get("temperature"), {step.logprobs_over(choice) for choice in step.choices}
    return (
        step.exact
        and step.status == "complete"
        and step.engine.kind in SCORING_KINDS
        and (step.is_chat or step.dialect in {"completions", "sglang_generate"})
        and any(choice.logprobs for choice in step.choices)
        and (step.sampling.get("logprobs_mode", _RAW) == _RAW or temperature == 1 or over == {"mask"})
        and "truncated" not in over
        and not step.constrained
        and not recorded(step)  # ids without the images are another prompt
    )
