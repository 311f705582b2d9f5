"""Auditing many rows."""

import asyncio
import io
import re
from array import array

import aiohttp
import orjson
import pytest
from aiohttp import web
from rich.console import Console
from tests.support.fakes import proxying
from tests.support.forests import make_choice, make_step
from tests.support.scoring import WINDOW, honest_row, masked_row, score, scoring_as_sglang, scoring_as_vllm

from proxy.cli.audit import sender, table
from proxy.rollouts.scoring.audit import (
    NOT_SCORED,
    NOTHING,
    AuditLog,
    AuditOptions,
    Result,
    audit_rows,
    is_scorable,
    is_well,
    of_finding,
    summary,
)
from proxy.rollouts.scoring.requests import find_scorer
from proxy.rollouts.scoring.verdict import judge, of_choice, of_row
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.trajectory.step import EngineFacts, Span


@pytest.fixture
async def scorer(engine):
    engine.respond = scoring_as_vllm
    async with aiohttp.ClientSession() as session:
        yield await find_scorer(sender(session, engine.url), None, None)


async def iterate(*rows):
    for row in rows:
        yield row


async def audited(rows, scorer, journal=None, **terms):
    received = []
    results = await audit_rows(rows, scorer, AuditOptions(**terms), journal or AuditLog(None), received.append)
    assert sorted(map(id, received)) == sorted(map(id, results))
    return results


def scored(engine) -> int:
    return sum("prompt" in body for body in engine.requests)


async def test_each_row_has_a_verdict_in_the_order_of_the_rows(scorer):
    moved = honest_row("moved")
    moved["token_ids"] = moved["token_ids"][1:] + moved["token_ids"][:1]
    long = honest_row("long", sampled=WINDOW)
    empty = honest_row("empty")
    empty |= {"mask": [0] * 40, "logprobs": [None] * 40}
    rows = [honest_row("honest"), moved, long, empty, {"rollout_id": "none"}, 5]
    results = await audited(iterate(*rows), scorer)

    verdicts = ["aligned", "shifted", "too long", "nothing to compare", "not scored", "not scored"]
    assert verdicts == [result.verdict for result in results]
    assert [result.rollout_id for result in results[:5]] == ["honest", "moved", "long", "empty", "none"]
    assert results[1].offset == 1
    assert "no token is trained" in results[3].note


async def test_at_most_at_once_rows_are_scored_concurrently(engine, scorer):
    """Rows are not read ahead."""
    running, maximum, read, done = 0, 0, 0, 0
    full = asyncio.Event()

    async def respond(request, body):
        nonlocal running, maximum, done
        running += 1
        maximum = max(maximum, running)
        assert read <= done + 3
        if running == 3:
            full.set()
        await full.wait()
        try:
            return await scoring_as_vllm(request, body)
        finally:
            running -= 1
            done += 1

    async def rows():
        nonlocal read
        for number in range(9):
            read += 1
            yield honest_row(f"r{number}", first=100 + number)

    engine.respond = respond
    results = await audited(rows(), scorer, at_once=3)

    assert maximum == 3
    assert [result.verdict for result in results] == ["aligned"] * 9


async def test_an_interrupted_audit_resumes_from_its_log(engine, scorer, tmp_path):
    """Results in the log are not scored again; an incomplete last line is."""
    path = tmp_path / "journal"
    rows = [honest_row(f"r{number}", first=100 + number) for number in range(3)]
    journal = AuditLog(path)
    first = await audited(iterate(*rows[:2]), scorer, journal)
    journal.close()
    path.write_bytes(path.read_bytes()[:-20])

    journal = AuditLog(path)
    second = await audited(iterate(*rows), scorer, journal, at_once=1)
    journal.close()
    assert scored(engine) == 2 + 2
    assert first == second[:2]

    journal = AuditLog(path)
    assert second == await audited(iterate(*rows), scorer, journal)
    assert scored(engine) == 4
    rows[0]["logprobs"][20] -= 1
    assert (await audited(iterate(rows[0]), scorer, journal))[0].verdict == "wrong tokens"
    await audited(iterate(rows[1]), scorer, journal, tolerance=0.5)
    assert scored(engine) == 6
    journal.close()


async def test_a_sequence_that_could_not_be_scored_is_scored_again_in_the_next_run(engine, scorer, tmp_path):
    failing = {"r0"}

    async def respond(request, body):
        if body["prompt"][0] == 100 and failing:
            raise ZeroDivisionError
        return await scoring_as_vllm(request, body)

    engine.respond = respond
    rows = [honest_row("r0"), honest_row("r1", first=101)]
    journal = AuditLog(tmp_path / "journal")
    results = await audited(iterate(*rows), scorer, journal)
    failing.clear()
    second = await audited(iterate(*rows), scorer, journal)
    journal.close()

    assert [result.verdict for result in results] == ["not scored", "aligned"]
    assert [result.verdict for result in second] == ["aligned", "aligned"]


async def test_an_unreachable_engine_ends_the_audit_with_an_error(engine, scorer):
    async def respond(request, body):
        request.transport.close()
        raise ConnectionResetError

    engine.respond = respond
    with pytest.raises(OSError, match="request to the engine at"):
        await audited(iterate(*[honest_row() for _ in range(3)]), scorer)


async def test_logprobs_after_temperature_are_not_compared(scorer):
    """The note has the reason."""
    row = honest_row()
    row["spans"][0]["temperature"] = 0.5
    (result,) = await audited(iterate(row), scorer, logprobs_mode="after_temperature_logprobs")

    assert (result.verdict, result.skipped, result.count) == ("nothing to compare", 30, 0)
    assert "after temperature 0.5" in result.note


async def test_constrained_tokens_are_skipped_and_counted(engine, scorer):
    """Without other tokens the engine gets no request."""
    odd = honest_row("odd")
    odd["logprobs"][20:30] = [value / 2 for value in odd["logprobs"][20:30]]
    spans = [(10, 20, False), (20, 30, True), (30, 40, None)]
    odd["spans"] = [
        {"start": start, "end": end, "step_id": "S", "constrained": constrained} for start, end, constrained in spans
    ]
    wrong = odd | {"rollout_id": "wrong", "logprobs": [value and value - 1 for value in odd["logprobs"]]}
    bound = honest_row("bound", first=200)
    bound["spans"][0]["constrained"] = True
    results = await audited(iterate(odd, wrong, bound), scorer)

    assert [result.verdict for result in results] == ["aligned", "other weights", "nothing to compare"]
    assert [(result.count, result.skipped) for result in results] == [(20, 10), (20, 10), (0, 30)]
    assert all("with a constraint" in result.note for result in results)
    assert not any(200 in body.get("prompt", ()) for body in engine.requests)
    moved = bound | {"mask": [0, *bound["mask"][:-1]]}
    assert [(result.verdict, result.offset) for result in await audited(iterate(moved), scorer)] == [("shifted", 1)]
    assert [result.verdict for result in await audited(iterate(odd | {"spans": []}), scorer)] == ["wrong tokens"]


def spans(*parts, **fields):
    return [
        {"start": start, "end": end, "step_id": "S", "policy_version": version, **marks, **fields}
        for start, end, version, marks in parts
    ]


def with_other_weights(row, start, end):
    """A row with logprobs of other weights in this range."""
    row["logprobs"][start:end] = [value * 2 - 1 for value in row["logprobs"][start:end]]
    return row


async def test_tokens_sampled_over_a_cache_of_two_versions_are_not_compared(scorer):
    """They score under neither; those before the change are compared, and those of the next call, which has its own cache."""
    row = with_other_weights(honest_row(), 20, 30)
    row["spans"] = spans((10, 20, "1", {}), (20, 30, "2", {"mixed": True}), (30, 40, "2", {}))
    (result,) = await audited(iterate(row), scorer)

    assert (result.verdict, result.count, result.skipped) == ("aligned", 20, 10)
    assert "sampled while the weights changed" in result.note


@pytest.mark.parametrize(
    ("resumed", "version", "verdict", "skipped"),
    [
        (1, "2", "aligned", 10),
        (1, "1", "other weights", 20),  # the engine has not these weights
        (1, None, "other weights", 0),
        (0, "2", "other weights", 0),
    ],
)
async def test_of_a_resumed_call_only_tokens_of_the_version_of_the_engine_are_compared(
    scorer, resumed, version, verdict, skipped
):
    """If it is known; the note has the others. A call of one version is compared with any engine."""
    row = with_other_weights(honest_row(), 10, 20)
    marks = {"resumed": resumed} if resumed else {}
    row["spans"] = spans((10, 20, "1", marks), (20, 40, "2", marks))
    (result,) = await audited(iterate(row), scorer, policy_version=version)

    assert (result.verdict, result.skipped) == (verdict, skipped)
    assert not skipped or f"the engine has version {version}" in result.note


async def test_the_version_that_the_engine_reports_decides_which_tokens_of_a_resumed_call_are_compared(engine):
    """SGLang's `default` is no version."""
    reported = "default"

    async def respond(request, body):
        response = await scoring_as_sglang(request, body)
        if request.path == "/generate":
            scores = orjson.loads(response.body)
            scores["meta_info"]["weight_version"] = reported
            return web.json_response(scores)
        return response

    engine.respond = respond
    row = with_other_weights(honest_row(), 10, 20)
    row["spans"] = spans((10, 20, "1", {"resumed": 1}), (20, 40, "2", {"resumed": 1}))
    async with aiohttp.ClientSession() as session:
        scorer = await find_scorer(sender(session, engine.url), "sglang", "tiny")
        (unknown,) = await audited(iterate(row), scorer)
        reported = "2"
        (known,) = await audited(iterate(row), scorer, policy_version="1")
        reported = "3"
        (other,) = await audited(iterate(row), scorer)

    assert [unknown.verdict, known.verdict, other.verdict] == ["other weights", "aligned", "nothing to compare"]
    assert [unknown.skipped, known.skipped, other.skipped] == [0, 10, 30]
    assert other.note.endswith("sampled by version 1, 2 before a call was resumed, and the engine has version 3")


def test_a_choice_has_a_span_for_each_version_with_what_the_audit_does_not_compare():
    parts = (Span(0, 2, "1"), Span(2, 4, "2"))
    steps = [make_step("S", (1, 2), make_choice(0, (3, 4, 5, 6), spans=parts), extra=e) for e in ({}, {"resumed": 1})]
    continued, resumed = (of_choice(step, step.choices[0]) for step in steps)

    assert [(it.start, it.end, it.policy_version) for it in continued.stretches] == [(2, 4, "1"), (4, 6, "2")]
    assert [it.comparable("raw_logprobs").count for it in (continued, resumed)] == [2, 4]
    assert [it.comparable("raw_logprobs", "2").count for it in (continued, resumed)] == [2, 2]


async def test_rows_with_images_are_not_scored(scorer, engine):
    """Their ids without the images are another prompt."""
    row = honest_row("images") | {"images": [{"image": "0f" * 16, "start": 1, "length": 2}]}
    (result,) = await audited(iterate(row), scorer)

    assert (result.verdict, scored(engine)) == ("nothing to compare", 0)
    assert "images" in result.note


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_over_sampling_masks_are_compared_with_scores_over_the_same_tokens(scorer, temperature):
    """At any temperature: it is known, and so are the tokens over which the scores are normalized."""
    right, wrong, unknown = masked_row(temperature), masked_row(temperature), masked_row(temperature)
    wrong["sampling_mask"] = wrong["sampling_mask"][:10] + wrong["sampling_mask"][:9:-1]
    unknown["spans"][0]["logprobs_over"] = "truncated"
    short = masked_row(temperature) | {"sampling_mask": [[1]]}
    results = await audited(iterate(right, wrong, unknown, short), scorer, logprobs_mode="processed_logprobs")

    assert [result.verdict for result in results] == ["aligned", "other weights", "nothing to compare", "not scored"]
    assert "truncated sampling kept" in results[2].note
    assert "sampling_mask has no entry" in results[3].note


def result_of(row: dict) -> Result:
    recorded = of_row(row)
    scored = score(recorded.token_ids)
    return of_finding(recorded, scored, judge(recorded, scored, 0.01))


def replaced() -> Result:
    row = honest_row("[r2]")
    row["logprobs"][30] = -15.0
    return result_of(row)


def test_the_first_token_beyond_the_tolerance_has_its_index_step_neighbours_and_values():
    first = replaced().first
    ids = honest_row()["token_ids"]

    assert (30, "S1", ids[30]) == (first["position"], first["step_id"], first["id"])
    assert (ids[25:30], ids[31:36]) == (first["before"], first["after"])
    assert (-15.0, score(ids)[30]) == (first["recorded"], first["scored"])


def test_the_summary_counts_verdicts_and_weights_means_by_tokens():
    first, second, unscored = result_of(honest_row()), replaced(), Result("r3", 0, NOT_SCORED, note="why")
    payload = orjson.loads(orjson.dumps(summary([first, second, unscored])))

    assert payload["verdicts"] == {"aligned": 1, "wrong tokens": 1, "not scored": 1}
    assert payload["tokens"] == 60
    assert (first.mean + second.mean) / 2 == payload["mean"]
    assert second.max == payload["max"]
    assert [sequence["rollout_id"] for sequence in payload["sequences"]] == ["r1", "[r2]", "r3"]


def test_an_audit_passes_if_all_compared_sequences_are_aligned():
    """Without a compared sequence it fails."""
    nothing = Result("r4", 0, NOTHING, skipped=5)

    assert is_well([result_of(honest_row()), nothing])
    assert not is_well([nothing])
    assert summary([nothing])["skipped"] == 5
    assert is_well([result_of(honest_row())])
    assert not is_well([result_of(honest_row()), Result("r3", 0, NOT_SCORED)])
    assert not is_well([])
    assert None is summary([])["mean"]


def test_the_table_has_a_row_per_result_with_unchanged_names():
    console = Console(file=io.StringIO(), width=300)
    console.print(table([replaced(), Result("r3", 0, NOT_SCORED, note="it is no row")]))
    shown = console.file.getvalue()

    assert "[r2]" in shown
    assert "wrong tokens" in shown
    assert "recorded -15" in shown
    assert "it is no row" in shown


def test_control_characters_in_names_and_notes_are_escaped():
    """Rollouts are named by agents, and notes quote responses of engines."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table([Result("r\x1b[2J[red]", 0, NOT_SCORED, note="response \x9b2J")]))

    assert r"r\x1b[2J[red]" in console.file.getvalue()
    assert r"response \x9b2J" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


async def metric(http, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as response:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
    return float(found[0]) if found else 0.0


@pytest.mark.parametrize(("rate", "audited"), [(1, True), (0, False)])
async def test_the_configured_share_of_steps_is_audited(store, http, rate, audited):
    async with (
        simulating("127.0.0.1:0", Options(seed=1)) as engine,
        proxying(engine, store, audit={"sample_rate": rate}) as served,
    ):
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
            assert response.status == 200
            sampled = (await response.json())["usage"]["completion_tokens"]
        if not audited:
            assert await metric(http, served.url, 'tokentape_audits_total{engine="fake",verdict="aligned"}') == 0
            return
        async with asyncio.timeout(50):
            while sampled != await metric(http, served.url, 'tokentape_audit_logprob_difference_count{engine="fake"}'):
                await asyncio.sleep(0.01)
        assert await metric(http, served.url, 'tokentape_audits_total{engine="fake",verdict="aligned"}') == 1
        low = await metric(http, served.url, 'tokentape_audit_logprob_difference_bucket{engine="fake",le="0.001"}')
        assert sampled == low


async def passed_on(url, request, body):
    """Return the response of another engine."""
    async with aiohttp.ClientSession() as session, session.post(url + request.path, json=body) as response:
        return web.Response(body=await response.read(), content_type="application/json")


async def test_audits_delay_neither_calls_nor_the_shutdown(engine, store, http):
    """The engine does not respond to the scoring request."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as real:

        async def respond(request, body):
            if request.path == "/v1/models" or "prompt_logprobs" in body:
                await asyncio.Event().wait()
            return await passed_on(real, request, body)

        engine.respond = respond
        async with asyncio.timeout(50), proxying(engine.url, store, audit={"sample_rate": 1}) as served:
            for _ in range(5):
                async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                    assert response.status == 200


async def test_a_failed_audit_is_counted_and_the_next_step_is_audited(engine, store, http):
    async with simulating("127.0.0.1:0", Options(seed=1)) as real:

        async def respond(request, body):
            if "prompt_logprobs" in body or request.path == "/v1/models":
                return web.json_response({"error": "no"}, status=500)
            return await passed_on(real, request, body)

        engine.respond = respond
        async with proxying(engine.url, store, audit={"sample_rate": 1}) as served:
            for count in (1, 2):
                async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                    assert response.status == 200
                async with asyncio.timeout(50):
                    name = 'tokentape_audits_total{engine="fake",verdict="not scored"}'
                    while count != await metric(http, served.url, name):
                        await asyncio.sleep(0.01)


def test_a_step_is_scorable_if_its_logprobs_can_be_computed_again():
    """It has to be exact, complete and unconstrained, with raw logprobs or temperature 1, of an engine with scoring."""
    honest = make_step("S1", (1, 2), (3, 4))
    after = {"temperature": 0.7, "logprobs_mode": "after_temperature_logprobs"}

    assert is_scorable(honest)
    assert is_scorable(make_step("S1", (1, 2), (3, 4), sampling={**after, "temperature": 1}))
    assert is_scorable(make_step("S1", (1, 2), (3, 4), request={"tool_choice": "auto", "tools": []}))
    assert not is_scorable(make_step("S1", (1, 2), (3, 4), sampling=after))
    assert not is_scorable(
        make_step("S1", (1, 2), make_choice(0, (3, 4), logprobs=array("f")))
    )  # logprobs were not requested
    assert is_scorable(make_step("S1", (1, 2), (3, 4), sampling={"constrained": False}))
    assert not is_scorable(make_step("S1", (1, 2), (3, 4), extra={"images": {"ids": ["0f" * 16], "token": None}}))
    for changes in (
        {"sampling": {"constrained": True}},
        {"problems": ("no_token_ids",)},
        {"status": "partial"},
        {"extra": {"inherited": {"rollout_id": "r0", "step_id": "S1"}}},  # the engine may have other weights since
        {"engine": EngineFacts("e", "llamacpp", None, "http://e")},
    ):
        assert not is_scorable(make_step("S1", (1, 2), make_choice(0, (3, 4)), **changes))
