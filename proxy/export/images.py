"""The images of rows: their names with the places of their placeholders, or references by which a trainer fetches them."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from proxy.export.base import COUNT, TEXT, Column
from proxy.export.sequence_view import RowSource
from proxy.trajectory.images import PlacedImage, block_of, placed, recorded
from proxy.trajectory.sequence import Row
from proxy.trajectory.step import Step

PLACED: list[Column] = [{"image": TEXT, "start": COUNT, "length": COUNT}]
REFERENCES: list[Column] = [TEXT]


def images_in(row: Row, steps: Mapping[str, Step]) -> list[PlacedImage]:
    """Return the images of a row in order: those of the newest call, whose prompt the row begins with."""
    step = steps[row.spans[-1].step_id]
    return placed(step, step.prompts[0])


def placed_json(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return the field of a row with these images; no field without images."""
    return {"images": [image._asdict() for image in images]} if images else {}


def references(row: Row, source: RowSource) -> list[str]:
    """Return for each image of a row the path at which TokenTape has it, or its URL if the engine fetched it."""
    rollout = quote(source.facts.rollout_id, safe="")
    names = recorded(source.steps[row.spans[-1].step_id])
    return [name if block_of(name) is None else f"/rollouts/{rollout}/images/{name}" for name in names]
