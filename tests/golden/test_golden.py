"""Stored records, exports and wire bytes equal those of the golden files, which `record.py` records.

Sentences for people (error messages, reasons) are masked in the files.
"""

import re
from base64 import b64encode
from dataclasses import replace
from secrets import token_hex
from typing import Any

import pytest
import redis
import zstandard
from golden_files import check, load
from golden_reads import read_all
from golden_session import play
from golden_store import OLD, dump_store, load_store, read_block, read_record, readable, records_of
from msgspec import structs

from proxy.api.control import batches, claims, groups, policy, rollouts, steps
from proxy.api.control.export_query import ExportQuery
from proxy.export import FORMATS, OF_POLICIES, prime_rl, verifiers, verl
from proxy.export.base import MissingReward
from proxy.protocols import exchange, plan
from proxy.protocols.accumulators import Chunks
from proxy.protocols.engines import sglang
from proxy.rollouts import recorder
from proxy.rollouts.rollout import HTTP_COUNT
from proxy.trajectory import blocks, codec, outline
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.sequence import Row
from storage import StoreOptions, open_store

_NEWER = {"sequences": ("sampling_mask", "routed_experts"), "prime_rl": ("sampling_mask",)}  # columns


@pytest.fixture(autouse=True)
def as_recorded(monkeypatch):
    """Omit what is newer than the files: fields of rows, claims, rollouts and trees, rewards by token of `verl_dataproto`, null
    rewards of `verifiers`, the `rid` of calls to SGLang, null usages in its replayed events, replays of translated streams.

    Of records, the number of the schema, and runs of units in blocks. Of Arrow and Parquet, the columns of images and epochs.
    The recorded engines do not count each of several choices, although it was requested, which is a flag since then. A
    requested `meta_info` of SGLang had injected logprobs, and its `regex` was not recorded.
    """
    monkeypatch.setattr(codec, "SCHEMA", 2)
    monkeypatch.setattr(blocks, "RUN_UNITS", 1)
    monkeypatch.setattr(Chunks, "is_counted", True)
    monkeypatch.setattr(sglang.Sglang, "shape", replace(sglang.Sglang.shape, no_usage_yet=False))
    framing = plan._framing

    def untranslated(body, dialect, engine, options, **named):
        return framing(body, dialect, engine, replace(options, is_translated=False), **named)

    monkeypatch.setattr(plan, "_framing", untranslated)
    monkeypatch.setattr(sglang, "_call_id", lambda body, requested: None)
    monkeypatch.setitem(sglang._IN_META, "logprobs", frozenset())
    monkeypatch.setattr(plan, "SAMPLING_FIELDS", [name for name in plan.SAMPLING_FIELDS if name != "regex"])
    about = ExportQuery.about

    def without_weight(*args):
        return [{name: value for name, value in row.items() if name != "weight"} for row in about(*args)]

    def at_the_end(row, source):
        return [0.0] * (len(row.token_ids) - row.prompt_len - 1) + [source.reward()]

    monkeypatch.setattr(ExportQuery, "about", without_weight)
    monkeypatch.setattr(verl, "step_reward_ends", at_the_end)
    reward_of = verifiers.reward_of

    def required(step, facts):
        reward = reward_of(step, facts)
        if reward is None:
            raise MissingReward("Format 'verifiers' requires a reward")
        return reward

    monkeypatch.setattr(verifiers, "reward_of", required)
    monkeypatch.setattr(verifiers.VerifiersFormat, "reward", "required")

    write = batches._batch_json

    def without_counts(*args):
        newer = (
            rb'"waiting":{[^}]*},|,"reasons":{"dropped":{[^}]*},"refused":{[^}]*}}|"policy_epoch":0,|"staleness":\w+,'
            rb'|"delivery":\d,"previous_consumer":null,'
        )
        return re.sub(newer, b"", write(*args))

    monkeypatch.setattr(batches, "_batch_json", without_counts)
    monkeypatch.setattr(claims.Held, "delivered_to", lambda *_: {})
    monkeypatch.setattr(policy, "_shown", lambda announced: {"version": announced.version})
    entry_of = recorder._entry

    def without_first(*args, **named):
        entry = entry_of(*args, **named)
        counts = {name: count for name, count in entry.counts.items() if not name.startswith((HTTP_COUNT, "cached_"))}
        return structs.replace(entry, counts=counts, first={})

    monkeypatch.setattr(recorder, "_entry", without_first)
    show, group_json = rollouts._shown, groups.shown_group

    async def without_task(*args):
        return _without(await show(*args), "task", "errors", "began_ms")

    def of_group(*args):
        shown = group_json(*args)
        members = [_without(entry, "task", "errors", "error", *groups._TIMES) for entry in shown["rollouts"]]
        return {**shown, "rollouts": members}

    terms = rollouts._terms
    monkeypatch.setattr(rollouts, "_terms", lambda *args: _without(terms(*args), "start_s"))
    monkeypatch.setattr(groups, "deadlines_of", lambda *_, **defaults: {})
    monkeypatch.setattr(rollouts, "_shown", without_task)
    monkeypatch.setattr(groups, "shown_group", of_group)
    call, find_forks = outline._call, outline.find_forks
    monkeypatch.setattr(outline, "_call", lambda *args: _without(call(*args), "first_byte_ms"))
    monkeypatch.setattr(outline, "find_forks", lambda *args: find_forks(*args) and {})
    for form in (*FORMATS.values(), *OF_POLICIES.values()):
        columns = _without(form.columns, "images", "multi_modal_data", "multimodal_inputs", "policy_epoch")
        if "spans" in columns:
            columns["spans"] = [_without(columns["spans"][0], "epoch", "logprobs_over")]
        columns = _without(columns, "logprobs_over", *_NEWER.get(form.name, ()))
        monkeypatch.setattr(type(form), "columns", columns)
    row_json = Row._row
    monkeypatch.setattr(Row, "_row", lambda *args: _without(row_json(*args), "sampling_mask", "routed_experts"))
    monkeypatch.setattr(sglang, "_reads_sglext", lambda body: False)
    view = prime_rl.PrimeRlFormat.view
    monkeypatch.setattr(prime_rl.PrimeRlFormat, "view", lambda *args: view(*args)[:-1])
    pack = exchange.pack_tokens
    monkeypatch.setattr(exchange, "pack_tokens", lambda *args, **named: replace(pack(*args, **named), sampling=None))
    tree_json = steps._tree_json

    def without_threads(*args):
        tree = _without(tree_json(*args), "threads", "threads_final")
        return {**tree, **{name: [_without(entry, "thread") for entry in tree[name]] for name in ("nodes", "unplaced")}}

    monkeypatch.setattr(steps, "_tree_json", without_threads)


@pytest.fixture
async def opened(server):
    """An empty store, a Redis client of its server, and the store's prefix."""
    prefix = token_hex(8)
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield store, client, prefix
    await store.close()


async def test_a_recorded_store_reads_the_same(opened):
    """Records, trees, groups, listings, batches, and every format in every container."""
    store, client, prefix = opened
    reads = load("reads")
    load_store(client, prefix, load("store"))

    found = await read_all(store, reads["exchanges"], reads["requests"])

    check(_with_deadlines(reads["calls"]), found["calls"])


async def test_a_repeated_session_sends_shows_and_stores_the_same(opened):
    """Requests to engines, responses to clients, and every key of the store afterwards."""
    store, client, prefix = opened
    wire = load("wire")

    found = await play(store, wire)

    recorded = {name: {part: wire[name][part] for part in played} for name, played in found.items()}
    check(_with_deadlines(recorded), found)
    check(_without_calls(readable(load("store"))), readable(dump_store(client, prefix)))


def test_a_stored_record_that_is_encoded_again_has_the_same_bytes():
    """Each record of the recorded store, and each of its blocks; compressed alike only by the same version of zstd."""
    shown = _whole if list(zstandard.ZSTD_VERSION) == load("reads")["zstd"] else read_record
    for rollout, (records, stored) in records_of(load("store")).items():
        reader = BlockReader(stored)
        written = {}
        for record in records:
            again = encode(decode(record, reader))
            written |= again.blocks
            if not rollout.startswith(OLD):
                check({rollout: shown(record)}, {rollout: shown(again.record)})
        before = {name.hex(): read_block(block) for name, block in stored.items()}
        check({rollout: before}, {rollout: {name.hex(): read_block(block) for name, block in written.items()}})


def _without(shown: dict, *names: str) -> dict:
    return {name: value for name, value in shown.items() if name not in names}


def _with_deadlines(value: Any) -> Any:
    """Return recorded responses with the fields that rollouts have since then: `deadline_s` was a limit."""
    if isinstance(value, dict):
        return {name: _with_deadlines(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_deadlines(part) for part in value]
    if isinstance(value, str) and '"deadline_s":null}' in value:
        moved = value.replace(',"deadline_s":null}', '},"deadline_s":null,"idle_s":null')
        return re.sub(r'("status":"\w+",)((?:"dispatch":\{[^}]*\},)?"counts":)', r'\1"reason":null,\2', moved)
    return value


def _without_calls(store: dict) -> dict:
    """Return a recorded store without the texts of tool calls, which are read from the steps since then."""
    kept = {}
    for key, entry in store.items():
        if ":marks:" in key and entry.get("type") == "hash":
            fields = [field for field in entry["fields"] if not str(field[0]).startswith("call:")]
            if not fields:
                continue
            entry = {**entry, "fields": fields}  # noqa: PLW2901
        kept[key] = entry
    return kept


def _whole(record: bytes) -> dict:
    return {**read_record(record), "bytes": b64encode(record).decode()}
