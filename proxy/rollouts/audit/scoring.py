"""How an engine is asked to score ids: one request per sequence, each kind in its own words.

Holds the requests, where the scores are in the answers, and how to find out what an engine is. It opens no connection: what
sends is given (`Send`), so that the command line and the server ask in one way.

Sources: vLLM 0.32.0, `prompt_logprobs` of /v1/completions (a null, then a map of id to logprob for each prompt token; 0 asks
for the prompt's own tokens alone; the temperature plays no part). SGLang 0.5.23, /generate with `logprob_start_len: 0`
(`[logprob, id, text]` for each, the first logprob null; `max_new_tokens: 0` only reads the prompt).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

# Method, path, JSON body -> status and body. Raises OSError or an EngineFault if nobody answers.
Send = Callable[[str, str, Any], Awaitable[tuple[int, bytes]]]
Scores = list[float | None]

SCORING_KINDS = ("vllm", "sglang")


class NotScored(Exception):
    """The engine answered, and gave no scores; the sentence says why."""


class TooLong(NotScored):
    """The engine's window is too small for the sequence."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """An engine that scores ids. `window` is its longest sequence, if it says so."""

    send: Send
    kind: str
    model: str | None = None
    window: int | None = None

    async def score(self, ids: Sequence[int]) -> Scores:
        """The logprob of each id after those before it; None for the first, and for what does not fit in a prompt.

        Raises NotScored, or TooLong if it does not fit at all.
        """
        # A prompt must leave room for a token, and a sequence may have filled the window to its end.
        asked = ids[: self.window - 1] if self.window and len(ids) == self.window else ids
        if self.window and len(asked) >= self.window:
            raise TooLong(f"{len(ids)} ids are more than the engine's window of {self.window}")
        path, body = _request(self.kind, self.model, asked)
        status, answer = await self.send("POST", path, body)
        if status != 200:
            said = answer[:300].decode("utf-8", "replace")
            if status == 400 and any(words in said for words in ("context length", "context window", "maximum length")):
                raise TooLong(f"the engine finds {len(ids)} ids too long: {said}")
            raise NotScored(f"the engine answered {status} when asked to score: {said}")
        scores = await asyncio.to_thread(_scores, self.kind, answer, asked)  # some megabytes of JSON for a long one
        return [*scores, *[None] * (len(ids) - len(asked))]


async def find_scorer(send: Send, kind: str | None, model: str | None) -> Scorer:
    """What the engine is, which model it serves and how long a sequence may be. Raises NotScored if it cannot score."""
    kind = kind or await _kind(send)
    if kind not in SCORING_KINDS:
        raise NotScored(f"the engine's kind {kind!r} cannot score ids: it must be one of {', '.join(SCORING_KINDS)}")
    listed = await _json(send, "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    found = [one for one in models or () if isinstance(one, dict)]
    chosen = next((one for one in found if model in {None, one.get("id")}), None)
    if model is not None and found and chosen is None:
        names = ", ".join(str(one.get("id")) for one in found)
        raise NotScored(f"the engine does not serve {model!r}; it serves {names}")
    chosen = chosen or {}
    window = chosen.get("max_model_len")
    return Scorer(send, kind, model or chosen.get("id"), window if type(window) is int else None)


async def _kind(send: Send) -> str:
    """vLLM answers /version (and /server_info too, in its development mode); SGLang answers /server_info."""
    version = await _json(send, "/version")
    if isinstance(version, dict) and "version" in version:
        return "vllm"
    for path in ("/server_info", "/get_server_info"):
        if isinstance(await _json(send, path), dict):
            return "sglang"
    raise NotScored("the engine is neither vLLM nor SGLang, as far as it says; if it is, give --engine-kind")


async def _json(send: Send, path: str) -> Any:
    status, answer = await send("GET", path, None)
    try:
        return orjson.loads(answer) if status == 200 else None
    except orjson.JSONDecodeError:
        return None


def _request(kind: str, model: str | None, ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
    if kind == "vllm":
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return "/v1/completions", {"model": model, **body} if model else body
    return "/generate", {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _scores(kind: str, answer: bytes, ids: Sequence[int]) -> Scores:
    """The scores in an answer. Raises NotScored if they are not those of the ids."""
    try:
        told = orjson.loads(answer)
        scores = _of_vllm(told, ids) if kind == "vllm" else _of_sglang(told, ids)
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise NotScored(f"the engine's answer holds no scores of the ids sent: {error!r}") from error
    return [None, *scores]


def _of_vllm(told: Any, ids: Sequence[int]) -> list[float]:
    entries = told["choices"][0]["prompt_logprobs"]
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)]


def _of_sglang(told: Any, ids: Sequence[int]) -> list[float]:
    entries = told["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != list(ids):
        raise ValueError("it scored other ids")
    return [float(entry[0]) for entry in entries[1:]]
