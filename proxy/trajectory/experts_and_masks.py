"""Experts and sampling masks in a record, which few choices have and which are large.

They are stored once, with the choice: as base64 in the response they would take as much space again.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.trajectory.arrays import Experts, Mask, ids_from_little_endian, to_little_endian, unpack_experts, unpack_mask
from proxy.trajectory.step import Choice

# The header of a .npy file with integers of three dimensions, as NumPy writes it: little-endian, or of one byte.
_NPY_HEADER: Final = re.compile(
    rb"\x93NUMPY[\x01-\x03]\x00.{2,4}?{'descr': '[<|]([iu])([1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), }",
    re.DOTALL,
)

# Their positions in a response's choice: object ("" is the choice itself) and field.
_EXPERTS: Final = (("", "routed_experts"), ("meta_info", "routed_experts"))  # vLLM 0.32, SGLang 0.5.23
_MASKS: Final = (("", "sampling_mask"), ("meta_info", "output_token_sampling_mask"))


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The experts of consecutive tokens. `shape`: of one token, the numbers of layers and experts or their product."""

    raw: bytes
    count: int
    shape: tuple[int, ...]
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        """Return them as JSON has them."""
        return {"dtype": self.dtype, "shape": [self.count, *self.shape], "data": b64encode(self.raw).decode()}


def expert_rows(experts: Experts | None, count: int) -> ExpertRows | None:
    """Return the experts of this many tokens; None if there are none, or not as many."""
    if experts is None or count <= 0 or not experts.raw:
        return None
    if experts.form == "int32" and len(experts.raw) % (4 * count) == 0:
        return ExpertRows(experts.raw, count, (len(experts.raw) // (4 * count),), "int32")
    header = _NPY_HEADER.match(experts.raw) if experts.form == "npy" else None
    if header is None:
        return None
    kind, size, fortran, *shape = (group.decode() for group in header.groups())
    start = 12 if experts.raw[6] > 1 else 10  # the length of the header has 2 bytes in version 1, then 4
    data = experts.raw[start + int.from_bytes(experts.raw[8:start], "little") :]
    tokens, layers, chosen = map(int, shape)
    if fortran == "True" or tokens != count or len(data) != count * layers * chosen * int(size) or not data:
        return None
    return ExpertRows(data, count, (layers, chosen), f"{'uint' if kind == 'u' else 'int'}{8 * int(size)}")


def join_experts(parts: Iterable[tuple[int, ExpertRows | None]]) -> ExpertRows | None:
    """Return the experts of a sequence, from parts with the position of their first token; None if they leave a gap.

    Where two parts overlap, the first one is taken.
    """
    raws: list[bytes] = []
    first, count = None, 0
    for start, rows in parts:
        if rows is None or not start <= count <= start + rows.count:
            return None
        first = first or rows
        if (rows.shape, rows.dtype) != (first.shape, first.dtype):
            return None
        raws.append(rows.raw[(count - start) * (len(rows.raw) // rows.count) :])
        count = start + rows.count
    return None if first is None else ExpertRows(b"".join(raws), count, first.shape, first.dtype)


def head_of(choice: Choice) -> dict[str, Any]:
    """Return the description of them in a record's head."""
    experts, mask = choice.routed_experts, choice.sampling_mask
    return {
        "experts": None if experts is None else [experts.form, len(experts.raw)],
        "mask": None if mask is None else [len(mask.ids), len(mask.offsets)],
    }


def bytes_of(choice: Choice) -> list[bytes]:
    """Return their bytes, in the order in which they are read."""
    experts, mask = choice.routed_experts, choice.sampling_mask
    arrays = [] if mask is None else [to_little_endian(mask.ids), to_little_endian(mask.offsets)]
    return arrays if experts is None else [experts.raw, *arrays]


def read_experts(head: Sequence[Any], take: Callable[[int], bytes]) -> Experts:
    """Return the experts with this description; `take` returns the next bytes."""
    form, size = head
    return Experts(form, take(size))


def read_mask(head: Sequence[Any], take: Callable[[int], bytes]) -> Mask:
    """Return the mask with this description."""
    ids, offsets = [ids_from_little_endian(take(4 * count)) for count in head]
    return Mask(ids, offsets)


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
    holder = given.get(within) if within and isinstance(given, dict) else given
    return holder if isinstance(holder, dict) else None
