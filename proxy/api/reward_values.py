"""Types of rewards and advantages: finite numbers within the range of float32.

Trainers store rewards as float32: larger numbers would be infinite there, and JSON has no infinity.
"""

from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, Field, FiniteFloat

from proxy.api.body import read_body
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.rollouts.stored_fields import LARGEST, check_numbers

_NO_NUMBERS: Final = ("NaN", "Infinity")  # as JavaScript and Python write them; JSON has neither


Signal = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
Signals = Annotated[dict[str, Any], AfterValidator(check_numbers)]


def read_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a body that may have rewards.

    Raises:
        UnprocessableRequest: a number is NaN, infinite, or too large for a float.
        BadRequest: the body is not a JSON object for another reason.
    """
    try:
        return read_body(text)
    except BadRequest:
        if _has_non_finite_number(text):
            raise UnprocessableRequest(
                "A number in the request body is NaN, infinite or too large for a float."
            ) from None
        raise


def _has_non_finite_number(text: bytes) -> bool:
    """Return whether a body is invalid JSON because a number is NaN or infinite. orjson 3.11 rejects 1e400 as infinity."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return "infinity" in error.msg or error.doc.startswith(_NO_NUMBERS, error.pos)
    return False
