"""Hypothesis strategies for bodies of Messages calls: its fields, with valid and other values."""

from hypothesis import strategies as st
from tests.support.json_bodies import JSON

TYPES = st.sampled_from(
    ["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "search_result", "odd"]
)
SOURCE = st.fixed_dictionaries(
    {"type": st.sampled_from(["url", "base64", "text", "content"]) | JSON},
    optional={"data": JSON, "url": JSON, "content": JSON},
)
TOOL = st.fixed_dictionaries({"name": JSON, "input_schema": JSON}, optional={"type": JSON})
BLOCK = st.fixed_dictionaries(
    {"type": TYPES | JSON},
    optional={
        "text": st.text(max_size=3) | JSON, "source": SOURCE | JSON, "id": st.text(max_size=2) | JSON, "name": JSON,
        "input": st.dictionaries(st.text(max_size=2), JSON, max_size=2) | JSON, "tool_use_id": JSON, "content": JSON,
        "is_error": JSON, "thinking": JSON, "signature": JSON, "title": JSON,
    },
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": st.lists(BLOCK, max_size=3) | JSON},
)
FORM = st.fixed_dictionaries(
    {"format": st.fixed_dictionaries({"type": st.just("json_schema") | JSON, "schema": JSON}) | JSON}
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3) | JSON},
    optional={
        "model": JSON, "max_tokens": JSON, "system": st.lists(BLOCK, max_size=2) | JSON, "temperature": JSON, "top_k": JSON,
        "stop_sequences": st.lists(JSON, max_size=2) | JSON, "stream": JSON, "thinking": st.fixed_dictionaries({"type": JSON}),
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"]) | JSON}) | JSON,
        "output_config": FORM | JSON, "n": JSON, "chat_template_kwargs": JSON, "mcp_servers": JSON,
    },
)  # fmt: skip
