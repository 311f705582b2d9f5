"""Cassettes, which are requests and responses recorded from real engines, and how tests play them to an exchange."""

import ast
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import orjson

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions, Traits, has_running_usage
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import Plan, PreparedPlan, prepare
from proxy.trajectory.step import EngineFacts, Step, Timing

CASSETTES = Path(__file__).parent.parent / "cassettes"
ROOTS = {
    "vllm": CASSETTES / "vllm-0.32",
    "sglang": CASSETTES / "sglang-0.5.23",
    "llamacpp": CASSETTES / "llamacpp-2026.10",
}
# Folders that group the cases of a set. A cassette's name does not contain them; it is unique without.
TOPICS = ("chat", "completions", "errors", "generate", "midway", "options", "routes", "stops", "tools")
FACTS = {
    "vllm": EngineFacts("e", "vllm", "0.32.0", "http://e"),
    "sglang": EngineFacts("e", "sglang", "0.5.23", "http://e"),
    "llamacpp": EngineFacts("e", "llamacpp", "b0-unknown", "http://e"),
}


@dataclass(frozen=True)
class Cassette:
    """One recorded exchange with an engine of a kind. `response` is the body as the engine sent it."""

    name: str
    path: str
    body: dict
    response: bytes
    status: int
    content_type: str
    kind: str = "vllm"
    headers: dict | None = None

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    def __str__(self) -> str:
        return self.name


CONTENT_TYPES = {".json": "application/json", ".sse": "text/event-stream; charset=utf-8", ".txt": "text/plain"}


def find(name: str, suffix: str, kind: str = "vllm") -> Path:
    """Return the path of a cassette's file: `recorded/chat_stop_s_inj` has its file in `recorded/stops`.

    Raises:
        FileNotFoundError: the cassette does not exist.
    """
    base = ROOTS[kind] / name
    for topic in ("", *TOPICS):
        path = base.parent / topic / f"{base.name}{suffix}"
        if path.exists():
            return path
    raise FileNotFoundError(base)


def name_from(path: Path, kind: str = "vllm") -> str:
    """Return the name of the cassette that a file belongs to: its path without the topic and the suffixes."""
    folder = path.relative_to(ROOTS[kind]).parent
    case = re.sub(r"\.(http|(request|response|meta)\.\w+)$", "", path.name)
    return str((folder.parent if folder.name in TOPICS else folder) / case)


def load(name: str, kind: str = "vllm") -> Cassette:
    """Load the cassette of this name, such as `pairs_hermes/chat_eos_n_inj`, of an engine of this kind."""
    path = find(name, ".request.json", kind)
    request = orjson.loads(path.read_bytes())
    response = next(path.parent.glob(f"{path.name.removesuffix('.request.json')}.response.*"))
    meta = path.with_name(path.name.replace(".request.", ".meta."))
    status = orjson.loads(meta.read_bytes())["status"] if meta.exists() else 200
    content_type = CONTENT_TYPES[response.suffix]
    sent, received = request.get("body"), response.read_bytes()
    return Cassette(name, request["path"], sent, received, status, content_type, kind, request.get("headers"))


def names(pattern: str = "*", kind: str = "vllm") -> list[str]:
    """Return the names of all cassettes that match, sorted. They are unique."""
    found = [name_from(path, kind) for path in ROOTS[kind].rglob("*.request.json")]
    assert len(found) == len(set(found)), f"two topics have a case of the same name: {ROOTS[kind]}"
    return sorted(fnmatch.filter(found, pattern))


def load_http(kind: str, name: str) -> Cassette:
    """Load a cassette of llama.cpp that has request and response in one file."""
    request, _, after_request = find(name, ".http", kind).read_text("utf-8").partition("\n=== RESPONSE ")
    head, _, body = request.partition("\n\n")
    status, _, response = after_request.partition("\n\n")
    extra = re.search(r"extra headers: (\{.*\})", head)
    stream = response.lstrip().startswith(("data:", "event:"))
    return Cassette(
        name=name,
        path=head.split()[1],
        body=_body(body),
        response=(response if stream else response.rstrip("\n")).encode(),
        status=int(status.split()[0]),
        content_type=CONTENT_TYPES[".sse" if stream else ".json"],
        kind=kind,
        headers=ast.literal_eval(extra[1]) if extra else None,
    )


def _body(text: str) -> dict | None:
    """Return the request's body; None if there is none or if only a part of it was recorded."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


@cache
def http_cassettes(kind: str) -> tuple[Cassette, ...]:
    """Load every cassette of llama.cpp that has request and response in one file, in a native dialect."""
    names = sorted(name_from(path, kind) for path in ROOTS[kind].rglob("*.http"))
    found = [load_http(kind, name) for name in names if name != "native_emoji_stream"]  # a response without its request
    return tuple(cassette for cassette in found if cassette.path in DIALECTS and cassette.body is not None)


@cache
def dialect_cassettes(kind: str = "vllm") -> tuple[Cassette, ...]:
    """Load every cassette in a native dialect that has a JSON body."""
    found = [load(name, kind) for name in names(kind=kind)]
    return tuple(cassette for cassette in found if cassette.path in DIALECTS and cassette.body is not None)


def plan_of(path: str, body: dict, terms: CallOptions | None = None, **named) -> Plan:
    """Return the plan of a call. See `prepared_of`."""
    return prepared_of(path, body, terms, **named).for_call(body, step_id="S1", rollout_id="r1")


def prepared_of(
    path: str,
    body: dict,
    terms: CallOptions | None = None,
    *,
    kind: str = "vllm",
    traits: Traits | None = None,
    headers: dict | None = None,
    logprobs_mode: str | None = None,
) -> PreparedPlan:
    """Return the prepared plan of a call. An engine of a kind that is not in FACTS has no version."""
    facts = FACTS.get(kind) or EngineFacts("e", kind, None, "http://e")
    traits = traits or Traits(kind, facts.version)
    return prepare(
        body,
        endpoint=path,
        options=replace(terms or CallOptions(), traits=traits, headers=headers or {}),
        engine=ENGINES[kind].for_traits(traits),
        engine_facts=facts,
        logprobs_mode=logprobs_mode,
    )


def play(
    plan: Plan, cassette: Cassette, reads: Iterable[bytes] | None = None, *, found: object = None
) -> tuple[bytes, bytes, Step]:
    """Feed a response; return the bytes for the client, the withheld end, and the step. `found` is the result of a
    lookup. Usage in each event is expected if the recorded request has it.
    """
    is_counted = plan.view.are_choices_counted and has_running_usage(cassette.body)
    plan = replace(plan, view=replace(plan.view, are_choices_counted=is_counted))
    exchange = Exchange(plan, cassette.status, cassette.content_type)
    shown = b"".join([exchange.response.feed(read) for read in ([cassette.response] if reads is None else reads)])
    if exchange.missing()[1] is not None:
        exchange.follow_up_response = found
    outcome = exchange.finish(Timing(received=1.0))
    return shown, outcome.end, outcome.step


def cut(text: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Split the bytes into pieces of these sizes, plus the rest."""
    pieces, position = [], 0
    for size in sizes:
        pieces.append(text[position : position + size])
        position += size
    return [*pieces, text[position:]]


# Only in one of the two framings, or different between any two runs.
VOLATILE = ("id", "created", "usage", "prompt_text", "prompt_logprobs", "metrics")


def comparable(value: object) -> object:
    """Return a response without nulls, empty texts and empty lists, and without what differs between any two runs."""
    if isinstance(value, dict):
        kept = {key: comparable(inner) for key, inner in value.items() if key not in VOLATILE}
        return {key: inner for key, inner in kept.items() if inner not in (None, "", [], {})}
    return [comparable(inner) for inner in value] if isinstance(value, list) else value
