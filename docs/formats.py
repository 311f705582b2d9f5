"""Generates docs/formats.md: every export format with the fields of its rows and their types, from the formats themselves."""

import sys
from collections.abc import Iterator

from proxy.export import FORMATS, Format
from proxy.export.base import Batched, Column, Columns, Fill
from proxy.export.containers import CONTAINERS

_OPENING = """\
Every format is a view of `sequences` or of `steps`; nothing is retokenized, padded or filled in unless documented below. If a
format cannot express a rollout, the response is 409 with the reason; an export of many rollouts skips and reports it. A
missing or null field is unknown. A *batch* is an object of lists with one entry per row; other formats return lists of rows.

- **Reward** and **advantage** are what a row has a place for; a reward is optional unless "required". *row*: the rollout's,
  also where steps have rewards. *step*: the sum of its tokens', or else the rollout's. *token*: a step's reward is at its last
  token, and the rollout's at the very last, if the last step has none. *turn*: formats without a place for advantages of turns
  reject `advantage=step`, `vine` and `discount`; in claims, `advantages` has them.
- `branches` is the default of this parameter, else `all`. `one`: the trainer takes one row for each rollout, and a forked
  rollout is refused. `longest` and `last` drop the other rows, for each policy; `dropped_tokens` in `skipped` counts their
  trained tokens.
- `row_weight=split` divides the rollout's reward and advantage by the number of its rows, but not those of steps or tokens.
- `inherited` is for [playbacks](playback.md#exports). `prompt`: a row begins with the prompt of its first live token. `masked`:
  with the rollout's first prompt, and inherited tokens have mask 0 and no logprob; rows of one turn are those of `prompt`.
  `trained`: as sampled. A row without a live token is skipped with the reason `inherited`.
- Steps of different [policies](policies.md) never join, nor, with `threads`, of different [threads](threads.md). Rows of
  `sequences` and `steps` name both (the policy unless it is `default`).
"""


def formats_page(made: str) -> str:
    """Return the page."""
    sections = "\n".join("\n".join(_format(form, _first_of_module(form))) for form in FORMATS.values())
    return f"# Export formats\n\n{made}{_OPENING}\n{sections}\n" + "\n".join([*_scores(), *_containers()]) + "\n"


def _first_of_module(form: Format) -> Format:
    return next(other for other in FORMATS.values() if type(other).__module__ == type(form).__module__)


def _format(form: Format, first: Format) -> Iterator[str]:
    kind = type(form)
    about = (sys.modules[kind.__module__].__doc__ or "").strip()
    yield f"## `{form.name}`\n"
    if form is first:
        yield f"{about}\n"
    yield f"{_text(kind.__doc__)}{' A batch.' if isinstance(form, Batched) else ''} {_requirements(form)}\n"
    if form is not first and form.columns == first.columns:
        yield "The fields are the same.\n"
        return
    yield f"Fields: {_typed(form.columns, '`')}.\n"


def _requirements(form: Format) -> str:
    """Return where a row has reward and advantage, what the format requires, and its default for `branches`."""
    places = [_REWARD_PLACES[form.reward_place], _REWARDS[form.reward]]
    reward = ", ".join(place for place in places if place not in ("none", "optional")) or "none"
    branches = "" if form.branches == "all" else f" `branches`: {form.branches}."
    return f"Reward: {reward}. Advantage: {_ADVANTAGE_PLACES[form.advantage_place]}.{branches}"


_REWARDS = {"required": "required", "uniform": "of all rollouts of a group, or of none", "optional": "optional"}
_REWARD_PLACES = {"none": "none", "rollout": "row", "turn": "step", "token": "token"}
_ADVANTAGE_PLACES = {"none": "none", "rollout": "row", "turn": "turn", "token": "turn or token"}


_SCORES = """## Scores of another engine

The fields that [`rescore`](http-api.md#scores-of-another-engine) adds. Formats that are not listed have no place for them and
are rejected. Only trained tokens have values; others have null in `sequences`, zeros (`ref_logprobs` of `scored_data`: 1.0)
elsewhere.

| format | `rescore=policy` | another scorer | `rescore_top_k` |
|---|---|---|---|"""


def _scores() -> Iterator[str]:
    yield _SCORES
    for name, form in FORMATS.items():
        if form.scored:
            places = (form.scored.get("proximal"), form.scored.get("teacher"), form.likely.get("teacher"))
            yield f"| `{name}` | {' | '.join(_fields(place, form) for place in places)} |"
    yield ""


def _fields(columns: "Columns | None", form: Format) -> str:
    """Return the names of the columns that scores add."""
    names = []
    for name, column in (columns or {}).items():
        plain = form.columns.get(name)
        if isinstance(column, dict) and isinstance(plain, dict):
            names += [f"`{name}.{inner}`" for inner in column if inner not in plain]
        else:
            names.append(f"`{name}`")
    return ", ".join(names) or "none"


def _containers() -> Iterator[str]:
    yield "## Containers\n"
    yield "Set `container=` or `Accept`. In `parquet` and `arrow`, fields of type json are JSON text.\n"
    yield "| container | content type | description |\n|---|---|---|"
    for name, container in CONTAINERS.items():
        yield f"| `{name}` | `{container.content_type}` | {_text(container.__doc__)} |"
    yield f"\n## Fills\n\n{_text((Fill.__doc__ or '').partition(' `decode`')[0])}"


def _text(doc: str | None) -> str:
    return " ".join((doc or "").split())


def _typed(columns: Columns, quote: str = "") -> str:
    """Return names before their types, each type once."""
    by_type: dict[str, list[str]] = {}
    for name, column in columns.items():
        by_type.setdefault(_type(column), []).append(f"{quote}{name}{quote}")
    return "; ".join(f"{', '.join(names)}: {kind}" for kind, names in by_type.items())


def _type(column: Column) -> str:
    if isinstance(column, list):
        return f"[{_type(column[0])}]"
    return f"{{{_typed(column)}}}" if isinstance(column, dict) else column
