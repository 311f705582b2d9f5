"""ManagedServerAdapter has the methods of an OpenAI client that create completions."""

import pytest

from tokentape import AsyncClient, ManagedServerAdapter


async def test_both_create_methods_sample_through_the_managed_server(url):
    """They return the responses of OpenAI's client, and make nodes."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        adapter = ManagedServerAdapter(managed, "http://base/v1")
        messages = [{"role": "user", "content": "hi"}]
        chat = await adapter.chat.completions.create(model="policy", messages=messages, n=2, max_tokens=4, seed=1)
        text = await adapter.completions.create(model="policy", prompt="Once", max_tokens=4, seed=1)

    assert ("http://base/v1", "chat.completion", "text_completion") == (adapter.base_url, chat.object, text.object)
    assert (2, 3) == (len(chat.choices), len(managed.current_nodes))


async def test_methods_that_would_bypass_the_nodes_raise():
    """`post` and `copy` of an OpenAI client."""
    adapter = ManagedServerAdapter(None, "http://base/v1")

    with pytest.raises(NotImplementedError, match="copy"):
        adapter.copy()
    with pytest.raises(NotImplementedError, match="post"):
        await adapter.post("/x")
