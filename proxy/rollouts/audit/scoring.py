"""Scoring of token ids by an engine: one request per sequence, in the format of each engine type.

The caller passes a function that sends requests (`Send`), so that the command line and the server share this module.

Sources: vLLM 0.32.0, `prompt_logprobs` of /v1/completions (a null, then a map of id to logprob for each prompt token; 0 returns
the prompt's own tokens only; the temperature has no effect). SGLang 0.5.23, /generate with `logprob_start_len: 0`
(`[logprob, id, text]` for each, the first logprob null; `max_new_tokens: 0` only reads the prompt).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

# Method, path, JSON body -> status and body. Raises OSError or EngineError if the engine is unreachable.
Send = Callable[[str, str, Any], Awaitable[tuple[int, bytes]]]
Scores = list[float | None]

SCORING_KINDS = ("vllm", "sglang")


class NotScored(Exception):
    """The engine responded without scores; the message is the reason."""


class TooLong(NotScored):
    """The sequence exceeds the engine's context window."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """An engine that scores ids. `window` is its context window in tokens, None if unknown."""

    send: Send
    kind: str
    model: str | None = None
    window: int | None = None

    async def score(self, ids: Sequence[int]) -> Scores:
        """Return the logprob of each id given those before it; None for the first, and for one beyond the longest prompt.

        Raises NotScored, or TooLong if the sequence exceeds the context window.
        """
        # A prompt must leave room for a token, and a sequence may have filled the window to its end.
        scored = ids[: self.window - 1] if self.window and len(ids) == self.window else ids
        if self.window and len(scored) >= self.window:
            raise TooLong(f"{len(ids)} token ids exceed the engine's context window of {self.window}")
        path, body = _request(self.kind, self.model, scored)
        status, answer = await self.send("POST", path, body)
        if status != 200:
            message = answer[:300].decode("utf-8", "replace")
            if status == 400 and any(
                words in message for words in ("context length", "context window", "maximum length")
            ):
                raise TooLong(f"the engine rejected {len(ids)} token ids as too long: {message}")
            raise NotScored(f"the engine returned status {status} for the scoring request: {message}")
        scores = await asyncio.to_thread(_scores, self.kind, answer, scored)  # megabytes of JSON for a long sequence
        return [*scores, *[None] * (len(ids) - len(scored))]


async def find_scorer(send: Send, kind: str | None, model: str | None) -> Scorer:
    """Return a scorer with the engine's type, model and context window. Raises NotScored if it cannot score."""
    kind = kind or await _kind(send)
    if kind not in SCORING_KINDS:
        raise NotScored(f"engine kind {kind!r} cannot score token ids; use one of {', '.join(SCORING_KINDS)}")
    listed = await _json(send, "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    found = [entry for entry in models or () if isinstance(entry, dict)]
    chosen = next((entry for entry in found if model in {None, entry.get("id")}), None)
    if model is not None and found and chosen is None:
        names = ", ".join(str(entry.get("id")) for entry in found)
        raise NotScored(f"the engine does not serve model {model!r}; it serves {names}")
    chosen = chosen or {}
    window = chosen.get("max_model_len")
    return Scorer(send, kind, model or chosen.get("id"), window if type(window) is int else None)


async def _kind(send: Send) -> str:
    """Return the engine type: vLLM has /version (and /server_info in development mode); SGLang has /server_info."""
    version = await _json(send, "/version")
    if isinstance(version, dict) and "version" in version:
        return "vllm"
    for path in ("/server_info", "/get_server_info"):
        if isinstance(await _json(send, path), dict):
            return "sglang"
    raise NotScored("the engine was not detected as vLLM or SGLang; if it is one of them, pass --engine-kind")


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
    """Return the scores in a response. Raises NotScored if they are not those of the ids."""
    try:
        response = orjson.loads(answer)
        scores = _from_vllm(response, ids) if kind == "vllm" else _from_sglang(response, ids)
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise NotScored(f"the engine's response has no scores of the token ids: {error!r}") from error
    return [None, *scores]


def _from_vllm(response: Any, ids: Sequence[int]) -> list[float]:
    entries = response["choices"][0]["prompt_logprobs"]
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)]


def _from_sglang(response: Any, ids: Sequence[int]) -> list[float]:
    entries = response["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != list(ids):
        raise ValueError("the engine scored other token ids")
    return [float(entry[0]) for entry in entries[1:]]
