"""The options of an export, from a query or from a claim, and the rows of one rollout."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from aiohttp import web
from msgspec import structs

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import ExportOptions, ExportParams
from proxy.api.requests import query_from
from proxy.errors import BadRequest, Conflict
from proxy.export import FORMATS, OF_POLICIES, Fill, Format, Inexpressible, Plan, Rows, with_threads
from proxy.export.base import rows_of, with_columns
from proxy.export.containers import CONTAINERS, Writer, container_for
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.scoring.rescoring import Rescoring
from proxy.rollouts.steps import aside, facts_of, read_steps, weights_of
from proxy.trajectory.advantages import BATCH, ESTIMATORS, STEP, VINE, SoftPenalty
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.retokenize import RETOKENIZED, retokenize
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step
from proxy.trajectory.thread_rules import Wanted
from proxy.trajectory.threads import select_threads
from storage.types import FullRollout

_LOADED: Final[set[str]] = set()  # content types with an imported library
_Asked = TypeVar("_Asked", bound=ExportParams)
_Part = TypeVar("_Part", Options, Fill)


def refusal(error: Inexpressible) -> Conflict:
    """Return the error of a request for rows that the format cannot express."""
    conflict = Conflict(str(error), param="format")
    conflict.reason = error.code
    return conflict


@dataclass(frozen=True, slots=True)
class Planned:
    """The planned rows of one rollout, and how much work rendering is, in the unit of `aside`.

    `is_rendered`: all rows are in memory, and `plan.render` returns them.
    """

    plan: Plan
    weight: int
    is_rendered: bool = False

    async def rows(self) -> Rows:
        """Render all rows at once. Raises Conflict if the format cannot express one of them."""
        plan = self.plan
        try:
            return await aside(self.weight, lambda: rows_of(plan))
        except Inexpressible as error:
            raise refusal(error) from None


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """An export: its options as they were requested, and what follows from them."""

    form: Format
    container: type[Writer]
    options: Options
    fill: Fill
    asked: ExportOptions
    penalty: SoftPenalty | None = None  # of long responses
    policy: str | None = None  # its steps are exported; None: the steps of all trained policies
    threads: Wanted | None = None  # their steps are exported; None: all steps, and rows do not name threads
    report: bool = False
    rescoring: Rescoring | None = None  # once `begin` has found an engine
    known: Mapping[str, FullRollout] = field(default_factory=dict)  # rollouts that are read already

    @property
    def is_by_turn(self) -> bool:
        """Whether each turn has its own advantage, of its discounted return."""
        return self.asked.advantage in (STEP, VINE) or self.asked.discount is not None

    def options_of(self, rollout: Rollout) -> Options:
        """Return the options for a rollout: it trains what it repeats of members that it replaces, which have no rows."""
        return replace(self.options, own=rollout.replaces) if rollout.replaces else self.options

    async def read(self, context: Context, rollout: Rollout, *, whole: bool) -> tuple[list[Step], list[dict[str, Any]]]:
        """Return the exported steps of a rollout, and skipped entries for the steps of other threads and policies.

        Raises as `plan` does.
        """
        is_retokenized = self.options.include == RETOKENIZED
        needs_threads = self.threads is not None or bool(rollout.thread_rewards) or self.form.by_thread
        is_whole, full = whole or is_retokenized or needs_threads, self.known.get(rollout.rollout_id)
        found = await read_steps(context.store, rollout, whole=is_whole, full=full)
        skipped: list[dict[str, Any]] = []
        if needs_threads:
            wanted, rules, all_steps = self.threads or "all", context.threads.rules, found
            found, skipped = await aside(weights_of(found).packed, lambda: select_threads(all_steps, rules, wanted))
        steps: list[Step] = []
        for step in found:
            if context.policies.exports(self.policy, step.policy):
                steps.append(step)
            else:
                other = f"its policy is {step.policy}, not {self.policy}"
                why = f"its policy {step.policy} is not trained" if self.policy is None else other
                skipped.append({"step_id": step.step_id, "why": why})
        return (await _retokenized(context, steps) if is_retokenized else steps), skipped

    async def plan(self, context: Context, rollout: Rollout, *, max_rendered: int = 0) -> Planned:
        """Plan the rows of one rollout, with the advantages that it has; render them if their weight is at most `max_rendered`.

        Raises Conflict if the format cannot express it, DamagedStep if a step cannot be read, NotFound if the rollout was
        deleted meanwhile, or StorageError.
        """
        steps, others = await self.read(context, rollout, whole=self.form.whole)
        # Loading a tokenizer takes seconds and may fail: only for formats that have text.
        decode = await _decode(context, steps) if "full_text" in self.form.columns else None
        fill = self.fill if decode is None else replace(self.fill, decode=decode)
        facts = facts_of(structs.replace(rollout, advantages=None) if self.asked.advantage == "none" else rollout)
        weights, options = weights_of(steps), self.options_of(rollout)
        try:
            plan = await aside(weights.packed, lambda: self.form.plan(facts, steps, options, fill))
            if self.rescoring is not None and plan.trained:
                scores = await self.rescoring.score(facts, steps, options)
                scored = replace(fill, scores=scores)
                plan = await aside(weights.packed, lambda: self.form.plan(facts, steps, options, scored))
        except Inexpressible as error:
            raise refusal(error) from None
        if others:
            plan = replace(plan, skipped=[*others, *plan.skipped])
        planned = Planned(plan, weights.rows)
        if plan.pack is not None and not self.container.nests:
            planned = Planned(replace(plan, render=plan.pack), weights.packed)
        if planned.weight > max_rendered:
            return planned
        try:
            rows = await aside(planned.weight, lambda: list(planned.plan.render()))
        except Inexpressible as error:
            raise refusal(error) from None
        return Planned(replace(plan, render=rows.__iter__), planned.weight, is_rendered=True)

    def about(self, rollout: Rollout, rows: Plan | Rows, raw: RolloutFacts | None = None) -> list[dict[str, Any]]:
        """Describe the rows of a rollout, in their order; `raw` has its rewards before the penalty.

        `advantage` is null unless the row has exactly one. `weight` is the share of each row in the rollout.
        """
        threads = rows.threads or [None] * len(rows.trained)
        is_split = self.options.row_weight == "split" and self.form.repeats_reward
        facts = facts_of(rollout).of_rows(threads, split=is_split)
        unpenalized = facts if raw is None else raw.of_rows(threads, split=is_split)
        described = []
        points = rows.points or [None] * len(rows.trained)
        for step_ids, thread, of_row, before, point in zip(
            rows.trained, threads, facts, unpenalized, points, strict=True
        ):
            advantage = None if self.asked.advantage == "none" else of_row.advantages
            is_number = isinstance(advantage, int | float) and not isinstance(advantage, bool)
            row = {
                "rollout_id": rollout.rollout_id,
                "step_ids": list(step_ids),
                "reward": of_row.reward,
                "advantage": advantage if is_number else None,
                "weight": 1 / len(threads),
            }
            row |= {} if self.penalty is None else {"raw_reward": before.reward}
            row |= {} if point is None else {"branch": point._asdict()}
            described.append(row if thread is None else {**row, "thread": thread})
        for entry, rescored in zip(described, rows.rescored, strict=False):  # there are none without `rescore`
            entry["rescored"] = rescored
        return described

    async def begin(self, context: Context) -> "ExportQuery":
        """Return the query ready for its rollouts: with the library of its container, and with an engine that scores them.

        Raises BadRequest if the library is missing, EngineError if no engine of the scorer is reachable, and
        UnprocessableRequest if none of them can score.
        """
        if self.container.content_type not in _LOADED:  # pyarrow takes 0.2 s
            await asyncio.to_thread(self.writer)
            _LOADED.add(self.container.content_type)
        if self.asked.rescore is None:
            return self
        rescoring = await context.rescorers.begin(self.asked.rescore, self.asked.rescore_top_k)
        return replace(self, rescoring=rescoring)

    def writer(self) -> Writer:
        """Return a writer for one export. Raises BadRequest if its library is not installed."""
        try:
            return self.container(self.form)
        except ValueError as error:
            raise BadRequest(str(error), param="container") from None

    def pieces(self, rows: Iterable[Any], report: Mapping[str, Any]) -> Iterator[bytes]:
        """Write rows into their container one by one, and the report after them if it was requested."""
        writer = self.writer()
        yield writer.opening()
        yield from map(writer.row, rows)
        yield writer.closing(report if self.report else None)


def export_query_from(request: web.Request, model: type[_Asked]) -> tuple[_Asked, ExportQuery]:
    """Return the parameters of a query, and its export. Raises BadRequest, which names the valid options."""
    context = request.app[CONTEXT]
    if request.query.get("advantage") == BATCH:
        raise BadRequest(
            f"advantage={BATCH} is normalized over a claimed batch (POST /batches/claim); an export has no batch.",
            param="advantage",
        )
    asked = query_from(request, model)
    try:
        container = container_for(request.headers.get("Accept"), asked.container)
    except ValueError as error:
        raise BadRequest(str(error), param="container") from None
    forms = FORMATS if context.policies.only else OF_POLICIES
    if asked.threads or context.threads.default:
        forms = {asked.format: with_threads(forms[asked.format])}
    policy = None if asked.policy is None else context.policies.named(asked.policy).name
    return asked, replace(export_query(context, asked, forms, container), policy=policy, report=asked.report)


def export_query(
    context: Context,
    asked: ExportOptions,
    forms: Mapping[str, Format] = FORMATS,
    container: type[Writer] = CONTAINERS["json"],
) -> ExportQuery:
    """Return the export with these options. Raises BadRequest for an unknown format and for options that exclude each other."""
    if asked.format not in forms:
        raise BadRequest(f"Unknown format {asked.format!r}; use one of {', '.join(forms)}.", param="format")
    for name in forms[asked.format].pads:
        if getattr(asked, name) is None:
            raise BadRequest(f"Format {asked.format!r} pads its rows: it requires {name}, in tokens.", param=name)
    form, penalty = forms[asked.format], _penalty(asked)
    chosen = asked.model_dump() | {"branches": asked.branches or form.branches}
    if penalty is not None:
        chosen |= {"max_len": None, "overlong": "keep"}
    options, fill = _part(Options, chosen), _part(Fill, chosen)
    query = ExportQuery(
        form, container, options, fill, asked, penalty, threads=asked.threads or context.threads.default
    )
    _check_advantages(query)
    return query if asked.rescore is None else _rescored(query, context, asked.rescore)


def _part(kind: type[_Part], chosen: Mapping[str, Any]) -> _Part:
    return kind(**{name: chosen[name] for name in kind.__dataclass_fields__ if name in chosen})


def _rescored(query: ExportQuery, context: Context, name: str) -> ExportQuery:
    """Return the query with scores. Raises BadRequest if its format has no place for them, or the scorer is unknown."""
    role, top_k = context.rescorers.role(name), query.asked.rescore_top_k
    what = f"logprobs of {'the policy' if role == 'proximal' else 'a teacher'}"
    _check_place(query.form, [other for other in FORMATS.values() if role in other.scored], what, "rescore")
    if top_k:
        likely = [other for other in FORMATS.values() if role in other.likely]
        _check_place(query.form, likely, "the most likely tokens", "rescore_top_k")
    form = with_columns(query.form, role, likely=top_k > 0)
    return replace(query, form=form, fill=replace(query.fill, role=role))


def _check_place(form: Format, able: Sequence[Format], what: str, param: str) -> None:
    """Raise BadRequest if a format is not among those that have a place for something; the error names these."""
    names = [other.name for other in able]
    if form.name not in names:
        raise BadRequest(f"Format {form.name!r} has no place for {what}; use one of {', '.join(names)}.", param=param)


def _penalty(asked: ExportOptions) -> SoftPenalty | None:
    """Return the penalty of long responses, if one is requested. Raises BadRequest if lengths exclude each other."""
    max_len, buffer = asked.max_len, asked.overlong_buffer
    if asked.overlong != "penalize":
        if buffer is not None:
            raise BadRequest("overlong_buffer requires overlong=penalize.", param="overlong_buffer")
        return None
    if max_len is None or buffer is None:
        missing = "max_len" if max_len is None else "overlong_buffer"
        raise BadRequest(
            f"overlong=penalize requires max_len and overlong_buffer; {missing} is missing.", param=missing
        )
    if buffer > max_len:
        raise BadRequest(f"overlong_buffer={buffer} exceeds max_len={max_len}.", param="overlong_buffer")
    return SoftPenalty(max_len, buffer)


def _check_advantages(query: ExportQuery) -> None:
    """Raise BadRequest if there is nothing to discount or score, or the format has no place for the advantages of turns."""
    asked = query.asked
    if asked.advantage == VINE and (asked.discount is not None or query.penalty is not None):
        what = "discount" if asked.discount is not None else "overlong"
        raise BadRequest(f"advantage=vine compares rewards of branches, which have no {what}; omit {what}.", param=what)
    if asked.advantage != VINE and asked.any_version:
        raise BadRequest("any_version requires advantage=vine.", param="any_version")
    if asked.discount is not None and asked.advantage not in ESTIMATORS:
        raise BadRequest(
            f"discount requires an estimator of advantages, not advantage={asked.advantage}.", param="discount"
        )
    if query.is_by_turn and query.form.advantage_place not in ("turn", "token"):
        able = ", ".join(name for name, form in FORMATS.items() if form.advantage_place in ("turn", "token"))
        raise BadRequest(
            f"Format {query.form.name!r} has no place for an advantage of each turn (advantage=step or vine, discount); "
            f"use one of {able}.",
            param="discount" if asked.advantage not in (STEP, VINE) else "advantage",
        )
    if asked.rescore is None and asked.rescore_top_k:
        raise BadRequest("rescore_top_k requires rescore.", param="rescore_top_k")


async def _decode(context: Context, steps: Sequence[Step]) -> Callable[[Sequence[int]], str] | None:
    """Return the decoder of the endpoint that all of these steps came from; None if there are several, or no tokenizer."""
    names = {step.engine.name for step in steps}
    tokenizer = await context.tokenizers.get(names.pop()) if len(names) == 1 else None
    return tokenizer.decode if tokenizer else None


async def _retokenized(context: Context, steps: Sequence[Step]) -> list[Step]:
    """Return the steps; those without ids get them from the tokenizers of their endpoints. Raises UnprocessableRequest."""
    names = {step.engine.name for step in steps}
    tokenizers = {name: tokenizer for name in names if (tokenizer := await context.tokenizers.get(name)) is not None}

    def retokenize_all() -> list[Step]:
        return [
            retokenize(step, tokenizers[step.engine.name]) if step.engine.name in tokenizers else step for step in steps
        ]

    return await asyncio.to_thread(retokenize_all)
