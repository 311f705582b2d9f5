"""Scoring of token ids by an engine: one request per sequence, in the format of each engine type.

The caller passes a function that sends requests (`Send`), so that the command line and the server share this module.

Sources: vLLM 0.32.0, `prompt_logprobs` of /v1/completions (a null, then a map of id to logprob for each prompt token; 0 returns
the prompt's own tokens only, k the k most likely ones too; the temperature has no effect). SGLang 0.5.23, /generate with
`logprob_start_len: 0` (`[logprob, id, text]` for each, the first logprob null; `max_new_tokens: 0` only reads the prompt), and
with `top_logprobs_num: k` the same k times for each in `input_top_logprobs` (as verl 0.9.1 reads them). SGLang exits if a
prompt has an id beyond its vocabulary (on a CPU, run), but rejects a request that sets a bias for such an id. So the least and
the greatest id of a sequence get a bias of 0.

A response has a JSON object for each token: 10 MB for 128,000 tokens, and k + 1 times as much with the k most likely tokens.
Only objects at positions that are read become Python objects, one at a time in a thread, so that other threads can run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from math import exp, log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from proxy.errors import EngineResponseTooLarge
from proxy.protocols.engines.sglang import read_vocabulary_size

if TYPE_CHECKING:  # `tokentape audit` has a client of its own
    from proxy.upstream.client import Upstream
    from proxy.upstream.endpoint import Endpoint

# Method, path, JSON body -> status and body. Raises OSError or EngineError if the engine is unreachable.
Send = Callable[[str, str, Any], Awaitable[tuple[int, bytes]]]
Scores = list[float | None]

SCORING_KINDS = ("vllm", "sglang")
# Of a response, scanned in 100 ms: 400,000 tokens, or 25,000 with the 20 most likely ones.
MAX_BYTES: Final = 48 * 2**20
_MARGIN: Final = 16  # tokens more than twice a mask: other weights have another order of tokens
_NEGLIGIBLE: Final = 1e-4  # of a likelihood: engines differ by as much from themselves


class NotScored(Exception):
    """The engine responded without scores; the message is the reason."""


class TooLong(NotScored):
    """The sequence exceeds the engine's context window."""


class OtherVocabulary(NotScored):
    """The engine has no token for an id."""


@dataclass(slots=True)
class TokenScores:
    """The logprobs of some tokens of a sequence, in their order."""

    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)  # the same number for each token, the most likely one first
    top_logprobs: list[float] = field(default_factory=list)
    weight_version: str | None = None  # of the engine, if it reports one
    # Logprobs over masks that are too low, by the probability of tokens that the engine did not return.
    uncertain: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that truncated sampling kept at a position, and its temperature: recorded logprobs are over these tokens."""

    ids: Sequence[int]
    temperature: float = 1


NO_MASKS: Final[Mapping[int, Kept]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scorer:
    """An engine that scores ids."""

    send: Send
    kind: str
    model: str | None = None
    window: int | None = None  # its context window in tokens
    # It lists LoRA adapters. With --enable-lora, vLLM 0.32 on a CPU stops with an `einsum` error if it computes a scoring
    # request together with any other request (seen, whichever model is scored); on a GPU it does not (seen).
    has_adapters: bool = False

    async def score(self, ids: Sequence[int], masks: Mapping[int, Kept] = NO_MASKS) -> Scores:
        """Return the logprob of each id as `score_at`; None for the first, and for one beyond the longest prompt."""
        return (await self.score_all(ids, masks))[0]

    async def score_all(self, ids: Sequence[int], masks: Mapping[int, Kept] = NO_MASKS) -> tuple[Scores, str | None]:
        """Return the scores of `score`, and the version of the engine's weights if it reports one."""
        # A prompt must leave room for a token, and a sequence may have filled the window to its end.
        scored = ids[: self.window - 1] if self.window and len(ids) == self.window else ids
        found = await self.score_at(scored, range(1, len(scored)), masks=masks)
        version = None if found.weight_version == "default" else found.weight_version  # SGLang's, if none was set
        return [None, *found.logprobs, *[None] * (len(ids) - len(scored))], version

    async def score_at(
        self, ids: Sequence[int], positions: Sequence[int], top_k: int = 0, masks: Mapping[int, Kept] = NO_MASKS
    ) -> TokenScores:
        """Return the logprob of the id at each position, given the ids before it. No position may be 0.

        At the positions of `masks`, the logprob is over the tokens of the mask; for this, more of the most likely tokens are
        requested. Raises NotScored, OtherVocabulary, or TooLong if the sequence leaves no room in the context window.
        """
        if self.window and len(ids) >= self.window:
            raise TooLong(f"{len(ids)} token ids exceed the engine's context window of {self.window}")
        width = max(top_k, await asyncio.to_thread(_width, ids, masks)) if masks else top_k
        path, body = _request(self.kind, self.model, ids, width)
        status, answer = await self.send("POST", path, body)
        if status != 200:
            raise _refused(status, answer[:300].decode("utf-8", "replace"), len(ids))
        found = await asyncio.to_thread(_scores, self.kind, answer, ids, positions, width)
        return found if not masks else await asyncio.to_thread(_over_masks, found, ids, positions, top_k, width, masks)


def _width(ids: Sequence[int], masks: Mapping[int, Kept]) -> int:
    """Return how many likely tokens to request for masks, at most as many as the engine's vocabulary is known to have.

    SGLang 0.5.23 exits if more tokens are requested than its vocabulary has (on a CPU, run).
    """
    known = chain(ids, chain.from_iterable(kept.ids for kept in masks.values()))
    return min(1 + max(known), max(2 * len(kept.ids) + _MARGIN for kept in masks.values()))


def _over_masks(
    found: TokenScores, ids: Sequence[int], positions: Sequence[int], top_k: int, width: int, masks: Mapping[int, Kept]
) -> TokenScores:
    """Return scores with logprobs over the tokens of masks, and the `top_k` most likely of the `width` tokens.

    Raw logprobs differ from logits by a constant, which is the same for all tokens: scaled by the temperature and normalized
    over the kept tokens, they are the logprobs of the distribution that was sampled from.
    """
    scores = replace(found, logprobs=[], top_ids=[], top_logprobs=[])
    for at, position in enumerate(positions):
        top = slice(at * width, (at + 1) * width)
        likely, own = dict(zip(found.top_ids[top], found.top_logprobs[top], strict=True)), found.logprobs[at]
        kept = masks.get(position)
        if kept is not None:
            likely[ids[position]] = own
            known = [likely[token] for token in kept.ids if token in likely] or [own]
            scale, highest, least = 1 / (kept.temperature or 1), max(known), min(likely.values())
            total = sum(exp((value - highest) * scale) for value in known)
            rest = (len(kept.ids) - len(known)) * exp(min(0.0, (least - highest) * scale))  # each is at most as likely
            scores.uncertain += rest > _NEGLIGIBLE * total
            own = (own - highest) * scale - log(total + max(0.0, rest))
        scores.logprobs.append(own)
        scores.top_ids += found.top_ids[top][:top_k]
        scores.top_logprobs += found.top_logprobs[top][:top_k]
    return scores


def sender(
    upstream: "Upstream", endpoint: "Endpoint", *, is_auxiliary: bool = False, max_bytes: int = MAX_BYTES
) -> Send:
    """Return a function that sends requests to this endpoint. It raises EngineError if the engine is unreachable."""
    from proxy.upstream.client import JSON, body_of  # noqa: PLC0415 - see above

    async def send(method: str, path: str, body: Any) -> tuple[int, bytes]:
        text = None if body is None else await asyncio.to_thread(orjson.dumps, body)
        response = await upstream.send(endpoint, method, path, headers=JSON, body=text, is_auxiliary=is_auxiliary)
        with closing(response):
            try:
                return response.status, bytes(await body_of(response, max_bytes))
            except EngineResponseTooLarge:
                message = f"the engine's response has more than {max_bytes} bytes; request fewer likely tokens"
                raise TooLong(message) from None

    return send


def _refused(status: int, message: str, count: int) -> NotScored:
    if status == 400 and any(words in message for words in ("context length", "context window", "maximum length")):
        return TooLong(f"the engine rejected {count} token ids as too long: {message}")
    if status == 400 and (size := read_vocabulary_size(message)) is not None:
        return OtherVocabulary(f"it has {size} tokens, and an id is beyond these")
    if status == 400 and "vocab" in message:
        return OtherVocabulary(f"the engine rejected the token ids: {message}")
    return NotScored(f"the engine returned status {status} for the scoring request: {message}")


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
    has_adapters = any(entry.get("parent") is not None for entry in found)  # as vLLM 0.32 lists them
    return Scorer(send, kind, model or chosen.get("id"), window if type(window) is int else None, has_adapters)


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


def _request(kind: str, model: str | None, ids: Sequence[int], top_k: int) -> tuple[str, dict[str, Any]]:
    if kind == "vllm":
        # The one sampled token is discarded. With --return-sampling-mask, vLLM 0.32 returns 500 for a temperature of 0 and
        # for calls without a top_k (v1/engine/input_processor.py).
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 1, "top_k": 1, "prompt_logprobs": top_k}
        return "/v1/completions", {"model": model, **body} if model else body
    return "/generate", {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0, "logit_bias": {str(min(ids)): 0, str(max(ids)): 0}},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({"top_logprobs_num": top_k} if top_k else {}),
    }


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Entry(msgspec.Struct, gc=False):
    """The logprob of a token; its other fields are skipped."""

    logprob: float


class _Meta(msgspec.Struct):
    input_token_logprobs: list[msgspec.Raw]
    input_top_logprobs: list[msgspec.Raw] | None = None
    weight_version: Any = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


_COMPLETION: Final = msgspec.json.Decoder(_Completion)
_ENTRIES: Final = msgspec.json.Decoder(dict[str, _Entry])
_GENERATED: Final = msgspec.json.Decoder(_Generated)
_PAIR: Final = msgspec.json.Decoder(tuple[float | None, int, Any])
_PAIRS: Final = msgspec.json.Decoder(list[tuple[float, int, Any]])


def _scores(kind: str, answer: bytes, ids: Sequence[int], positions: Sequence[int], top_k: int) -> TokenScores:
    """Return the scores in a response. Raises NotScored if they do not match the ids."""
    read = _from_vllm if kind == "vllm" else _from_sglang
    try:
        return read(answer, ids, positions, top_k)
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError) as error:
        raise NotScored(f"the engine's response has no scores of the token ids: {error!r}") from error


def _from_vllm(answer: bytes, ids: Sequence[int], positions: Sequence[int], top_k: int) -> TokenScores:
    entries = _COMPLETION.decode(answer).choices[0].prompt_logprobs
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} scores for {len(ids)} token ids")
    found = TokenScores()
    for position in positions:
        entry = _ENTRIES.decode(entries[position])
        found.logprobs.append(entry[str(ids[position])].logprob)
        if top_k:
            _add_top(found, ((scored.logprob, int(token)) for token, scored in entry.items()), top_k)
    return found


def _from_sglang(answer: bytes, ids: Sequence[int], positions: Sequence[int], top_k: int) -> TokenScores:
    meta = _GENERATED.decode(answer).meta_info
    pairs = [_PAIR.decode(entry) for entry in meta.input_token_logprobs]
    # SGLang reports the last id of the vocabulary, GPT-2's end of text for instance, as 0 (0.5.23, run;
    # logprob_result_processor.py:53). Its logprob is right.
    last = max(ids)
    if any(scored != token and (scored, token) != (0, last) for (_, scored, _), token in zip(pairs, ids, strict=True)):
        raise ValueError("the engine scored other token ids")
    found = TokenScores(weight_version=meta.weight_version if isinstance(meta.weight_version, str) else None)
    for position in positions:
        found.logprobs.append(float(pairs[position][0]))  # type: ignore[arg-type]  # None raises TypeError
        if top_k:
            likely = _PAIRS.decode((meta.input_top_logprobs or ())[position])
            _add_top(found, ((logprob, token) for logprob, token, _ in likely), top_k)
    return found


def _add_top(found: TokenScores, likely: Iterable[tuple[float, int]], top_k: int) -> None:
    best = sorted(likely, reverse=True)[:top_k]
    if len(best) != top_k:
        raise ValueError(f"{len(best)} likely tokens at a position, {top_k} were requested")
    found.top_logprobs += [logprob for logprob, _ in best]
    found.top_ids += [token for _, token in best]
