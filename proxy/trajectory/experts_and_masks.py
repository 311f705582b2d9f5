"""Experts and sampling masks in a record, which few choices have and which are large.

They are stored once, with the choice: as base64 in the response they would take as much space again.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.trajectory.arrays import ids_from_little_endian, to_little_endian, unpack_experts, unpack_mask
from proxy.trajectory.step import Choice, Experts, Mask

# Their positions in a response's choice: object ("" is the choice itself) and field.
_EXPERTS: Final = (("", "routed_experts"), ("meta_info", "routed_experts"))  # vLLM 0.32, SGLang 0.5.23
_MASKS: Final = (("", "sampling_mask"), ("meta_info", "output_token_sampling_mask"))


def head_of(choice: Choice) -> dict[str, Any]:
    """Return the description of them in a record's head."""
    experts, mask = choice.routed_experts, choice.sampling_mask
    return {
        "experts": None if experts is None else [experts.form, len(experts.raw)],
        "mask": None if mask is None else [len(mask.ids), len(mask.offsets)],
    }


def bytes_of(choice: Choice) -> list[bytes]:
    """Return their bytes, in the order in which `read` reads them."""
    experts, mask = choice.routed_experts, choice.sampling_mask
    arrays = [] if mask is None else [to_little_endian(mask.ids), to_little_endian(mask.offsets)]
    return arrays if experts is None else [experts.raw, *arrays]


def read(choice: Choice, head: Mapping[str, Any], take: Callable[[int], bytes]) -> Choice:
    """Return the choice with them. A head of schema 1 has none."""
    experts_head, mask_head = head.get("experts"), head.get("mask")
    if experts_head is not None:
        form, size = experts_head
        choice = replace(choice, routed_experts=Experts(form, take(size)))
    if mask_head is not None:
        ids, offsets = [ids_from_little_endian(take(4 * count)) for count in mask_head]
        choice = replace(choice, sampling_mask=Mask(ids, offsets))
    return choice


def left_out(
    response: Mapping[str, Any] | None, choices: tuple[Choice, ...]
) -> tuple[Mapping[str, Any] | None, list[list[Any]]]:
    """Return the response with null for the values that its choices contain, and the positions of these for `put_back`."""
    given = response.get("choices") if isinstance(response, dict) else None
    if response is None or not isinstance(given, list):
        return response, []
    shown, again = list(given), []
    for position, choice in enumerate(choices[: len(given)]):
        for within, name, value in _values(choice):
            holder = _holder(shown[position], within)
            # Compare as JSON, in which 1, 1.0 and true differ.
            if holder is None or holder.get(name) is None or orjson.dumps(holder[name]) != orjson.dumps(value):
                continue
            lighter = {**holder, name: None}
            shown[position] = {**shown[position], within: lighter} if within else lighter
            again.append([position, within, name])
    return ({**response, "choices": shown}, again) if again else (response, [])


def put_back(response: Any, again: list[list[Any]], choices: tuple[Choice, ...]) -> None:
    """Undo `left_out` in place, in a response that is not shared."""
    for position, within, name in again:
        given = response["choices"][position]
        (value,) = [value for *where, value in _values(choices[position]) if where == [within, name]]
        (given[within] if within else given)[name] = value


def _values(choice: Choice) -> list[tuple[str, str, Any]]:
    """Return the positions where an engine may have repeated the choice's experts and mask, with the original value."""
    found = []
    if choice.routed_experts is not None:
        experts = unpack_experts(choice.routed_experts)
        found += [(within, name, experts) for within, name in _EXPERTS]
    if choice.sampling_mask is not None:
        mask = unpack_mask(choice.sampling_mask)
        found += [(within, name, mask) for within, name in _MASKS]
    return found


def _holder(given: Any, within: str) -> dict[str, Any] | None:
    """Return the object of a response's choice that may have the field; None if there is none."""
    holder = given.get(within) if within and isinstance(given, dict) else given
    return holder if isinstance(holder, dict) else None
