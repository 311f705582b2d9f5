"""Error responses in vLLM 0.32's words; texts, types and params are from the cassettes `err_*`."""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError


class RequestError(Exception):
    """A request that the engine rejects; `body` is the response body in vLLM's form."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid_value(message: str, param: str | None = None, value: object = None) -> RequestError:
    """Return the error for a value of the right type that is not allowed; vLLM names the field after the sentence."""
    suffix = f" (parameter={param}{'' if value is None else f', value={value}'})" if param else ""
    return RequestError(message + suffix, param, kind="BadRequestError")


def validation_errors(problems: Sequence[object], param: str | None) -> RequestError:
    """Return the error for a body that fails validation, with all its problems."""
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    return RequestError("\n  ".join([f"{count}:", *map(str, problems)]), param, kind="Bad Request")


def missing_field(loc: str) -> RequestError:
    """Return the error for a required field that is missing."""
    return validation_errors([{"type": "missing", "loc": loc, "msg": "Field required", "input": "None"}], loc)


def invalid_json(error: orjson.JSONDecodeError) -> RequestError:
    """Return the error for a body that is not JSON."""
    loc = f"body.{error.pos}"
    problem = {
        "type": "json_invalid",
        "loc": loc,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": error.msg},
    }
    return validation_errors([problem], loc)


def invalid_fields(errors: ValidationError) -> RequestError:
    """Return the error for a body with missing fields or fields of the wrong type."""
    problems = []
    locs = []
    for error in errors.errors(include_url=False):
        # Inside a union pydantic's location also names the branch; vLLM's does not.
        head, *rest = error["loc"] or ("",)
        loc = ".".join(["body", str(head), *(str(part) for part in rest if isinstance(part, int))]).rstrip(".")
        locs.append(loc)
        problem = {"type": error["type"], "loc": loc, "msg": error["msg"], "input": _summary(error["input"])}
        problems.append(problem | ({"ctx": error["ctx"]} if "ctx" in error else {}))
    return validation_errors(problems, locs[0])


def _summary(value: Any) -> str:
    """Return a value as error messages show it: scalars in full, containers by their size."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def sglang_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response of SGLang, which is not nested."""
    return {"object": "error", "message": str(error), "type": error.kind, "param": None, "code": error.status}
