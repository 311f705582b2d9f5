"""The options of an export, from a query or from a claim, and the rows of one rollout."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, Final, cast

from aiohttp import web
from msgspec import structs

from proxy.api.context import Context
from proxy.api.control.schemas import ClaimBatch
from proxy.api.query import enum_param, int_param
from proxy.errors import BadRequest, Conflict
from proxy.export import FORMATS, Fill, Format, Inexpressible, Plan, Rows
from proxy.export.containers import CONTAINERS, Container, Writer, container_for
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import aside, facts_of, read_steps, weights_of
from proxy.trajectory.retokenize import RETOKENIZED, retokenize
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step

_FILLS: Final = ("prompt_logprob", "pad_id", "prompt_length", "response_length")
EXPORT_OPTIONS: Final = (
    "format", "branches", "row_weight", "include", "max_len", "overlong", "container", "report", "advantage", *_FILLS,
)  # fmt: skip
_LOADED: Final[set[str]] = set()  # content types whose library is imported
BRANCHES: Final = ("all", "one", "longest", "last")
ROW_WEIGHTS: Final = ("full", "split")
GIVEN: Final = ("given", "none")  # advantages that need no group


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
            return await aside(self.weight, lambda: Rows(list(with_all.render()), with_all.skipped, with_all.trained))
        except Inexpressible as error:
            raise Conflict(str(error), param="format") from None


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """The options of an export. `advantage` is none, given, or the estimator to use on the group's rewards."""

    form: Format
    container: Container
    options: Options
    fill: Fill
    advantage: str = "given"
    report: bool = False

    async def plan(self, context: Context, rollout: Rollout, *, max_rendered: int = 0) -> Planned:
        """Plan the rows of one rollout, with the advantages that it has; render them if their weight is at most `max_rendered`.

        Raises Conflict if the format cannot express it, DamagedStep if a step cannot be read, NotFound if the rollout was
        deleted meanwhile, or StorageError.
        """
        retokenized = self.options.include == RETOKENIZED
        steps = await read_steps(context.store, rollout, whole=retokenized or self.form.whole)
        if retokenized:
            steps = await _retokenized(context, steps)
        # Loading a tokenizer takes seconds and may fail: only for formats that have text.
        decode = await _decode(context, steps) if "full_text" in self.form.columns else None
        fill = self.fill if decode is None else replace(self.fill, decode=decode)
        facts = facts_of(structs.replace(rollout, advantages=None) if self.advantage == "none" else rollout)
        weights = weights_of(steps)
        try:
            plan = await aside(weights.packed, lambda: self.form.plan(facts, steps, self.options, fill))
        except Inexpressible as error:
            raise Conflict(str(error), param="format") from None
        planned = Planned(plan, weights.rows)
        if plan.pack is not None and not self.container.nests:
            planned = Planned(Plan(plan.trained, plan.skipped, plan.pack), weights.packed)
        if planned.weight > max_rendered:
            return planned
        rows = (await planned.rows()).rows
        return Planned(Plan(plan.trained, plan.skipped, rows.__iter__), planned.weight, is_rendered=True)

    def about(self, rollout: Rollout, trained: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Describe rows of a rollout, in their order; `trained` has the ids of the steps that each of them trains.

        `advantage` is null unless the rollout has exactly one. `weight` is the share of each row in the rollout.
        """
        count = max(1, len(trained))
        is_split = self.options.row_weight == "split" and self.form.repeats_reward
        facts = facts_of(rollout).split(count if is_split else 1)
        advantage = None if self.advantage == "none" else facts.advantages
        is_number = isinstance(advantage, int | float) and not isinstance(advantage, bool)
        row = {"reward": facts.reward, "advantage": advantage if is_number else None, "weight": 1 / count}
        return [{"rollout_id": rollout.rollout_id, "step_ids": list(step_ids), **row} for step_ids in trained]

    async def load(self) -> None:
        """Import the library of the container in a thread (pyarrow takes 0.2 s). Raises BadRequest if it is missing."""
        if self.container.content_type not in _LOADED:
            await asyncio.to_thread(self.writer)
            _LOADED.add(self.container.content_type)

    def writer(self) -> Writer:
        """Return a writer for one export. Raises BadRequest where what it needs is not installed."""
        try:
            return self.container.writer(self.form)
        except ValueError as error:
            raise BadRequest(str(error), param="container") from None

    def pieces(self, rows: Iterable[Any], report: Mapping[str, Any]) -> Iterator[bytes]:
        """Write rows into their container one by one, and the report after them if it was requested."""
        writer = self.writer()
        yield writer.opening()
        yield from map(writer.row, rows)
        yield writer.closing(report if self.report else None)


def export_query_from(request: web.Request, advantages: Sequence[str] = GIVEN) -> ExportQuery:
    """Parse the options of a query. Raises BadRequest, which names the valid options."""
    form = FORMATS[enum_param(request, "format", FORMATS, "sequences")]
    chosen = {
        "branches": enum_param(request, "branches", BRANCHES, form.branches),
        "row_weight": enum_param(request, "row_weight", ROW_WEIGHTS, "full"),
        "include": enum_param(request, "include", ("exact", "flagged", RETOKENIZED), "exact"),
        "overlong": enum_param(request, "overlong", ("cut", "drop", "keep"), "cut"),
    }
    return ExportQuery(
        form=form,
        container=_container_from(request),
        options=Options(**cast("Any", chosen), max_len=int_param(request, "max_len", None, minimum=1)),
        fill=Fill(
            prompt_logprob=_float_param(request, "prompt_logprob"),
            pad_id=int_param(request, "pad_id", 0, minimum=0) or 0,
            prompt_length=int_param(request, "prompt_length", None, minimum=1),
            response_length=int_param(request, "response_length", None, minimum=1),
        ),
        advantage=enum_param(request, "advantage", advantages, "given"),
        report=enum_param(request, "report", ("true", "false"), "false") == "true",
    )


def export_query_from_claim(claim: ClaimBatch) -> ExportQuery:
    """Return the export options of a claim. Raises BadRequest for an unknown format."""
    if claim.format not in FORMATS:
        raise BadRequest(f"Unknown format {claim.format!r}; use one of {', '.join(FORMATS)}.", param="format")
    form = FORMATS[claim.format]
    return ExportQuery(
        form=form,
        container=CONTAINERS["json"],
        options=Options(
            branches=claim.branches or form.branches,
            include=claim.include,
            max_len=claim.max_len,
            overlong=claim.overlong,
            row_weight=claim.row_weight,
        ),
        fill=Fill(
            prompt_logprob=claim.prompt_logprob,
            pad_id=claim.pad_id,
            prompt_length=claim.prompt_length,
            response_length=claim.response_length,
        ),
        advantage=claim.advantage,
    )


def _container_from(request: web.Request) -> Container:
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


async def _retokenized(context: Context, steps: Sequence[Step]) -> list[Step]:
    """Return the steps; those without ids get them from the tokenizers of their endpoints. Raises UnprocessableRequest."""
    names = {step.engine.name for step in steps}
    tokenizers = {name: tokenizer for name in names if (tokenizer := await context.tokenizers.get(name)) is not None}

    def retokenize_all() -> list[Step]:
        return [
            retokenize(step, tokenizers[step.engine.name]) if step.engine.name in tokenizers else step for step in steps
        ]

    return await asyncio.to_thread(retokenize_all)
