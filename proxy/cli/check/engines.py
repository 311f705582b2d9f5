"""Checks of engines: token IDs and logprobs, the clock, missing flags, models that aliases name, tokenizers, scorers."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from proxy.cli.check.machine import Finding, check_clock, get_object, session
from proxy.cli.runner import Exit
from proxy.clock import SystemClock
from proxy.config.addresses import split_listen
from proxy.config.engines import EndpointSettings
from proxy.config.settings import Settings
from proxy.errors import EngineError, ProxyError, UnprocessableRequest
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.base import CallOptions, Tokens
from proxy.rollouts.scoring.rescoring import POLICY
from proxy.server.app import scoring_engines
from proxy.telemetry.metrics import Metrics
from proxy.upstream import Endpoint, Upstream
from proxy.upstream.client import body_of
from proxy.upstream.tokenizers import load


def read_date(header: str | None) -> float | None:
    """Return the unix time in seconds of a `Date` header, or None if it is missing or invalid."""
    try:
        return None if header is None else parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_GENERATE: Final = "/inference/v1/generate"
MAX_ERROR_CHARACTERS: Final = 300
MAX_LOGPROBS: Final = 20  # OpenAI's maximum of top_logprobs, and the default of vLLM's --max-logprobs
_JSON: Final = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response of an engine."""

    status: int
    body: Any
    date: float | None


async def check_engine(
    upstream: Upstream, endpoint: Endpoint, settings: Settings, listed: dict[str, list[str]]
) -> AsyncIterator[Finding]:
    """Check an engine and add the models that it lists to `listed`, by its label."""
    subject = f"engine {endpoint.settings.url}"
    if await is_tokentape(endpoint.settings.url, settings):
        fix = "use the URL of the engine; two recording proxies in a row record every step twice"
        yield Finding(subject, "fault", "this is a TokenTape proxy, not an engine", fix)
        return
    try:
        fault = await upstream.ensure_detected(endpoint)
        if fault is not None:
            raise fault
        models = await _request(upstream, endpoint, "GET", "/v1/models", None)
        names = model_names(models.body)
        if not names:
            yield await _no_models(subject, endpoint, models)
            return
        listed[endpoint.label] = names
        for finding in check_clock(subject, models.date or SystemClock().now(), SystemClock().now()):
            yield finding
        yield await _check_tokens(upstream, endpoint, subject, names[0])
        if endpoint.kind == "vllm":
            async for finding in _check_flags(upstream, endpoint, subject, names[0]):
                yield finding
    except EngineError as fault:
        yield await _unreachable(subject, endpoint, endpoint.last_fault or str(fault))


async def _unreachable(subject: str, endpoint: Endpoint, error: str) -> Finding:
    """Report an unreachable engine, and its URL if a similar one responds."""
    other_url = await find_engine(endpoint.settings.url)
    if other_url is not None:
        return Finding(subject, "fault", error, f"use {other_url}, where an engine responds")
    if "CERTIFICATE_VERIFY_FAILED" in error or "certificate verify failed" in error:
        return Finding(subject, "fault", error, "set engines.ca_file to the authority that signed its certificate")
    return Finding(
        subject, "fault", error, "check that it is running and listens on that host and port (--host 0.0.0.0)"
    )


async def _no_models(subject: str, endpoint: Endpoint, models: Response) -> Finding:
    if models.status in {401, 403}:
        problem = "rejects the API key" if endpoint.settings.api_key else "requires an API key"
        return Finding(subject, "fault", f"{problem} ({models.status})", "set engines.endpoints[].api_key")
    seen = f"lists no models: GET /v1/models returned {models.status}"
    other_url = await find_engine(endpoint.settings.url)
    if other_url is not None:
        return Finding(subject, "fault", seen, f"use {other_url}, where an engine responds")
    fix = "use the base URL of an OpenAI-compatible engine, e.g. http://127.0.0.1:8000"
    return Finding(subject, "fault", seen, fix)


async def _check_tokens(upstream: Upstream, endpoint: Endpoint, subject: str, model: str) -> Finding:
    """Generate one token with the parameters that the proxy would inject: a completion, or if that fails a chat."""
    name = f"{endpoint.kind} {endpoint.version or 'of unknown version'}"
    path, body, injected, response = await _generate(upstream, endpoint, _COMPLETIONS, model)
    only_chat = ""
    if response.status != 200:
        chat = await _generate(upstream, endpoint, _CHAT, model)
        if chat[-1].status != 200:
            seen = f"{name}: a completion of {model!r} returned {response.status}: {error_text(response.body)}"
            return Finding(subject, "fault", seen, "request a completion with curl; agents get the same error")
        only_chat = f" (chat only: a completion returned {response.status})"
        path, body, injected, response = chat
    if not endpoint.engine.returns_ids:
        fix = "its steps cannot be exported for training; serve the policy with vLLM or SGLang"
        seen = f"unknown engine type: {model!r} returns text without token IDs{only_chat}"
        return Finding(subject, "note", seen, fix, Exit.UNTRAINABLE)
    try:
        content = response.body if isinstance(response.body, dict) else {}
        tokens = endpoint.engine.tokens(DIALECTS[path].name, body, content)
    except (TypeError, KeyError, AttributeError):
        tokens = Tokens(None, ())
    if not tokens.choices or not all(choice.ids for choice in tokens.choices):
        ignored = ", ".join(sorted(injected))
        fix = f"update the engine: old versions ignore {ignored}; no step is exact without token IDs"
        return Finding(subject, "fault", f"{name}: {model!r} returns no token IDs", fix, Exit.UNTRAINABLE)
    if not all(choice.logprobs for choice in tokens.choices):
        fix = "update the engine, or set record.logprobs: off if the trainer computes logprobs itself"
        return Finding(subject, "fault", f"{name}: {model!r} returns token IDs but no logprobs", fix)
    return Finding(subject, "ok", f"{name}: {model!r} returns token IDs and logprobs{only_chat}")


async def _generate(
    upstream: Upstream, endpoint: Endpoint, path: str, model: str
) -> tuple[str, Mapping[str, Any], Mapping[str, Any], Response]:
    """Generate one token; return the path, the body without injected fields, those fields, and the response."""
    prompt = {"prompt": "hi"} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    body: dict[str, Any] = {"model": model, **prompt, "max_tokens": 1}
    dialect = DIALECTS[path]
    options = CallOptions(traits=endpoint.known(), requested=dialect.response_options(body))
    injection = endpoint.engine.inject(dialect.name, body, options)
    return path, body, injection.fields, await _request(upstream, endpoint, "POST", path, {**body, **injection.fields})


def untrainable(findings: Sequence[Finding], engines: int) -> Finding | None:
    """Return a fault if no engine returns token IDs and no finding reports that as a fault."""
    without_ids = [finding for finding in findings if finding.exit_code is Exit.UNTRAINABLE]
    if len(without_ids) < engines or any(finding.grade == "fault" for finding in without_ids):
        return None
    seen = "no engine returns token IDs: calls are recorded as text, and no step can be exported for training"
    return Finding("training", "fault", seen, "serve the policy with vLLM, SGLang or llama.cpp", Exit.UNTRAINABLE)


async def _check_flags(upstream: Upstream, endpoint: Endpoint, subject: str, model: str) -> AsyncIterator[Finding]:
    """Report flags that vLLM (0.32) was started without, as its responses show."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1, "logprobs": MAX_LOGPROBS}
    response = await _request(upstream, endpoint, "POST", _COMPLETIONS, body)
    if response.status == 400 and "max allowed" in error_text(response.body):
        fix = f"start it with --max-logprobs {MAX_LOGPROBS} if agents request top_logprobs"
        yield Finding(subject, "note", error_text(response.body), fix)
    body = {"model": model, "token_ids": [1], "sampling_params": {"max_tokens": 1}}
    response = await _request(upstream, endpoint, "POST", _GENERATE, body)
    if response.status in {403, 404}:
        fix = f"start it with --enable-scale-out if clients call {_GENERATE}; chat and completions work without it"
        yield Finding(subject, "note", "the token-in, token-out endpoint is disabled", fix)


async def _request(upstream: Upstream, endpoint: Endpoint, method: str, path: str, body: Any) -> Response:
    text = None if body is None else orjson.dumps(body)
    with closing(await upstream.send(endpoint, method, path, headers=_JSON if text else (), body=text)) as answer:
        content = bytes(await body_of(answer))
    return Response(answer.status, _parse(content), read_date(answer.headers.get("Date")))


def model_names(models: Any) -> list[str]:
    """Return the names in a list of models; [] for a response that is none."""
    listed = models.get("data") if isinstance(models, dict) else None
    entries = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    return [model["id"] for model in entries if isinstance(model.get("id"), str)]


def error_text(body: Any) -> str:
    """Return the message of an engine's error response, or the start of its body."""
    for _ in range(3):  # {"error": {"message": …}}, {"message": …}, {"detail": …}
        if isinstance(body, dict):
            body = body.get("error", body.get("message", body.get("detail", str(body))))
    return str(body)[:MAX_ERROR_CHARACTERS]


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode("utf-8", "replace")


async def find_engine(url: str) -> str | None:
    """Return a similar base URL (other scheme, no path) that lists models, or None."""
    parts = urlsplit(url)
    schemes = (parts.scheme, "https" if parts.scheme == "http" else "http")
    candidates = [f"{scheme}://{parts.netloc}{path}" for scheme in schemes for path in dict.fromkeys((parts.path, ""))]
    async with session() as http:
        for candidate in candidates[1:]:
            listed = await get_object(http, f"{candidate}/v1/models")
            if isinstance(listed.get("data"), list):
                return candidate
    return None


async def is_tokentape(url: str, settings: Settings) -> bool:
    """Return whether the URL is a TokenTape proxy: this configuration's own address, or a running one."""
    own = [split_listen(listen) for listen in (settings.listen, settings.control.listen) if listen]
    parts = urlsplit(url)
    if any(parts.port == port and parts.hostname in {host, "localhost", "127.0.0.1"} for host, port in own):
        return True
    async with session() as http:
        info = (await get_object(http, f"{url}/openapi.json")).get("info")
    return isinstance(info, dict) and info.get("title") == "TokenTape"


def check_aliases(models: Mapping[str, str], listed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Check that the engines serve the models that aliases refer to. `listed` has the models of each engine."""
    every = sorted({name for names in listed.values() for name in names})
    for alias, served in models.items():
        without = [label for label, names in listed.items() if served not in names]
        subject = f"models {alias!r}"
        if not every:
            continue  # no engine responded; other findings report it
        if len(without) == len(listed):
            fix = f"use a model that the engines list ({', '.join(every)}), or start one with --served-model-name"
            yield Finding(subject, "fault", f"refers to {served!r}, which no engine lists", fix)
        elif without:
            seen = f"refers to {served!r}, which {', '.join(without)} does not list"
            fix = "calls routed there return 404; serve the model on every engine, or remove the engine"
            yield Finding(subject, "note", seen, fix)
        else:
            yield Finding(subject, "ok", f"refers to {served!r}")


async def check_tokenizer(endpoint: EndpointSettings) -> Finding:
    """Check that the tokenizer of an endpoint loads."""
    subject = f"tokenizer {endpoint.tokenizer}"
    try:
        await asyncio.to_thread(load, endpoint.tokenizer or "")
    except UnprocessableRequest as error:
        fix = "use a folder that contains tokenizer.json, or the name of a model on the Hugging Face Hub"
        return Finding(subject, "fault", error.message, "" if "pip install" in error.message else fix)
    return Finding(subject, "ok", f"loads, for {endpoint.label}")


async def check_scorers(settings: Settings, upstream: Upstream, metrics: Metrics) -> AsyncIterator[Finding]:
    """Check one engine of each scorer. `upstream` has the engines of calls, which have checks of their own."""
    for name, engines in scoring_engines(settings, upstream, metrics).items():
        if name == POLICY:
            continue
        subject = f"scorer {name}"
        try:
            yield Finding(subject, "ok", f"scores token ids with {await engines.find_model()!r}")
        except ProxyError as error:
            yield Finding(subject, "fault", error.message, f"fix rescore.scorers.{name}, or its engine")
        finally:
            await engines.upstream.close()
