"""`tokentape check`: reports problems of the configuration, the machine, the store and the engines, and how to fix them.

The checks change nothing. They generate one or two tokens with each engine.
"""

import asyncio
import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from logging import NullHandler
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import orjson
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.text import Text

from proxy.api.api_keys import MINTED_PREFIX, read_minted
from proxy.cli.console import print_json, print_lines, visible, visible_lines
from proxy.cli.runner import Exit
from proxy.cli.settings import InvalidSettings
from proxy.clock import Clock, SystemClock
from proxy.config.addresses import is_loopback, split_listen, without_secrets
from proxy.config.engines import EndpointSettings
from proxy.config.sections import StoreSettings
from proxy.config.settings import Settings
from proxy.errors import EngineError, ProxyError, UnprocessableRequest, failure_text
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.base import CallOptions, Tokens
from proxy.rollouts.scoring.rescoring import POLICY
from proxy.server.app import scoring_engines
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics, make_metrics
from proxy.trajectory.ratios import ratio_warnings, recorded_as
from proxy.trajectory.step import truncation_of
from proxy.upstream.client import Upstream, body_of
from proxy.upstream.endpoint import Endpoint
from proxy.upstream.tokenizers import load
from storage import open_store
from storage.errors import StorageError

Grade = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its grade, what was found (`seen`), and how to fix it (`fix`).

    A fault prevents or loses recorded steps, or allows unintended access. A note is a warning. A `check` exits
    with `exit_code` if all its faults have the same one.
    """

    subject: str
    grade: Grade
    seen: str
    fix: str = ""
    exit_code: Exit = Exit.FOUND


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Run all checks in the order of a start and yield their results."""
    runs = await proxy_runs(settings)
    for finding in [*check_listening(settings, runs=runs), *check_keys(settings)]:
        yield finding
    async for finding in check_store(settings.store, SystemClock(), runs=runs):
        yield finding
    if not settings.engines.endpoints:
        yield Finding("engines", "ok", "none configured; `serve` starts the simulator")
        return
    listed: dict[str, list[str]] = {}
    graded: list[Finding] = []
    metrics = make_metrics(CollectorRegistry())
    upstream = Upstream(settings.engines, metrics)
    try:
        for endpoint in upstream.endpoints:
            async for finding in check_engine(upstream, endpoint, settings, listed):
                graded.append(finding)
                yield finding
            if endpoint.settings.tokenizer:
                yield await check_tokenizer(endpoint.settings)
        async for finding in check_scorers(settings, upstream, metrics):
            yield finding
    finally:
        await upstream.close()
    if (fault := untrainable(graded, len(upstream.endpoints))) is not None:
        yield fault
    for finding in check_aliases(settings.models, listed):
        yield finding


_MARKS: Final = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "fault": ("FAIL", "bold red")}


async def print_findings(found: AsyncIterator[Finding], out: Console, *, as_json: bool) -> Exit:
    """Print the findings and return the exit code: DONE without faults, their code if they share one, else FOUND."""
    LOG.addHandler(NullHandler())  # findings repeat its messages about unreachable engines
    collected: list[Finding] = []
    async for finding in found:
        collected.append(finding)
        if not as_json:
            _print(finding, out)
    codes = {finding.exit_code for finding in collected if finding.grade == "fault"}
    code = Exit.FOUND if len(codes) > 1 else next(iter(codes), Exit.DONE)
    if as_json:
        print_json({"well": not codes, "exit_code": code, "findings": [asdict(finding) for finding in collected]})
    return code


async def refused(error: InvalidSettings) -> AsyncIterator[Finding]:
    """Yield a fault for each invalid setting."""
    for name, problem in error.faults:
        yield Finding(name or "configuration", "fault", problem, "see docs/settings.md for all settings")


def _print(finding: Finding, out: Console) -> None:
    first, *more = visible_lines(finding.seen)
    lines = [Text.assemble(_MARKS[finding.grade], " ", (visible(finding.subject), "bold"), ": ", first)]
    lines += [Text(f"     {line}") for line in more]
    lines += [Text(f"     -> {visible(finding.fix)}")] if finding.fix else []
    print_lines(out, lines, indent=8)


FILES_PER_CALL: Final = 2  # the agent's connection and the one to the engine
OTHER_FILES: Final = 128  # the process itself, and connections to the control API
DEFAULT_CALLS: Final = 1000  # concurrent calls if the configuration has no limit
REQUEST_TIMEOUT_S: Final = 3


def check_listening(settings: Settings, *, runs: bool) -> Iterator[Finding]:
    """Check the addresses, the open file limit and the journal. `runs`: a proxy with this configuration is running."""
    yield _address("listen", settings.listen, runs=runs)
    if settings.control.listen is not None:
        yield _address("control.listen", settings.control.listen, runs=runs)
    yield from check_files(settings)
    yield from check_spool(settings)


async def proxy_runs(settings: Settings) -> bool:
    """Return whether a TokenTape control API responds at the configured address."""
    host, port = split_listen(settings.control.listen or settings.listen)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - for comparison only
    scheme = "http" if settings.listen_tls.cert_file is None else "https"
    if port == 0:
        return False
    return await _is_proxy(f"{scheme}://{f'[{local}]' if ':' in local else local}:{port}")


def _address(name: str, listen: str, *, runs: bool) -> Finding:
    host, port = split_listen(listen)
    scope = "reachable from this machine only" if is_loopback(host) else "reachable from other machines"
    if port == 0:
        return Finding(name, "ok", f"{listen}: any free port; {scope}")
    error = _bind_error(host, port)
    if error is None:
        return Finding(name, "ok", f"{listen} is free; {scope}")
    if runs:
        fix = "no action is needed if it is the expected proxy"
        return Finding(name, "note", f"{listen} is in use by a running TokenTape proxy", fix)
    fix = f"stop the program that uses the port, or choose another address of this machine ({name})"
    code = Exit.ADDRESS_IN_USE if error.errno == errno.EADDRINUSE else Exit.FOUND
    return Finding(name, "fault", f"cannot listen on {listen}: {failure_text(error)}", fix, code)


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check that the open file limit is sufficient for the maximum number of concurrent calls."""
    try:
        import resource  # not available on Windows
    except ImportError:
        return
    limits = [endpoint.max_in_flight for endpoint in settings.engines.endpoints]
    known = [limit for limit in limits if limit is not None]
    is_limited = bool(limits) and len(known) == len(limits)
    calls, queued = (sum(known), settings.engines.max_queued) if is_limited else (DEFAULT_CALLS, 0)
    needed = calls * FILES_PER_CALL + queued + settings.store.max_connections + OTHER_FILES
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which `serve` raises the soft limit
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Finding("open files", "ok", f"the limit of {limit} is sufficient for {calls + queued} concurrent calls")
        return
    source = "allowed by max_in_flight and max_queued" if is_limited else "typical of a busy proxy"
    seen = f"the limit is {limit}; {calls + queued} concurrent calls ({source}) need about {needed}"
    fix = f"run ulimit -Hn {needed} as root, or set LimitNOFILE= in the systemd unit"
    yield Finding("open files", "note", seen, fix)


def check_spool(settings: Settings) -> Iterator[Finding]:
    """Check that the journal for steps during a store outage can be written."""
    if settings.store.on_failure != "spool":
        return
    path = settings.store.spool_path
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    error = None
    if path.is_dir():
        error = "it is a folder and must be a file"
    elif not folder.is_dir():
        error = f"{folder} is not a folder"
    elif path.exists() and not os.access(path, os.R_OK | os.W_OK):
        error = "permission denied"
    elif not os.access(folder, os.W_OK | os.X_OK):
        error = f"permission denied on {folder}"
    if error is None:
        yield Finding("spool", "ok", f"{path} is writable")
    else:
        fix = "grant this user write access, or set store.spool_path to a file on a persistent disk"
        yield Finding("spool", "fault", f"cannot write {path}: {error}", fix)


async def _is_proxy(url: str) -> bool:
    """Return whether a TokenTape control API responds at a URL, which requires no key for its state."""
    return {"status", "store", "engines"} <= (await _get_object(f"{url}/ready")).keys()


async def _get_object(url: str) -> dict[str, Any]:
    """Return the JSON object of a response; {} for anything else."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(url, ssl=False, allow_redirects=False) as response,
        ):
            body = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


MIN_LENGTH: Final = 16  # characters; 64 bits if they are random hexadecimal digits
MIN_DISTINCT: Final = 6  # characters
_COMMON: Final = (
    "changeme", "change-me", "secret", "password", "example", "your-key", "your_key", "test-key", "a-key", "12345",
)  # fmt: skip
_NEW_KEY: Final = 'generate one with python3 -c "import secrets; print(secrets.token_urlsafe(32))"'


def check_keys(settings: Settings) -> Iterator[Finding]:
    """Check the keys of both APIs."""
    agents = [key.get_secret_value() for key in settings.agents.api_keys]
    control = [key.get_secret_value() for key in settings.control.api_keys]
    sections = (("agents", agents, settings.listen), ("control", control, settings.control.listen or settings.listen))
    public = {name for name, _, listen in sections if not is_loopback(split_listen(listen)[0])}
    bare = [(name, listen) for name, keys, listen in sections if name in public and not keys]
    if settings.insecure and bare:
        names = " and ".join(f"{name}.api_keys" for name, _ in bare)
        seen = f"{bare[0][1]} requires no key: {names} {'are' if len(bare) > 1 else 'is'} empty"
        yield Finding("keys", "note", seen, f"set {names}, or restrict network access")
    if agents and not control and "control" not in public:
        listen = settings.control.listen or settings.listen
        seen = f"the control API at {listen} requires no key, and agents have keys (control.api_keys is empty)"
        fix = "set control.api_keys: an agent on this machine could set its reward, and read and delete all rollouts"
        yield Finding("keys", "note", seen, fix)
    if set(agents) & set(control):
        fix = "use separate keys for the control API; with this one, every agent can read and delete all rollouts"
        yield Finding("keys", "fault", "a key is in both agents.api_keys and control.api_keys", fix)
    for section, keys, _ in sections:
        for index, key in enumerate(keys):
            name = f"{section}.api_keys[{index}]"
            if key in keys[:index]:
                fix = "remove the duplicate, so that removing the key revokes it"
                yield Finding("keys", "note", f"{name} is a duplicate", fix)
            elif read_minted(key) is not None:
                seen = f"{name} has the prefix of rollout keys ({MINTED_PREFIX}…) and is treated as one"
                yield Finding("keys", "fault", seen, f"use a key that does not start with {MINTED_PREFIX}")
            elif _is_weak(key):
                seen = f"{name} is weak: it is short, repetitive or common"
                yield Finding("keys", "fault" if section in public else "note", seen, _NEW_KEY)


def _is_weak(key: str) -> bool:
    has_common = len(key) < 2 * MIN_LENGTH and any(word in key.lower() for word in _COMMON)
    return len(key) < MIN_LENGTH or len(set(key)) < MIN_DISTINCT or has_common


MAX_CLOCK_DIFFERENCE_S: Final = 5  # HTTP dates have whole seconds, and a response takes time


def check_clock(subject: str, theirs: float, ours: float) -> Iterator[Finding]:
    """Compare two clocks, in unix seconds."""
    ahead = theirs - ours
    if abs(ahead) > MAX_CLOCK_DIFFERENCE_S:
        direction = "ahead of" if ahead > 0 else "behind"
        seen = f"its clock is {abs(ahead):.0f} s {direction} ours, so timestamps and lease expiry cannot be compared"
        yield Finding(subject, "note", seen, "synchronize both clocks with NTP (timedatectl set-ntp true, or chrony)")


_EMBEDDED: Final = "embedded:"
_IN_USE: Final = "is in use by process"  # in the message of storage.embedded.server


async def check_store(settings: StoreSettings, clock: Clock, *, runs: bool = False) -> AsyncIterator[Finding]:
    """Check the store. `runs`: a proxy with this configuration is already running."""
    subject = f"store {without_secrets(settings.url)}"
    try:
        with _url_without_traces(settings.url) as url:
            store = await open_store(url, settings.options())
            try:
                ours = clock.now()
                facts, warnings = await store.info(), await store.warnings()
            finally:
                await store.close()
        if url != settings.url:
            facts["servers"] = "not created yet"
    except (StorageError, ValueError, OSError) as error:
        if runs and _IN_USE in str(error):
            fix = "no action is needed if that is the running proxy; GET /ready reports its state"
            yield Finding(subject, "note", str(error), fix)
            return
        yield Finding(subject, "fault", failure_text(error), _store_fix(settings.url, str(error)))
        return
    for finding in check_clock(subject, float(facts.pop("clock_s")), ours):
        yield finding
    for warning in warnings:
        yield Finding(subject, "fault" if warning.can_lose_data else "note", warning.problem, warning.fix)
    if not any(warning.can_lose_data for warning in warnings):
        yield Finding(subject, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))


@contextmanager
def _url_without_traces(url: str) -> Iterator[str]:
    """Yield the URL; for an embedded store that does not exist yet, the URL of a temporary one beside it.

    A start creates the store; a check only finds out whether a start can. Raises OSError if the folder cannot be created.
    """
    path = Path(url.removeprefix(_EMBEDDED)).expanduser()
    if not url.startswith(_EMBEDDED) or os.path.lexists(path):
        yield url
        return
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=".tokentape-check-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield f"{_EMBEDDED}{folder}/{path.name}"


def _store_fix(url: str, seen: str) -> str:
    if "is a replica" in seen:
        return "set store.url to an address that accepts writes"
    if seen.startswith("durability"):
        return "change the server configuration, or choose a lower store.durability (see docs/reliability.md)"
    if url.startswith(_EMBEDDED) and _IN_USE not in seen:
        return "choose a path that this user can create and write to (store.url)"
    if url.startswith(_EMBEDDED):
        return "only one process can open an embedded store: stop the other one, or choose another path (store.url)"
    if "auth" in seen.lower() or "NOPERM" in seen or "WRONGPASS" in seen:
        return "set store.username and store.password (TOKENTAPE_STORE__PASSWORD)"
    return "check that the server is running and reachable from here; see store.* in docs/settings.md"


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
    url = endpoint.settings.url
    subject = f"engine {url}"
    if await is_tokentape(url, settings):
        fix = "use the URL of the engine; two recording proxies in a row record every step twice"
        yield Finding(subject, "fault", "this is a TokenTape proxy, not an engine", fix)
        return
    try:
        fault = await upstream.ensure_detected(endpoint)
        if fault is not None:
            raise fault
        models = await _request(upstream, endpoint, "GET", "/v1/models", None)
        if names := model_names(models.body):
            listed[endpoint.label] = names
            for finding in check_clock(subject, models.date or SystemClock().now(), SystemClock().now()):
                yield finding
            yield await _check_tokens(upstream, endpoint, subject, names[0])
            async for finding in _check_options(upstream, endpoint, settings, names[0]):
                yield finding
            return
        if models.status in {401, 403}:
            problem = "rejects the API key" if endpoint.settings.api_key else "requires an API key"
            yield Finding(subject, "fault", f"{problem} ({models.status})", "set engines.endpoints[].api_key")
            return
        seen = f"lists no models: GET /v1/models returned {models.status}"
        fix = "use the base URL of an OpenAI-compatible engine, e.g. http://127.0.0.1:8000"
    except EngineError as error:
        seen = endpoint.last_fault or str(error)
        fix = "check that it is running and listens on that host and port (--host 0.0.0.0)"
        if "CERTIFICATE_VERIFY_FAILED" in seen or "certificate verify failed" in seen:
            fix = "set engines.ca_file to the authority that signed its certificate"
    other_url = await find_engine(url)
    yield Finding(subject, "fault", seen, fix if other_url is None else f"use {other_url}, where an engine responds")


async def _check_tokens(upstream: Upstream, endpoint: Endpoint, subject: str, model: str) -> Finding:
    """Generate one token with the parameters that the proxy would inject: a completion, or if that fails a chat."""
    name = f"{endpoint.kind} {endpoint.version or 'of unknown version'}"
    path, only_chat = _COMPLETIONS, ""
    body, injected, response = await _generate(upstream, endpoint, path, model)
    if response.status != 200:
        seen = f"{name}: a completion of {model!r} returned {response.status}: {error_text(response.body)}"
        path, only_chat = _CHAT, f" (chat only: a completion returned {response.status})"
        body, injected, response = await _generate(upstream, endpoint, path, model)
        if response.status != 200:
            return Finding(subject, "fault", seen, "request a completion with curl; agents get the same error")
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


async def _check_options(
    upstream: Upstream, endpoint: Endpoint, settings: Settings, model: str
) -> AsyncIterator[Finding]:
    """Report flags and sampling defaults with which calls fail or train wrongly."""
    subject = f"engine {endpoint.settings.url}"
    if endpoint.kind == "vllm":
        async for finding in _check_flags(upstream, endpoint, subject, model):
            yield finding
    for finding in check_ratios(endpoint, settings):
        yield finding


def check_ratios(endpoint: Endpoint, settings: Settings) -> Iterator[Finding]:
    """Report why importance ratios of calls that set no sampling parameters are wrong, as far as the defaults are known."""
    if settings.record.logprobs == "off":
        return
    rules = settings.sampling
    mode = endpoint.settings.logprobs_mode or endpoint.engine.logprobs_mode
    sampling = {"logprobs_mode": mode, **endpoint.sampling_defaults, **rules.default, **rules.override}
    has_mask = endpoint.kind == "sglang" and settings.record.sampling_masks and "top_k" in truncation_of(sampling)
    if has_mask:
        sampling["logprobs_mode"] = "processed_logprobs"
    recorded = recorded_as(endpoint.label, endpoint.kind, sampling, has_mask=has_mask)
    for warning in ratio_warnings({recorded: 1}):
        seen = f"tokens of calls that set no sampling parameters have wrong importance ratios: {warning.why}"
        yield Finding(f"engine {endpoint.settings.url}", "note", seen, warning.fix)


async def _generate(
    upstream: Upstream, endpoint: Endpoint, path: str, model: str
) -> tuple[Mapping[str, Any], Mapping[str, Any], Response]:
    """Generate one token; return the body without injected fields, those fields, and the response."""
    prompt = {"prompt": "hi"} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    body: dict[str, Any] = {"model": model, **prompt, "max_tokens": 1}
    dialect = DIALECTS[path]
    options = CallOptions(traits=endpoint.known(), requested=dialect.response_options(body))
    injected = endpoint.engine.inject(dialect.name, body, options).fields
    return body, injected, await _request(upstream, endpoint, "POST", path, {**body, **injected})


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
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        parsed = content.decode("utf-8", "replace")
    return Response(answer.status, parsed, read_date(answer.headers.get("Date")))


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


async def find_engine(url: str) -> str | None:
    """Return a similar base URL (other scheme, no path) that lists models, or None."""
    parts = urlsplit(url)
    schemes = (parts.scheme, "https" if parts.scheme == "http" else "http")
    candidates = [f"{scheme}://{parts.netloc}{path}" for scheme in schemes for path in dict.fromkeys((parts.path, ""))]
    for candidate in candidates[1:]:
        if isinstance((await _get_object(f"{candidate}/v1/models")).get("data"), list):
            return candidate
    return None


async def is_tokentape(url: str, settings: Settings) -> bool:
    """Return whether the URL is a TokenTape proxy: this configuration's own address, or a running one."""
    own = [split_listen(listen) for listen in (settings.listen, settings.control.listen) if listen]
    parts = urlsplit(url)
    is_own = any(parts.port == port and parts.hostname in {host, "localhost", "127.0.0.1"} for host, port in own)
    return is_own or await _is_proxy(url)


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
