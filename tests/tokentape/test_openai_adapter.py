"""ManagedServer with the interface of an OpenAI client."""

import pytest

from tokentape import AsyncClient, ManagedServerAdapter


async def test_both_creates_sample_through_the_managed_server(url):
    """Their replies are the same, and their nodes are kept."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        adapter = ManagedServerAdapter(managed, "http://base/v1")
        messages = [{"role": "user", "content": "hi"}]
        chat = await adapter.chat.completions.create(model="policy", messages=messages, n=2, max_tokens=4, seed=1)
        text = await adapter.completions.create(model="policy", prompt="Once", max_tokens=4, seed=1)

    assert ("http://base/v1", "chat.completion", "text_completion") == (adapter.base_url, chat.object, text.object)
    assert (2, 3) == (len(chat.choices), len(managed.current_nodes))


async def test_what_is_not_there_is_said_so():
    """`post` and `copy` of an OpenAI client would go past the nodes."""
    adapter = ManagedServerAdapter(None, "http://base/v1")

    with pytest.raises(NotImplementedError, match="copy"):
        adapter.copy()
    with pytest.raises(NotImplementedError, match="post"):
        await adapter.post("/x")
