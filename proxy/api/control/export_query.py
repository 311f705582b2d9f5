"""The options of an export, from a query or from a claim, and the rows of one rollout."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, Final, cast

from aiohttp import web
from msgspec import structs

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import MAX_TOP_K, ClaimBatch
from proxy.api.query import enum_param, int_param
from proxy.errors import BadRequest, Conflict
from proxy.export import FORMATS, OF_POLICIES, Fill, Format, Inexpressible, Plan, Rows, with_threads
from proxy.export.base import with_columns
from proxy.export.containers import CONTAINERS, Writer, container_for
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.scoring.rescoring import Rescoring
from proxy.rollouts.steps import aside, facts_of, read_steps, weights_of
from proxy.trajectory.advantages import BATCH, ESTIMATORS, STEP, SoftPenalty
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.retokenize import RETOKENIZED, retokenize
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step
from proxy.trajectory.thread_rules import Wanted
from proxy.trajectory.threads import select_threads

_FILLS: Final = ("prompt_logprob", "pad_id", "prompt_length", "response_length")
EXPORT_OPTIONS: Final = (
    "format", "branches", "row_weight", "include", "max_len", "overlong", "overlong_buffer", "container", "report", "advantage",
    "discount", "policy", "threads", "rescore", "rescore_top_k", *_FILLS,
)  # fmt: skip
_LOADED: Final[set[str]] = set()  # content types whose library is imported
THREADS: Final[tuple[Wanted, ...]] = ("all", "agents", "main")
BRANCHES: Final = ("all", "one", "longest", "last")
ROW_WEIGHTS: Final = ("full", "split")
OVERLONG: Final = ("cut", "drop", "keep", "penalize")
ALONE: Final = ("given", "none", STEP)  # advantages that need no group
IN_GROUP: Final = (*ALONE, *(name for name in ESTIMATORS if name not in (STEP, BATCH)))


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
        with_all = self.plan
        try:
            return await aside(self.weight, lambda: rows_of(with_all))
        except Inexpressible as error:
            raise refusal(error) from None


def rows_of(plan: Plan) -> Rows:
    """Render all rows of a plan."""
    return Rows(list(plan.render()), plan.skipped, plan.trained, plan.rescored, plan.threads)


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """The options of an export.

    `advantage` is none, given, or the estimator to use on the group's rewards. `discount` is None for one advantage for a whole
    rollout; otherwise each turn has its own, of its discounted return. `penalty` is that of long responses.
    `policy` is the policy whose steps are exported; None for those of all policies that are trained. `threads` are those whose
    steps are exported; None for all of them, whose rows do not name them. `rescore` is the scorer
    whose logprobs the rows have too, with the `rescore_top_k` most likely tokens; `rescoring` is its scoring once it has begun.
    """

    form: Format
    container: type[Writer]
    options: Options
    fill: Fill
    advantage: str = "given"
    report: bool = False
    discount: float | None = None
    penalty: SoftPenalty | None = None
    policy: str | None = None
    rescore: str | None = None
    rescore_top_k: int = 0
    rescoring: Rescoring | None = None
    threads: Wanted | None = None

    @property
    def is_by_turn(self) -> bool:
        """Whether each turn has its own advantage."""
        return self.advantage == STEP or self.discount is not None

    @property
    def reads_ahead(self) -> bool:
        """Whether rewards or returns depend on the steps."""
        return self.is_by_turn or self.penalty is not None

    async def read(self, context: Context, rollout: Rollout, *, whole: bool) -> tuple[list[Step], list[dict[str, Any]]]:
        """Return the steps of a rollout that are exported, and those of other threads and policies as skipped.

        Raises as `plan` does.
        """
        is_retokenized = self.options.include == RETOKENIZED
        needs_threads = self.threads is not None or bool(rollout.thread_rewards) or self.form.by_thread
        found = await read_steps(context.store, rollout, whole=whole or is_retokenized or needs_threads)
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
        facts = facts_of(structs.replace(rollout, advantages=None) if self.advantage == "none" else rollout)
        weights = weights_of(steps)
        try:
            plan = await aside(weights.packed, lambda: self.form.plan(facts, steps, self.options, fill))
            if self.rescoring is not None and plan.trained:
                scores = await self.rescoring.score(facts, steps, self.options)
                scored = replace(fill, scores=scores)
                plan = await aside(weights.packed, lambda: self.form.plan(facts, steps, self.options, scored))
        except Inexpressible as error:
            raise refusal(error) from None
        if others:
            plan = replace(plan, skipped=[*others, *plan.skipped])
        planned = Planned(plan, weights.rows)
        if plan.pack is not None and not self.container.nests:
            planned = Planned(replace(plan, render=plan.pack), weights.packed)
        if planned.weight > max_rendered:
            return planned
        rows = (await planned.rows()).rows
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
        for step_ids, thread, of_row, before in zip(rows.trained, threads, facts, unpenalized, strict=True):
            advantage = None if self.advantage == "none" else of_row.advantages
            is_number = isinstance(advantage, int | float) and not isinstance(advantage, bool)
            row = {
                "rollout_id": rollout.rollout_id,
                "step_ids": list(step_ids),
                "reward": of_row.reward,
                "advantage": advantage if is_number else None,
                "weight": 1 / len(threads),
            }
            row |= {} if self.penalty is None else {"raw_reward": before.reward}
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
        if self.rescore is None:
            return self
        return replace(self, rescoring=await context.rescorers.begin(self.rescore, self.rescore_top_k))

    def writer(self) -> Writer:
        """Return a writer for one export. Raises BadRequest where what it needs is not installed."""
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


def export_query_from(request: web.Request, advantages: Sequence[str] = ALONE) -> ExportQuery:
    """Parse the options of a query. Raises BadRequest, which names the valid options."""
    policies = request.app[CONTEXT].policies
    form = (FORMATS if policies.only else OF_POLICIES)[enum_param(request, "format", FORMATS, "sequences")]
    chosen = {
        "branches": enum_param(request, "branches", BRANCHES, form.branches),
        "row_weight": enum_param(request, "row_weight", ROW_WEIGHTS, "full"),
        "include": enum_param(request, "include", ("exact", "flagged", RETOKENIZED), "exact"),
    }
    advantage = request.query.get("advantage", "given")
    if advantage == BATCH and BATCH not in advantages:
        raise BadRequest(
            f"advantage={BATCH} is normalized over a claimed batch (POST /batches/claim); an export has no batch.",
            param="advantage",
        )
    cut, penalty = _lengths(
        enum_param(request, "overlong", OVERLONG, "cut"),
        int_param(request, "max_len", None, minimum=1),
        int_param(request, "overlong_buffer", None, minimum=1),
    )
    name = request.query.get("policy")
    threads = request.app[CONTEXT].threads.default
    if "threads" in request.query:
        threads = cast("Wanted", enum_param(request, "threads", THREADS, "all"))
    query = ExportQuery(
        form=form if threads is None else with_threads(form),
        container=_container_from(request),
        options=Options(**cast("Any", chosen), **cut),
        fill=Fill(
            prompt_logprob=_float_param(request, "prompt_logprob"),
            pad_id=int_param(request, "pad_id", 0, minimum=0) or 0,
            prompt_length=int_param(request, "prompt_length", None, minimum=1),
            response_length=int_param(request, "response_length", None, minimum=1),
        ),
        advantage=enum_param(request, "advantage", advantages, "given"),
        report=enum_param(request, "report", ("true", "false"), "false") == "true",
        discount=_discount_param(request),
        penalty=penalty,
        policy=None if name is None else policies.named(name).name,
        threads=threads,
    )
    _check_advantages(query)
    top_k = int_param(request, "rescore_top_k", 0, minimum=0, maximum=MAX_TOP_K) or 0
    return _rescored(query, request.app[CONTEXT], request.query.get("rescore"), top_k)


def export_query_from_claim(claim: ClaimBatch, context: Context) -> ExportQuery:
    """Return the export options of a claim. Raises BadRequest for an unknown format and for options that exclude each other."""
    if claim.format not in FORMATS:
        raise BadRequest(f"Unknown format {claim.format!r}; use one of {', '.join(FORMATS)}.", param="format")
    form = FORMATS[claim.format]
    cut, penalty = _lengths(claim.overlong, claim.max_len, claim.overlong_buffer)
    query = ExportQuery(
        form=form,
        container=CONTAINERS["json"],
        options=Options(
            branches=claim.branches or form.branches, include=claim.include, row_weight=claim.row_weight, **cut
        ),
        fill=Fill(
            prompt_logprob=claim.prompt_logprob,
            pad_id=claim.pad_id,
            prompt_length=claim.prompt_length,
            response_length=claim.response_length,
        ),
        advantage=claim.advantage,
        discount=claim.discount,
        penalty=penalty,
        threads=claim.threads or context.threads.default,
    )
    _check_advantages(query)
    return _rescored(query, context, claim.rescore, claim.rescore_top_k)


def _rescored(query: ExportQuery, context: Context, name: str | None, top_k: int) -> ExportQuery:
    """Return the query with scores. Raises BadRequest if its format has no place for them, or the scorer is unknown."""
    if name is None:
        if top_k:
            raise BadRequest("rescore_top_k requires rescore.", param="rescore_top_k")
        return query
    role = context.rescorers.role(name)
    what = f"logprobs of {'the policy' if role == 'proximal' else 'a teacher'}"
    _check_place(query.form, [other for other in FORMATS.values() if role in other.scored], what, "rescore")
    if top_k:
        likely = [other for other in FORMATS.values() if role in other.likely]
        _check_place(query.form, likely, "the most likely tokens", "rescore_top_k")
    form = with_columns(query.form, role, likely=top_k > 0)
    return replace(query, form=form, fill=replace(query.fill, role=role), rescore=name, rescore_top_k=top_k)


def _check_place(form: Format, able: Sequence[Format], what: str, param: str) -> None:
    """Raise BadRequest if a format is not among those that have a place for something; the error names these."""
    names = [other.name for other in able]
    if form.name not in names:
        raise BadRequest(f"Format {form.name!r} has no place for {what}; use one of {', '.join(names)}.", param=param)


def _lengths(overlong: str, max_len: int | None, buffer: int | None) -> tuple[dict[str, Any], SoftPenalty | None]:
    """Return the options that cut rows, and the penalty of long responses. Raises BadRequest if they exclude each other."""
    if overlong != "penalize":
        if buffer is not None:
            raise BadRequest("overlong_buffer requires overlong=penalize.", param="overlong_buffer")
        return {"max_len": max_len, "overlong": overlong}, None
    if max_len is None or buffer is None:
        missing = "max_len" if max_len is None else "overlong_buffer"
        raise BadRequest(
            f"overlong=penalize requires max_len and overlong_buffer; {missing} is missing.", param=missing
        )
    if buffer > max_len:
        raise BadRequest(f"overlong_buffer={buffer} exceeds max_len={max_len}.", param="overlong_buffer")
    return {"max_len": None, "overlong": "keep"}, SoftPenalty(max_len, buffer)


def _check_advantages(query: ExportQuery) -> None:
    """Raise BadRequest if there is nothing to discount, or no place for the advantages of turns in the format."""
    if query.discount is not None and query.advantage not in ESTIMATORS:
        raise BadRequest(
            f"discount requires an estimator of advantages, not advantage={query.advantage}.", param="discount"
        )
    if query.is_by_turn and query.form.advantage_place not in ("turn", "token"):
        able = ", ".join(name for name, form in FORMATS.items() if form.advantage_place in ("turn", "token"))
        raise BadRequest(
            f"Format {query.form.name!r} has no place for an advantage of each turn (advantage=step, discount); "
            f"use one of {able}.",
            param="advantage" if query.advantage == STEP else "discount",
        )


def _container_from(request: web.Request) -> type[Writer]:
    try:
        return container_for(request.headers.get("Accept"), request.query.get("container"))
    except ValueError as error:
        raise BadRequest(str(error), param="container") from None


async def _decode(context: Context, steps: Sequence[Step]) -> Callable[[Sequence[int]], str] | None:
    """Return the decoder of the endpoint that all of these steps came from; None if there are several, or no tokenizer."""
    names = {step.engine.name for step in steps}
    tokenizer = await context.tokenizers.get(names.pop()) if len(names) == 1 else None
    return tokenizer.decode if tokenizer else None


def _float_param(request: web.Request, name: str) -> float | None:
    """Parse a query parameter that is a number. Raises BadRequest."""
    text = request.query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise BadRequest(f"{name} must be a number, not {text!r}.", param=name)
    return value


def _discount_param(request: web.Request) -> float | None:
    """Parse the discount of the query. Raises BadRequest."""
    discount = _float_param(request, "discount")
    if discount is not None and not 0 < discount <= 1:
        raise BadRequest(f"discount must be above 0 and at most 1, not {discount}.", param="discount")
    return discount


async def _retokenized(context: Context, steps: Sequence[Step]) -> list[Step]:
    """Return the steps; those without ids get them from the tokenizers of their endpoints. Raises UnprocessableRequest."""
    names = {step.engine.name for step in steps}
    tokenizers = {name: tokenizer for name in names if (tokenizer := await context.tokenizers.get(name)) is not None}

    def retokenize_all() -> list[Step]:
        return [
            retokenize(step, tokenizers[step.engine.name]) if step.engine.name in tokenizers else step for step in steps
        ]

    return await asyncio.to_thread(retokenize_all)
