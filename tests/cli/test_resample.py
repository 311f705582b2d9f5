"""`tokentape resample`: recorded calls are sampled again, each as a step of a new rollout."""

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.cli.console import notes
from proxy.cli.control import ControlAddress
from proxy.cli.resample import Request, resample
from proxy.server.listener import simulating
from proxy.simulator.options import Options


def request(*rollouts, **options):
    """The options of the command."""
    return Request(
        **{"rollouts": rollouts, "group": None, "status": None, "model": None, "number": 1, "concurrency": 4, **options}
    )


@pytest.fixture
async def url(http, store):
    """A proxy with a rollout r1: two chat calls, one of Messages, one that the engine rejects."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as proxy:
        base = f"{proxy.url}/rollouts/r1/v1"
        messages = [{"role": "user", "content": "Hi"}]
        chat = {"model": "m", "messages": messages, "temperature": 1.0, "max_tokens": 8}
        async with http.post(f"{base}/chat/completions", json={**chat, "stream": True}) as response:
            await response.read()
        again = [*messages, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "And?"}]
        for path, body in (
            ("chat/completions", {**chat, "messages": again}),
            ("messages", chat),
            ("chat/completions", {**chat, "max_tokens": -1}),
        ):
            async with http.post(f"{base}/{path}", json=body) as response:
                await response.read()
        yield proxy.url


async def ran(url, capsys, *rollouts, **options):
    """The counts that the command prints."""
    is_well = await resample(ControlAddress(url, None, None), notes(), request(*rollouts, **options), as_json=True)
    return is_well, orjson.loads(capsys.readouterr().out)


async def test_each_exact_step_is_sampled_with_its_prompt_ids(url, store, capsys):
    assert await ran(url, capsys, "r1", number=2) == (True, {"sampled": 6, "left out: not exact": 1})
    for source in (await stored_steps(store, "r1"))[:3]:
        for number in range(2):
            (step,) = await stored_steps(store, f"r1~none~{source.step_id}~{number}")
            assert list(step.prompts[0]) == list(source.prompts[0])
            assert step.extra["branched_from"]["ids"] is True


async def test_a_repeated_command_goes_on(url, store, capsys):
    await ran(url, capsys, "r1")
    assert await ran(url, capsys, number=2) == (
        True, {"sampled": 3, "sampled before": 3, "left out: not exact": 1}
    )  # fmt: skip


async def test_an_engine_that_renders_otherwise_is_refused(http, store, capsys, url):
    """Another model may have another tokenizer: its rendering is compared."""
    is_well, counts = await ran(url, capsys, "r1", model="other")
    assert is_well
    assert counts["sampled"] == 3
    different = Options(template="[{{ messages[0].content }}]")
    async with simulating("127.0.0.1:0", different) as engine, proxying(engine, store) as proxy:
        is_well, counts = await ran(proxy.url, capsys, "r1", model="third")
    assert not is_well
    assert [what.partition(":")[0] for what in counts if what.startswith("refused")] == ["refused"]
    assert await store.get(f"r1~third~{(await stored_steps(store, 'r1'))[0].step_id}~0") is None


async def test_equal_calls_are_each_sampled(http, url, store, capsys):
    """The tape of the second one has the first one, whose key is the same."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0, "max_tokens": 8}
    for _ in range(2):
        async with http.post(f"{url}/rollouts/r2/v1/chat/completions", json=chat) as response:
            await response.read()
    assert await ran(url, capsys, "r2") == (True, {"sampled": 2})
    for source in await stored_steps(store, "r2"):
        steps = await stored_steps(store, f"r2~none~{source.step_id}~0")
        assert [step.inherited for step in steps][-1:] == [None]


async def test_a_command_that_was_interrupted_after_a_call_samples_it_once(http, url, store, capsys):
    await ran(url, capsys, "r1")
    name = f"r1~none~{(await stored_steps(store, 'r1'))[0].step_id}~0"
    for field in ("status", "finished_ms"):
        await store.update_if(name, {field: None}, expect={}, now_ms=1)
    await ran(url, capsys, "r1")
    assert len(await stored_steps(store, name)) == 1
