"""Prompts of Messages and Responses, compared with the prompts of vLLM's own endpoints for the same requests."""

from collections.abc import Iterator

import pytest

from . import environment
from .conftest import PARSERS, SCALE_OUT, Engine, start_vllm
from .prompt_cases import MESSAGES, RESPONSES
from .through import through_proxy

# TRL has the templates of many models. This one accepts content parts, and a system message in the first place only.
QWEN = "qwen3_5_think.jinja"


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The tiny model with Qwen3.5's template."""
    (templates,) = environment.ensure_trl().python.parent.parent.glob("lib/python*/site-packages/trl/chat_templates")
    log = tmp_path_factory.mktemp("qwen") / "vllm.log"
    flags = (*PARSERS, SCALE_OUT, f"--chat-template={templates / QWEN}")
    with start_vllm(environment.ensure().model, "tiny", log, *flags) as engine:
        yield engine


@pytest.mark.parametrize("template", ["vllm", "qwen"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_prompt_equals_the_prompt_of_the_engines_own_endpoint(template, path, request, tmp_path):
    """Id by id, for every request; what the engine's endpoint rejects is rejected here."""
    engine = request.getfixturevalue(template)
    cases, least = (MESSAGES, {"max_tokens": 1}) if path == "/v1/messages" else (RESPONSES, {"max_output_tokens": 16})
    found, expected = {}, {}
    async with through_proxy(engine.url, tmp_path) as proxy:
        for number, (name, body) in enumerate(cases.items()):
            call = {"model": "tiny", **least, **body}
            expected[name] = await rendered(proxy, f"{engine.url}{path}/render", call)
            found[name] = await sampled_from(proxy, f"r{number}", path, call)

    assert {name: (expected[name], found[name]) for name in cases if expected[name] != found[name]} == {}


@pytest.mark.parametrize("template", ["vllm", "qwen"])
async def test_the_token_count_of_a_prompt_is_its_length(template, request, tmp_path):
    """For every prompt that the engine accepts."""
    engine = request.getfixturevalue(template)
    found, expected = {}, {}
    async with through_proxy(engine.url, tmp_path) as proxy:
        for name, body in MESSAGES.items():
            call = {"model": "tiny", "max_tokens": 1, **body}
            made = await rendered(proxy, f"{engine.url}/v1/messages/render", call)
            expected[name] = len(made) if isinstance(made, list) else made
            async with proxy.http.post(f"{proxy.url}/v1/messages/count_tokens", json=call) as response:
                counted = await response.json()
                found[name] = counted["input_tokens"] if response.status == 200 else response.status

    assert found == expected


async def rendered(proxy, url, body):
    """Return the ids of the prompt that the engine renders, or the status of its error."""
    async with proxy.http.post(url, json=body) as response:
        payload = await response.json()
        return payload["token_ids"] if response.status == 200 else response.status


async def sampled_from(proxy, rollout, path, body):
    """Return the prompt ids of the step of a call through the proxy, or the status of its error."""
    async with proxy.http.post(f"{proxy.url}/rollouts/{rollout}{path}", json=body) as response:
        await response.read()
        if response.status != 200:
            return response.status
    (step,) = await proxy.steps(rollout)
    return step["prompt_ids"]
