"""Whether an engine gives ids and logprobs when asked, and what it was started without.

Holds the looking at one engine. A token or two are sampled.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import orjson

from proxy.cli.check.finding import Finding
from proxy.cli.check.network import find_engine, is_tokentape
from proxy.clock import SystemClock
from proxy.config.settings import Settings
from proxy.errors import EngineFault
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import InjectionRequest, Tokens
from proxy.upstream import Endpoint, Upstream

_TOLERATED_S: Final = 5  # an HTTP date is cut to seconds, and an answer takes its time


def check_clock(subject: str, theirs: float, ours: float) -> Iterator[Finding]:
    """A finding if two clocks differ, both in unix seconds."""
    ahead = theirs - ours
    if abs(ahead) > _TOLERATED_S:
        way = "ahead of" if ahead > 0 else "behind"
        seen = f"its clock is {abs(ahead):.0f} s {way} ours: times in steps and the ends of leases cannot be compared"
        yield Finding(subject, "note", seen, "set both clocks by NTP (timedatectl set-ntp true, or chrony)")


def read_date(header: str | None) -> float | None:
    """The unix second of a `Date` header; None without one that can be read."""
    try:
        return None if header is None else parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


_COMPLETIONS: Final = "/v1/completions"
_GENERATE: Final = "/inference/v1/generate"
_MOST_LOGPROBS: Final = 20  # OpenAI's API allows top_logprobs up to 20; vLLM's --max-logprobs is 20 unless it says less
_JSON: Final = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Said:
    """An engine's answer, read to its end."""

    status: int
    body: Any
    date: float | None


async def check_engine(
    upstream: Upstream, endpoint: Endpoint, settings: Settings, listed: dict[str, list[str]]
) -> AsyncIterator[Finding]:
    """What an engine is, and what is wrong with it. The models that it lists are added to `listed`, by its label."""
    subject = f"engine {endpoint.settings.url}"
    if await is_tokentape(endpoint.settings.url, settings):
        mend = "give the engine's own URL: two recording proxies in a row record every step twice"
        yield Finding(subject, "fault", "a TokenTape proxy answers there, not an engine", mend)
        return
    try:
        fault = await upstream.know(endpoint)
        if fault is not None:
            raise fault
        models = await _said(upstream, endpoint, "GET", "/v1/models", None)
        names = _names(models.body)
        if not names:
            yield await _no_models(subject, endpoint, models)
            return
        listed[endpoint.settings.label] = names
        for finding in check_clock(subject, models.date or SystemClock().now(), SystemClock().now()):
            yield finding
        yield await _check_tokens(upstream, endpoint, subject, names[0])
        if endpoint.kind == "vllm":
            async for finding in _check_flags(upstream, endpoint, subject, names[0]):
                yield finding
    except EngineFault as fault:
        yield await _away(subject, endpoint, endpoint.last_fault or str(fault))


async def _away(subject: str, endpoint: Endpoint, said: str) -> Finding:
    """An engine that cannot be reached, and where it is instead, if that can be found."""
    elsewhere = await find_engine(endpoint.settings.url)
    if elsewhere is not None:
        return Finding(subject, "fault", said, f"an engine answers at {elsewhere}: write that")
    if "CERTIFICATE_VERIFY_FAILED" in said or "certificate verify failed" in said:
        return Finding(subject, "fault", said, "name the authority that signed its certificate: engines.ca_file")
    return Finding(subject, "fault", said, "is it started, and does it listen on that host and port (--host 0.0.0.0)?")


async def _no_models(subject: str, endpoint: Endpoint, models: Said) -> Finding:
    """Something that answers, and lists no models."""
    if models.status in {401, 403}:
        has = "another" if endpoint.api_key else "its"
        return Finding(
            subject, "fault", f"it wants a key ({models.status})", f"give {has} key: engines.endpoints[].api_key"
        )
    seen = f"it lists no models: GET /v1/models gave {models.status}"
    elsewhere = await find_engine(endpoint.settings.url)
    if elsewhere is not None:
        return Finding(subject, "fault", seen, f"an engine answers at {elsewhere}: write that")
    mend = "this is no OpenAI-compatible engine: give the engine's base URL, such as http://127.0.0.1:8000"
    return Finding(subject, "fault", seen, mend)


async def _check_tokens(upstream: Upstream, endpoint: Endpoint, subject: str, model: str) -> Finding:
    """Sample one token, asked for in the engine's own way."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1}
    dialect = DIALECTS[_COMPLETIONS]
    ask = endpoint.engine.inject(InjectionRequest(dialect.name, body, dialect.response_options(body)))
    said = await _said(upstream, endpoint, "POST", _COMPLETIONS, {**body, **ask.fields})
    name = f"{endpoint.kind} {endpoint.version or 'of unknown version'}"
    if said.status != 200:
        seen = f"{name}: one token of {model!r} gave {said.status}: {_sentence(said.body)}"
        return Finding(subject, "fault", seen, "ask it by hand (curl) for a completion: agents will see the same")
    if endpoint.kind == "plain":
        mend = "nothing is exported for training of it: serve the policy with vLLM or SGLang"
        return Finding(subject, "note", f"{model!r} answers, as text: it is no engine we know", mend)
    try:
        tokens = endpoint.engine.tokens(dialect.name, body, said.body if isinstance(said.body, dict) else {})
    except (TypeError, KeyError, AttributeError):
        tokens = Tokens(None, ())
    if not tokens.choices or not all(choice.ids for choice in tokens.choices):
        mend = (
            f"update the engine: an old one passes over {', '.join(sorted(ask.fields))}; without ids no step is exact"
        )
        return Finding(subject, "fault", f"{name}: {model!r} answers without token ids", mend)
    if not all(choice.logprobs for choice in tokens.choices):
        mend = "update the engine; or set record.logprobs: off, if the trainer makes logprobs of its own"
        return Finding(subject, "fault", f"{name}: {model!r} answers with token ids and without logprobs", mend)
    return Finding(subject, "ok", f"{name}: {model!r} gives token ids and logprobs")


async def _check_flags(upstream: Upstream, endpoint: Endpoint, subject: str, model: str) -> AsyncIterator[Finding]:
    """What vLLM was started without, as far as its answers show it (0.32)."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1, "logprobs": _MOST_LOGPROBS}
    said = await _said(upstream, endpoint, "POST", _COMPLETIONS, body)
    if said.status == 400 and "max allowed" in _sentence(said.body):
        mend = f"start it with --max-logprobs {_MOST_LOGPROBS}, if agents ask for top_logprobs"
        yield Finding(subject, "note", _sentence(said.body), mend)
    body = {"model": model, "token_ids": [1], "sampling_params": {"max_tokens": 1}}
    said = await _said(upstream, endpoint, "POST", _GENERATE, body)
    if said.status in {403, 404}:
        mend = f"start it with --enable-scale-out, if anything calls {_GENERATE}; chat and completions need it not"
        yield Finding(subject, "note", "it takes no tokens in, tokens out", mend)


async def _said(upstream: Upstream, endpoint: Endpoint, method: str, path: str, body: Any) -> Said:
    text = None if body is None else orjson.dumps(body)
    async with upstream.send(endpoint, method, path, headers=_JSON if text else (), body=text) as answer:
        read = bytes(await answer.whole())
    return Said(answer.status, _parsed(read), read_date(answer.headers.get("Date")))


def _names(models: Any) -> list[str]:
    listed = models.get("data") if isinstance(models, dict) else None
    return [str(one["id"]) for one in listed or () if isinstance(one, dict) and "id" in one]


def _sentence(body: Any) -> str:
    """The sentence of a refusal, or the beginning of whatever it is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode("utf-8", "replace")
