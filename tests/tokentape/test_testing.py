"""The fixture of `tokentape.testing` and its example in docs/playback.md: test sessions with and without an engine."""

import os
from pathlib import Path

import orjson
import pytest
from tests.support.commands import started
from tests.support.pages import blocks_of

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

AGENT = """
from openai import OpenAI
from tokentape.testing import tape

weather = tape("tapes/weather.jsonl", ignore=["It is *."], terms={{"metadata": {{"task": 7}}}})


def test_the_agent_answers(weather):
    messages = [{{"role": "user", "content": "What is the weather in {city}? It is {day}."}}]
    with OpenAI(max_retries=0) as client:
        for _ in range(2):
            options = {{"model": "policy", "messages": messages, "max_tokens": 8}}
            reply = client.chat.completions.create(**options).choices[0].message
            messages += [{{"role": "assistant", "content": reply.content}}, {{"role": "user", "content": "And tomorrow?"}}]
    print("\\nrecording", weather.is_recording, "said", repr(reply.content))
    assert {holds}
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """A function that runs the test of an agent in a session of its own, with these environment variables."""
    for name in [name for name in os.environ if name.startswith(("TOKENTAPE_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")

    def run(city: str = "Oslo", day: str = "Monday", holds: str = "True", **environment: str):
        for name in ("TOKENTAPE_ENGINE", "TOKENTAPE_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        pytester.makepyfile(test_agent=AGENT.format(city=city, day=day, holds=holds))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-s")

    return run


def said(result) -> list[str]:
    """What the agents of a session printed."""
    return [line.removeprefix("recording ") for line in result.outlines if line.startswith("recording ")]


@pytest.mark.timeout(300)
def test_the_first_run_records_and_later_ones_play(session, pytester):
    """Without a file and an engine, the test names what is missing; a failed test writes no file."""
    file = pytester.path / "tapes" / "weather.jsonl"
    missing = session()
    missing.assert_outcomes(errors=1)
    missing.stdout.fnmatch_lines(["*weather.jsonl does not exist. Run the test once with TOKENTAPE_ENGINE*"])
    with started("simulate", "--listen", "127.0.0.1:0", "--model", "policy") as (_, engine, _):
        session(holds="False", TOKENTAPE_ENGINE=engine).assert_outcomes(failed=1)
        assert not file.exists()
        recorded = session(TOKENTAPE_ENGINE=engine)
    recorded.assert_outcomes(passed=1)
    assert said(recorded)[0].startswith("True")
    title, *steps = map(orjson.loads, file.read_bytes().splitlines())
    assert (title["rollout"]["status"], title["rollout"]["metadata"]) == ("completed", {"task": 7})
    assert [step["engine"]["url"] for step in steps] == ["", ""]
    assert engine not in file.read_text()

    played = session(day="Tuesday")
    played.assert_outcomes(passed=1)
    assert [said(recorded)[0].replace("True", "False", 1)] == said(played)
    changed = session(city="Rome")
    changed.assert_outcomes(failed=1, errors=1)
    changed.stdout.fnmatch_lines(["*weather.jsonl did not have 1 of the agent's calls*", "*Oslo*", "*Rome*"])


@pytest.mark.timeout(300)
def test_the_example_of_the_page_records_with_a_running_proxy_and_plays(session, pytester, tmp_path, monkeypatch):
    pytester.makepyfile(
        agent="""
        from openai import OpenAI

        def run_agent(question):
            with OpenAI() as client:
                messages = [{"role": "user", "content": question}]
                reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            return reply.choices[0].message.content + "rain"
        """
    )
    (example,) = [block.text for block in blocks_of(ROOT / "docs" / "playback.md") if "tokentape.testing" in block.text]
    pytester.makepyfile(test_page=f"from agent import run_agent\n{example}")
    words = ("-p", "no:cacheprovider", "test_page.py")
    with started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path / 'store'}") as (_, url, _):
        monkeypatch.setenv("TOKENTAPE_URL", url)
        pytester.runpytest_inprocess(*words).assert_outcomes(passed=1)
    monkeypatch.delenv("TOKENTAPE_URL")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=1)

    assert len((pytester.path / "tapes" / "weather.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.timeout(300)
def test_tests_of_one_file_have_a_playback_each_and_one_proxy(session, pytester):
    """The environment of each test names its own rollout, and is reset after it. With `complete` all calls are required."""
    question = {"role": "user", "content": "What is the weather in Oslo? It is Monday."}
    reply = {"index": 0, "message": {"role": "assistant", "content": "Rain."}, "finish_reason": "stop"}
    step = {
        "rollout_id": "r",
        "dialect": "chat",
        "endpoint": "/v1/chat/completions",
        "engine": {"name": "e", "kind": "vllm", "version": None, "url": ""},
        "request": {"model": "policy", "messages": [question], "max_tokens": 8},
        "response": {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [reply],
        },
        "timing": {"received": 1.0},
        "status": "complete",
    }
    (pytester.path / "tapes").mkdir()
    lines = [orjson.dumps({**step, "step_id": f"s{number}"}) for number in range(2)]
    (pytester.path / "tapes" / "weather.jsonl").write_bytes(b"\n".join(lines))
    pytester.makepyfile(
        test_more="""
        import os

        import pytest
        from openai import OpenAI
        from tokentape.testing import tape

        weather = tape("tapes/weather.jsonl")
        whole = tape("tapes/weather.jsonl", complete=True)
        urls = set()

        @pytest.mark.parametrize("_", range(3))
        def test_one(weather, _):
            urls.add(weather.url)
            assert weather.base_url == os.environ["OPENAI_BASE_URL"]
            assert weather.base_url == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
            question = {"role": "user", "content": "What is the weather in Oslo? It is Monday."}
            with OpenAI() as client:
                client.chat.completions.create(model="policy", messages=[question], max_tokens=8)

        def test_two(whole):
            urls.add(whole.url)

        def test_three():
            assert len(urls) == 1
            assert "OPENAI_BASE_URL" not in os.environ
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_more.py")
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(["*the agent made 0 of the 2 calls in weather.jsonl"])
