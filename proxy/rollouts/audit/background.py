"""The audit that the server runs itself: a share of the finished steps, scored again by the engine that sampled them.

Holds one task and the one step that waits for it. Rule: no call waits for an audit. A step that comes while another waits is
let go, and so is everything that an engine could not score as it sampled it (another kind of engine, a constraint,
logprobs after temperature).
"""

import asyncio
from typing import Any

import orjson

from proxy.clock import Clock
from proxy.errors import EngineFault
from proxy.rollouts.audit.report import NOT_SCORED
from proxy.rollouts.audit.runner import AuditOptions, audit_one
from proxy.rollouts.audit.sample import AuditSample, of_choice
from proxy.rollouts.audit.scoring import SCORING_KINDS, NotScored, Scorer, Send, find_scorer
from proxy.rollouts.audit.verdict import Scored, pairs_of
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import Step
from proxy.upstream import Endpoint, Upstream
from storage.types import Appended

_HEADERS = (("Content-Type", "application/json"),)
_RAW = "raw_logprobs"


class BackgroundAudit:
    """Scores offered steps, one at a time. `start` inside the event loop, `close` before the engines are closed."""

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
        """Begin to take steps, if any share of them is wanted."""
        if self._rate > 0:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop, in the middle of a step too."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def offer(self, step: Step, incarnation: str, appended: Appended) -> None:
        """A step that was stored: taken if it is drawn, can be scored, and nothing else waits. Never blocks."""
        if self._task is None or self._waiting.full() or not is_scorable(step):
            return
        if int.from_bytes(self._clock.entropy(4), "big") < self._rate * 2**32:
            self._waiting.put_nowait(step)

    async def _work(self) -> None:
        while True:
            step = await self._waiting.get()
            endpoint = next((one for one in self._upstream.endpoints if one.settings.url == step.engine.url), None)
            if endpoint is None:
                continue
            try:
                await self._audit(step, endpoint)
            except (NotScored, EngineFault) as why:
                self._metrics.audits.labels(step.engine.name, NOT_SCORED).inc()
                LOG.warning("a step is not audited: %s", why, extra={"fields": {"step_id": step.step_id}})

    async def _audit(self, step: Step, endpoint: Endpoint) -> None:
        found = await find_scorer(sender(self._upstream, endpoint), step.engine.kind, None)
        scorer = Scorer(found.send, found.kind, step.model_served or found.model, found.window)
        for choice in step.choices[:1]:  # the others of a call share its fate
            recorded = of_choice(step, choice)
            scored, finding = await audit_one(recorded, scorer, AuditOptions())
            if finding is None:
                continue
            self._metrics.audits.labels(step.engine.name, finding.verdict).inc()
            await asyncio.to_thread(self._observe, step.engine.name, recorded, scored)
            if finding.verdict != "aligned":
                fields = {"step_id": step.step_id, "verdict": finding.verdict, "max": finding.max, "note": finding.note}
                LOG.warning("an audited step is not aligned", extra={"fields": fields})

    def _observe(self, engine: str, recorded: AuditSample, scored: Scored) -> None:
        sizes = self._metrics.audit_logprob_difference.labels(engine)
        for pair in pairs_of(recorded, scored):
            sizes.observe(pair.size)


def is_scorable(step: Step) -> bool:
    """Whether the engine that sampled a step can score it as it was recorded."""
    temperature = step.sampling.get("temperature")
    return (
        step.exact
        and step.status == "complete"
        and step.engine.kind in SCORING_KINDS
        and (step.is_chat or step.dialect == "completions")
        and any(choice.logprobs for choice in step.choices)
        and (step.sampling.get("logprobs_mode", _RAW) == _RAW or temperature == 1)
        and not step.constrained
    )


def sender(upstream: Upstream, endpoint: Endpoint) -> Send:
    """What asks this endpoint. Raises EngineFault if nobody answers."""

    async def send(method: str, path: str, body: Any) -> tuple[int, bytes]:
        text = None if body is None else await asyncio.to_thread(orjson.dumps, body)
        async with upstream.send(endpoint, method, path, headers=_HEADERS, body=text) as answer:
            return answer.status, bytes(await answer.whole())

    return send
