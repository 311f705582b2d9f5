"""The `Dialect` protocol, and the fields of a request body that dialects share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import orjson

from proxy.errors import ProxyError
from proxy.protocols.accumulators import Accumulator
from proxy.trajectory import step

DialectName: TypeAlias = step.Dialect
# Those of the endpoints that sample from ids without a chat template, with the parameters in `sampling_params`.
GENERATES: Final = frozenset[DialectName]({"generate", "sglang_generate"})


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client requests to receive, from its body.

    `samples` is the number of choices per prompt and `choices` the total number (prompts times samples);
    both are None if the body does not determine them reliably.
    """

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False
    samples: int | None = 1
    choices: int | None = 1


class ErrorDialect(Protocol):
    """The format of a client's errors, whether engines support its dialect or not."""

    name: DialectName

    def error(self, error: ProxyError) -> bytes:
        """Return the response body of an error of TokenTape. The response has the status of the error, in every dialect."""
        ...


class Dialect(ErrorDialect, Protocol):
    """A client protocol that engines support, too. What a dialect does not define is as in OpenAI's.

    `prompt_field`: the field of a body with its text, messages or ids. `accumulator` makes one for a streamed call.
    """

    prompt_field: str
    accumulator: type[Accumulator]

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Return what the client requests to receive."""
        ...

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a body with the sampling parameters: its top level."""
        return body

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return the prompts of a body with token ids, to compare with the engine's; None if its prompts are text."""
        return None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the top-level fields to set, and those to remove, that change a body's `sampling` as given."""
        return dict(fields), set(unset)

    def read_body(self, body: Any) -> dict[str, Any] | None:
        """Return an unstreamed response as an object with `choices`; None if it is no response of this dialect."""
        return body if isinstance(body, dict) and isinstance(body.get("choices"), list) else None

    def write_body(self, response: Mapping[str, Any]) -> Any:
        """Return the JSON body of a response with `choices`."""
        return response

    def error(self, error: ProxyError) -> bytes:
        """Return OpenAI's error body."""
        return openai_error(error)


# As in pydantic 2, which vLLM and SGLang parse bodies with.
_FALSE_STRINGS = frozenset({"0", "off", "f", "false", "n", "no"})


def is_on(value: Any) -> bool:
    """Return whether a flag is on. Values other than absent, null and false count as on: the engine validates them."""
    return value.lower() not in _FALSE_STRINGS if isinstance(value, str) else value not in (None, False)


def sample_count(body: Mapping[str, Any]) -> int | None:
    """Return the number of samples per prompt: `n`, 1 if it is absent, None if it is not a positive integer."""
    n = body.get("n")
    if n is None:
        return 1
    return n if type(n) is int and n > 0 else None


def requested_usage(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a stream was requested with usage, and with usage in each event."""
    options = body.get("stream_options")
    if not isinstance(options, dict) or not is_on(options.get("include_usage")):
        return False, False
    return True, is_on(options.get("continuous_usage_stats"))


def openai_error(error: ProxyError) -> bytes:
    """Return OpenAI's error body."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )


def engine_message(text: str) -> str:
    """Return the message of an engine's error in any known format; the text itself if it is in none."""
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    for name in ("error", "message", "detail"):  # nested as vLLM's and llama.cpp's, flat as SGLang's, FastAPI's own
        if isinstance(body, dict) and name in body:
            body = body[name]
    return body if isinstance(body, str) else text
