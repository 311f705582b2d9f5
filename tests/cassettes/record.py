"""Record cassettes: send a literal table of requests to a running engine, and store its responses as files.

Run it as `make cassettes ENGINE=http://127.0.0.1:8000`. Each request is sent unstreamed and streamed (`n`, `s`), as a
client sends it and with the fields that the proxy injects (`plain`, `inj`): `chat_stop_s_inj` is the streamed call with
injected fields. So every case gives two twins, and two pairs that test stripping. Existing names are kept, except with
`--force`. The model's folder in paths is replaced by `/models`.
"""

import argparse
import http.client
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.protocols.engines import ENGINES, PROBE_PATHS, identify_engine
from proxy.protocols.engines.base import CallOptions, ProbeResponse, Traits
from proxy.protocols.plan import prepare
from proxy.trajectory.step import EngineFacts

HERE = Path(__file__).parent
VERSIONS = {"b0-unknown": "2026.10"}  # what the llama.cpp server of xllamacpp 2026.10 reports
SUFFIXES = {"application/json": ".json", "text/event-stream": ".sse"}
KEPT_HEADERS = ("content-type", "server", "x-request-id", "retry-after")
TIMEOUT_S = 300.0
MIDWAY_S = 0.15  # after the start of a call, a request of MIDWAY is sent

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
NATIVE = "/generate"  # of SGLang
CONSTRAINTS = {"regex", "response_format", "tool_choice"}
KINDS = {GENERATE: "vllm", NATIVE: "sglang"}  # of engines that have a path; others have all
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one to a number.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"x": [1-9][0-9]{2}\}\}\n</tool_call>'
THOUGHT = r"<think>\nFrance has Paris\.\n</think>\n\n"
# A constrained text, in the field of each engine; an engine ignores the fields of the others.
EMOJI = {"structured_outputs": {"regex": "a🦙🎉é"}, "regex": "a🦙🎉é", "grammar": 'root ::= "a🦙🎉é"'}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CONVERSATION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Add one to 4."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 4}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    {"role": "user", "content": "And the capital of France? 🦙"},
]  # fmt: skip
_CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    "max_tokens": 24,
    "temperature": 0,
    "seed": 7,
}
_TEXT = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "seed": 7}
_SAMPLED = {"temperature": 0.9, "seed": 21}
_IDS = {"token_ids": [504, 3575, 282], "sampling_params": {"max_tokens": 16} | _SAMPLED}
_GREEDY = {"temperature": 0}
_NATIVE = {"sampling_params": _GREEDY | {"max_new_tokens": 12}}
_NATIVE_TEXT = _NATIVE | {"text": "The capital of France is"}
_NATIVE_N2 = {"sampling_params": _NATIVE["sampling_params"] | {"n": 2}}

# folder -> name -> (path, body); `stream` and the model are added when it is sent.
TABLE: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": {
        "chat_greedy": (CHAT, _CHAT),
        "chat_sampled": (CHAT, _CHAT | _SAMPLED),
        "chat_topp": (CHAT, _CHAT | _SAMPLED | {"top_p": 0.8, "top_k": 20}),
        "chat_n2": (CHAT, _CHAT | _SAMPLED | {"n": 2}),
        "chat_conversation": (CHAT, _CHAT | {"messages": CONVERSATION}),
        "chat_reasoning": (CHAT, _CHAT | {"max_tokens": 60, "chat_template_kwargs": {"enable_thinking": True}}),
        "chat_reasoning_off": (CHAT, _CHAT | {"chat_template_kwargs": {"enable_thinking": False}}),
        "chat_utf8": (CHAT, _CHAT | EMOJI),
        "chat_utf8_cut": (CHAT, _CHAT | EMOJI | {"max_tokens": 3}),
    },
    "completions": {
        "cmpl_greedy": (COMPLETIONS, _TEXT),
        "cmpl_sampled": (COMPLETIONS, _TEXT | _SAMPLED),
        "cmpl_n2": (COMPLETIONS, _TEXT | _SAMPLED | {"n": 2}),
        "cmpl_two_prompts": (COMPLETIONS, _TEXT | {"prompt": ["The capital of", "One, two, three"]}),
        "cmpl_ids": (COMPLETIONS, _TEXT | {"prompt": [504, 3575, 282]}),
        "cmpl_utf8": (COMPLETIONS, _TEXT | EMOJI),
        "cmpl_echo": (COMPLETIONS, _TEXT | {"echo": True}),
    },
    "errors": {
        "err_temperature": (CHAT, _CHAT | {"temperature": "warm"}),
        "err_messages": (CHAT, {"max_tokens": 4}),
        "err_top_logprobs": (CHAT, _CHAT | {"top_logprobs": 2}),
    },
    "generate": {
        "gen_sampled": (GENERATE, _IDS),
        "gen_n2": (GENERATE, _IDS | {"sampling_params": _IDS["sampling_params"] | {"n": 2}}),
        "native_text": (NATIVE, _NATIVE_TEXT),
        "native_ids": (NATIVE, _NATIVE | {"input_ids": [504, 3575, 282]}),
        "native_n2": (NATIVE, _NATIVE_TEXT | _NATIVE_N2),
        "native_two_prompts": (NATIVE, _NATIVE | {"text": ["The capital of", "One, two, three"]}),
        "native_two_prompts_n2": (NATIVE, _NATIVE_N2 | {"input_ids": [[504, 3575], [282, 9, 7]]}),
        "native_one_in_list": (NATIVE, _NATIVE | {"text": ["The capital of"]}),
        "native_logprobs": (
            NATIVE,
            _NATIVE_TEXT | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        ),
        "native_no_tokens": (NATIVE, _NATIVE_TEXT | {"sampling_params": {"max_new_tokens": 0}}),
        "native_stop": (NATIVE, _NATIVE_TEXT | {"sampling_params": _GREEDY | {"max_new_tokens": 40, "stop": ["e"]}}),
        "native_utf8": (
            NATIVE,
            _NATIVE_TEXT | {"sampling_params": _GREEDY | {"max_new_tokens": 40, "regex": EMOJI["regex"]}},
        ),
        "native_err": (NATIVE, _NATIVE),
    },
    "options": {
        "chat_usage": (CHAT, _CHAT | {"stream_options": {"include_usage": True}}),
        "chat_cached_tokens": (CHAT, _CHAT | {"return_cached_tokens_details": True}),
        "chat_meta_info": (CHAT, _CHAT | {"return_meta_info": True}),
        "chat_usage_n2": (CHAT, _CHAT | _SAMPLED | {"n": 2, "stream_options": {"include_usage": True}}),
        "chat_logprobs": (CHAT, _CHAT | {"logprobs": True, "top_logprobs": 2}),
        "chat_tools_logprobs": (CHAT, _CHAT | {"tools": [TOOL], "logprobs": True, "top_logprobs": 1}),
        "cmpl_usage": (COMPLETIONS, _TEXT | {"stream_options": {"include_usage": True}}),
        "cmpl_logprobs": (COMPLETIONS, _TEXT | {"logprobs": 2}),
    },
    "stops": {
        "chat_one_token": (CHAT, _CHAT | {"max_tokens": 1}),
        "chat_zero_tokens": (CHAT, _CHAT | {"max_tokens": 0}),
        "chat_stop": (CHAT, _CHAT | {"stop": [" of", "e"]}),
        "cmpl_stop": (COMPLETIONS, _TEXT | {"stop": [".", "e"]}),
    },
    "tools": {
        "chat_tools": (CHAT, _CHAT | {"tools": [TOOL]}),
        "chat_tool_call": (
            CHAT,
            _CHAT | {"tools": [TOOL], "structured_outputs": {"regex": CALL}, "regex": CALL, "max_tokens": 100},
        ),
        "chat_tool_required": (CHAT, _CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
        "chat_schema": (
            CHAT,
            _CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
    },
}


# The same for SGLang alone: its own fields, and shapes that its parsers and its defaults decide.
_IDS_IN_SGLEXT = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
_LONG = _CHAT | {"max_tokens": 300, "ignore_eos": True}
_SHORT = _CHAT | {"regex": r"Paris\."}  # ends by itself
OF_SGLANG: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": {
        "chat_short": (CHAT, _SHORT),
        "chat_input_ids": (CHAT, _SHORT | {"input_ids": [504, 3575, 282]}),
        "chat_thought": (CHAT, _CHAT | {"regex": THOUGHT + r"Paris\.", "max_tokens": 60}),
    },
    "errors": {
        "err_no_messages": (CHAT, _CHAT | {"messages": []}),
        "err_overlong": (CHAT, _CHAT | {"messages": [{"role": "user", "content": " word" * 2100}]}),
        "err_unknown_bias": (
            NATIVE,
            {"input_ids": [0], "sampling_params": {"max_new_tokens": 0, "logit_bias": {"2147483647": 0}}},
        ),
        "err_unknown_field": (CHAT, _SHORT | {"no_such_field_xyz": 1}),
        "err_top_without_logprobs": (CHAT, _SHORT | {"top_logprobs": 2}),
    },
    "options": {
        "chat_token_ids": (CHAT, _SHORT | {"return_token_ids": True}),
        "chat_prompt_token_ids": (CHAT, _SHORT | {"return_prompt_token_ids": True}),
        "chat_top_logprobs": (CHAT, _SHORT | {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}),
        "chat_sglext": (CHAT, _SHORT | _IDS_IN_SGLEXT | {"logprobs": True}),
        "chat_sglext_header": (CHAT, _SHORT),
        "chat_rid": (CHAT, _SHORT | {"rid": "ro-1:step-3"}),
        "cmpl_token_ids": (COMPLETIONS, _TEXT | {"prompt": [504, 3575, 282], "return_token_ids": True}),
    },
    "tools": {
        "chat_thought_calls": (
            CHAT,
            _CHAT | {"tools": [TOOL], "regex": rf"{THOUGHT}One moment\. {CALL}\n{CALL}", "max_tokens": 140},
        ),
    },
    "midway": {
        "midway_abort": (CHAT, _LONG),
        "midway_versions": (CHAT, _LONG),
        "midway_cmpl_versions": (COMPLETIONS, _TEXT | {"max_tokens": 300, "ignore_eos": True}),
    },
}
HEADERS = {"chat_sglext_header": {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}}
# Name -> path and body of the request that is sent while the call runs.
_NEXT = ("/update_weight_version", {"new_version": "step-2", "abort_all_requests": False})
MIDWAY = {
    "midway_abort": ("/abort_request", {"abort_all": True}),
    "midway_versions": _NEXT,
    "midway_cmpl_versions": _NEXT,
}
AFTERWARDS = ("/update_weight_version", {"new_version": "default"})


@dataclass(frozen=True)
class Response:
    """A response: headers by lowercase name, the body without framing."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Case:
    """One request of the table, ready to be sent."""

    name: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    topic: str = ""
    midway: tuple[str, dict[str, Any]] | None = None


def send(
    url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Send a request to the engine. Raises OSError if it is unreachable."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request(
            method, at.path.rstrip("/") + path, body, {"Content-Type": "application/json"} | (headers or {})
        )
        answer = connection.getresponse()
        return Response(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def detect(url: str) -> tuple[Traits, str]:
    """Detect the engine; return it and the name of its first model."""
    answers = {path: send(url, "GET", path) for path in PROBE_PATHS}
    seen = {
        path: ProbeResponse(
            answer.status, answer.headers.get("server", ""), _json(answer) if answer.status == 200 else None
        )
        for path, answer in answers.items()
    }
    models = seen["/v1/models"].body or {"data": []}
    return identify_engine(seen), next((model["id"] for model in models["data"]), "")


def requests(traits: Traits, model: str) -> Iterator[Case]:
    """Yield each case up to four times: unstreamed and streamed, as a client sends it and with injected fields, if any."""
    facts = EngineFacts("e", traits.kind, traits.version, "")
    tables = (TABLE, OF_SGLANG) if traits.kind == "sglang" else (TABLE,)
    found = ((topic, name, *case) for table in tables for topic, cases in table.items() for name, case in cases.items())
    for topic, name, path, body in found:
        if KINDS.get(path, traits.kind) != traits.kind:
            continue
        for framing, stream in (("n", {}), ("s", {"stream": True})):
            plain = {**({} if path == NATIVE else {"model": model}), **body, **stream}
            if traits.kind == "sglang" and path != NATIVE:
                plain["top_k"] = 1  # SGLang ignores seeds without a GPU
                # A grammar applies after the thought only, which the tiny model never ends.
                if plain.keys() & CONSTRAINTS:
                    plain["chat_template_kwargs"] = {"enable_thinking": False}
            if not stream:
                plain.pop("stream_options", None)
            headers, midway = HEADERS.get(name, {}), MIDWAY.get(name)
            options = CallOptions(streaming="live", traits=traits, headers=headers)
            prepared = prepare(
                plain,
                endpoint=path,
                options=options,
                engine=ENGINES[traits.kind],
                engine_facts=facts,
                logprobs_mode=None,
            )
            plan = prepared.for_call(plain, step_id=f"{name}_{framing}", rollout_id="")
            yield Case(f"{name}_{framing}_plain", path, plain, headers, topic, midway)
            if plan.body != plain or plan.headers:
                yield Case(f"{name}_{framing}_inj", path, plan.body, {**headers, **plan.headers}, topic, midway)


def folder_for(traits: Traits, of_set: str = "recorded") -> Path:
    """Return the folder of a set of an engine: beside its other cassettes, or a new one."""
    name = f"{traits.kind}-{VERSIONS.get(traits.version, traits.version) or 'unknown'}"
    known = [path for path in HERE.iterdir() if path.is_dir() and name.startswith(path.name)]
    return max(known, key=lambda path: len(path.name), default=HERE / name) / of_set


def write(folder: Path, case: Case, response: Response, model: str) -> None:
    """Write a cassette: the request, the response, and its status and headers if they matter, each in a file."""
    folder = folder / case.topic
    folder.mkdir(parents=True, exist_ok=True)
    request = {"method": "POST", "path": case.path, "body": case.body}
    if case.headers:
        request["headers"] = case.headers
    kind = response.headers.get("content-type", "").partition(";")[0]
    for old in folder.glob(f"{case.name}.*"):
        old.unlink()
    (folder / f"{case.name}.response{SUFFIXES.get(kind, '.txt')}").write_bytes(_without_folder(response.body, model))
    if response.status != 200:
        headers = {name: value for name, value in response.headers.items() if name in KEPT_HEADERS}
        (folder / f"{case.name}.meta.json").write_bytes(_text({"status": response.status, "headers": headers}))
    # Last, since the request's file marks a complete cassette.
    (folder / f"{case.name}.request.json").write_bytes(_without_folder(_text(request), model))


def record(
    url: str,
    folder: Path | None = None,
    *,
    of_set: str = "recorded",
    only: Collection[str] = ("*",),
    force: bool = False,
) -> tuple[int, int]:
    """Record the cases with names that match a pattern; return how many were recorded, and how many existed."""
    traits, model = detect(url)
    folder = folder or folder_for(traits, of_set)
    recorded = kept = 0
    for case in requests(traits, model):
        if not any(fnmatchcase(case.name, pattern) for pattern in only):
            continue
        if not force and (folder / case.topic / f"{case.name}.request.json").exists():
            kept += 1
            continue
        response = _send_case(url, case)
        write(folder, case, response, model)
        recorded += 1
        sys.stderr.write(f"{case.name}: {response.status}, {len(response.body)} bytes\n")
    return recorded, kept


def _send_case(url: str, case: Case) -> Response:
    """Send a request, and while it runs the one of MIDWAY, if any."""
    if case.midway is None:
        return send(url, "POST", case.path, orjson.dumps(case.body), case.headers)
    (path, body), (then, after) = case.midway, AFTERWARDS
    timer = threading.Timer(MIDWAY_S, send, (url, "POST", path, orjson.dumps(body)))
    timer.start()
    response = send(url, "POST", case.path, orjson.dumps(case.body), case.headers)
    timer.join()
    send(url, "POST", then, orjson.dumps(after))
    return response


def _json(response: Response) -> Any:
    try:
        return orjson.loads(response.body)
    except orjson.JSONDecodeError:
        return None


def _text(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def _without_folder(text: bytes, model: str) -> bytes:
    """Replace the model's folder, if its name is a path, with `/models`."""
    folder, _, _ = model.rpartition("/")
    return text.replace(f"{folder}/".encode(), b"/models/") if model.startswith("/") else text


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("url", help="the engine's root, without /v1")
    arguments.add_argument("--force", action="store_true", help="record existing cassettes again")
    arguments.add_argument("--set", default="recorded", help="the folder beside the engine's other sets (README.md)")
    arguments.add_argument("--only", default="*", help="patterns of names, separated by spaces")
    options = arguments.parse_args()
    try:
        new, old = record(options.url, of_set=options.set, only=options.only.split(), force=options.force)
    except OSError as error:
        sys.exit(f"The engine at {options.url} is unreachable ({error}). Start it, or set ENGINE=http://… to its root.")
    sys.stdout.write(f"{new} recorded, {old} existed (FORCE=1 records them again)\n")
