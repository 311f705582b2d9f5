"""Record the golden files: `make golden`, and for a release `make golden RELEASE=0.2.0`.

Run it after a change of stored records, exports or wire bytes that is intended, and review the change first: `pytest
tests/golden` prints the differences. It writes `wire.json.zst` (requests and responses of clients and engines, and what they
leave in the store) and `reads.json.zst` (records, trees, listings, exports of the released store). With RELEASE it also
writes the store of that release, which later versions must read; set `STORE` of `files.py` to it.
The engines are the simulator and the cassettes; the tests need neither.
"""

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import orjson
import redis
import zstandard
from tests.golden.files import STORE, load, save
from tests.golden.reads import AFTER, calls_of, read_all
from tests.golden.scenes import STAGES, play
from tests.golden.session import SteppedClock, staging
from tests.golden.store import dump_store, load_store, readable
from tests.golden.tape import SAMPLING, forward_to
from tests.support.recorded import Cassette, dialect_cassettes, http_cassettes

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage import StoreOptions, open_store
from storage.embedded.server import start_embedded

SIMULATORS = {
    "vllm": Options(seed=1),
    "off": Options(seed=6),
    "append": Options(seed=7, noncanonical_rate=0.1),
    "images": Options(seed=8, image_tokens=4),
    "policies": Options(seed=9),
    "plain": Options(seed=10),
    "extras": Options(seed=2, weight_version="7", routed_experts=True, sampling_mask=True),
    "sessions": Options(seed=3),
    "sglang": Options(seed=4, shape="sglang", routed_experts=True),
    "sglang-no-parser": Options(seed=5, shape="sglang", has_parser=False),
    "sglang-experts": Options(seed=11, shape="sglang", routed_experts=True),
}
FACTS = {
    "real-vllm": {"/version": '{"version":"0.32.0"}'},
    "real-sglang": {
        "/get_server_info": '{"version":"0.5.23","tool_call_parser":"hermes","reasoning_parser":"qwen3"}',
        "/get_model_info": '{"model_path":"m","is_generation":true,"weight_version":"default"}',
    },
    "real-llamacpp": {
        "/props": '{"build_info":"b0-unknown"}',
        "/v1/models": '{"object":"list","data":[{"id":"m","owned_by":"llamacpp"}]}',
    },
}
PER_ROLLOUT = 12
# Of vLLM's cassettes; all of them would make the store twice as large.
SETS = ("recorded/", "reasoning/", "scale_out/", "tool_", "cmpl_n3", "chat_n3", "stop_", "utf8_", "err_")
# Of SGLang's.
OF_SGLANG = (
    "each_token/", "recorded/chat_input_ids_n", "recorded/chat_prompt_token_ids_n", "recorded/chat_rid_n",
    "recorded/chat_sglext_header_n", "recorded/chat_sglext_n", "recorded/chat_short_n", "recorded/chat_thought_calls_n",
    "recorded/chat_thought_n", "recorded/chat_token_ids", "recorded/chat_tool_call_n", "recorded/chat_top_logprobs_n",
    "recorded/chat_utf8_n", "recorded/cmpl_token_ids_n", "recorded/err_no_messages_n", "recorded/err_top_without_logprobs_n",
    "recorded/err_unknown_field_n", "recorded/midway_abort", "recorded/midway_versions_n",
)  # fmt: skip


def paired(cassettes: list[Cassette]) -> list[Cassette]:
    """Join each pair of a plain and an injected request: the plain request, with the response to the injected one."""
    by_name = {cassette.name: cassette for cassette in cassettes}
    injected = {name: by_name.get(f"{name.removesuffix('_plain')}_inj") for name in by_name if name.endswith("_plain")}
    twins = {twin.name for twin in injected.values() if twin}
    return [
        replace(cassette, response=twin.response, status=twin.status) if (twin := injected.get(name)) else cassette
        for name, cassette in by_name.items()
        if name not in twins
    ]


def cases_from(cassettes: list[Cassette]) -> tuple[list[dict], list[dict]]:
    """Return the requests of cassettes, and the responses in the same order."""
    cases, answers = [], []
    for number, cassette in enumerate(cassettes):
        rollout = f"real-{cassette.kind}-{number // PER_ROLLOUT}"
        cases.append({"rollout": rollout, "path": cassette.path, "body": cassette.body, "name": cassette.name})
        text = cassette.response.decode()
        answers.append({"status": cassette.status, "type": cassette.content_type, "headers": {}, "answer": text})
    return cases, answers


def cassette_source(stage: str, answers: list[dict]):
    """Return a source that gives the responses of cassettes in order, and the facts of that engine."""
    left = iter(answers)

    async def answer(method: str, path: str, headers: dict[str, str], body: str) -> dict:
        facts = FACTS[stage].get(path)
        if path in SAMPLING:
            return next(left)
        return {"status": 200 if facts else 404, "type": "application/json", "headers": {}, "answer": facts or "{}"}

    return answer


def with_masks(source):
    """Return a source that adds SGLang's sampling masks, which the simulator lacks, to responses that request them."""

    async def respond(method: str, path: str, headers: dict[str, str], body: str) -> dict:
        requested = orjson.loads(body or "{}")
        is_masked = requested.pop("return_sampling_mask", False)
        response = await source(method, path, headers, orjson.dumps(requested).decode() if is_masked else body)
        if not is_masked:
            return response
        answer = orjson.loads(response["answer"])
        for choice in answer["choices"]:
            meta = choice["meta_info"]
            sampled = meta["output_token_logprobs"]
            meta["output_token_sampling_mask"] = [sorted({token, 7, 9}) for _, token, _ in sampled]
            meta["output_token_sampling_logprobs"] = [logprob / 2 for logprob, _, _ in sampled]
            meta["output_token_sampling_mask_length"] = len(sampled)
        return {**response, "answer": orjson.dumps(answer).decode()}

    return respond


async def record(release: str | None = None) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="golden-"))
        server = await start_embedded(Path(folder) / "store", "acknowledged")
        stack.push_async_callback(server.stop)
        client = redis.Redis(unix_socket_path=str(server.socket))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = {
            name: await stack.enter_async_context(simulating("127.0.0.1:0", options))
            for name, options in SIMULATORS.items()
        }
        sources = {name: forward_to(http, url) for name, url in urls.items()}
        sources["sglang-experts"] = with_masks(sources["sglang-experts"])
        wire = {name: {"exchanges": []} for name in STAGES}
        real = {
            "real-vllm": paired([cassette for cassette in dialect_cassettes() if cassette.name.startswith(SETS)]),
            "real-sglang": paired(
                [cassette for cassette in dialect_cassettes("sglang") if cassette.name.startswith(OF_SGLANG)]
            ),
            "real-llamacpp": http_cassettes("llamacpp"),
        }
        for name, cassettes in real.items():
            wire[name]["cases"], answers = cases_from(cassettes)
            sources[name] = cassette_source(name, answers)
        store = await open_store(f"unix:{server.socket}", StoreOptions(prefix="tt"))
        for name, played in (await play(store, wire, sources)).items():
            wire[name] |= played
        dump = dump_store(client, "tt")
        await store.close()
        wire["stored"] = readable(dump)
        if release is None:
            dump = load(STORE)

        reads = {"exchanges": [], "zstd": zstandard.ZSTD_VERSION}
        for prefix in ("look", "read"):
            load_store(client, prefix, dump)
            store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
            if prefix == "look":
                async with staging(store, SteppedClock(AFTER), [], sources["vllm"], name="vllm") as stage:
                    calls = await calls_of(stage)
            else:
                reads["requests"] = calls
                reads |= await read_all(store, reads["exchanges"], calls, sources["vllm"])
            await store.close()
        files = {"wire": wire, "reads": reads, **({f"store-{release}": dump} if release else {})}
        for name, value in files.items():
            sys.stdout.write(f"{name}: {save(name, value):,} bytes\n")


if __name__ == "__main__":
    asyncio.run(record(*sys.argv[1:]))
