"""What a simulated engine refuses, in vLLM's words.

Holds the one exception and the checks that need no tokenizer; sentences, types and params are those of vLLM
0.32 (cassettes `err_*`).
"""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError


class RefusedError(Exception):
    """A request that the engine does not take; `body` is the whole answer."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_value(message: str, param: str | None = None, value: object = None) -> RefusedError:
    """A value that is well formed but not allowed; vLLM names the field at the end of the sentence."""
    named = f" (parameter={param}{'' if value is None else f', value={value}'})" if param else ""
    return RefusedError(message + named, param, kind="BadRequestError")


def no_model(model: str, served: str) -> RefusedError:
    """A model that is not served."""
    message = f"The model `{model}` does not exist. Valid aliases: {served}."
    return RefusedError(message, "model", status=404, kind="NotFoundError")


def scale_out_disabled() -> RefusedError:
    """A route that the engine was not told to offer."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return RefusedError(message, status=403, kind="PermissionDeniedError")


def not_readable(problems: Sequence[object], param: str | None) -> RefusedError:
    """A body that cannot be read as a request at all."""
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    return RefusedError("\n  ".join([f"{count}:", *map(str, problems)]), param, kind="Bad Request")


def missing(loc: str) -> RefusedError:
    """Something that must be there and is not."""
    return not_readable([{"type": "missing", "loc": loc, "msg": "Field required", "input": "None"}], loc)


def not_json(fault: orjson.JSONDecodeError) -> RefusedError:
    """A body that is not JSON."""
    loc = f"body.{fault.pos}"
    problem = {
        "type": "json_invalid",
        "loc": loc,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": fault.msg},
    }
    return not_readable([problem], loc)


def not_valid(fault: ValidationError) -> RefusedError:
    """A body whose fields are missing or of the wrong type."""
    problems = []
    locs = []
    for error in fault.errors(include_url=False):
        # Of a place inside a union pydantic names the branches too; vLLM does not.
        head, *rest = error["loc"] or ("",)
        loc = ".".join(["body", str(head), *(str(part) for part in rest if isinstance(part, int))]).rstrip(".")
        locs.append(loc)
        problem = {"type": error["type"], "loc": loc, "msg": error["msg"], "input": _outline(error["input"])}
        problems.append(problem | ({"ctx": error["ctx"]} if "ctx" in error else {}))
    return not_readable(problems, locs[0])


def _outline(value: Any) -> str:
    """A value in an error message: scalars as they are, containers by their size."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
