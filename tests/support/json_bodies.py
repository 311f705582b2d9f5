"""Hypothesis strategies of request bodies for a simulated engine: its fields with valid values and any other JSON."""

from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON,
        "content": st.text(max_size=3) | JSON,
        "tool_calls": JSON,
        "reasoning": JSON,
    },
)
TOOL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"parameters": JSON})}
)
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 5) | JSON},
    optional={
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
        "prompt": st.text(max_size=3) | st.lists(st.integers(-1, 3_000), max_size=3) | JSON,
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
        "n": st.integers(0, 3),
        "seed": JSON,
        "temperature": st.floats(0, 3) | JSON,
        "stop": JSON,
        "logprobs": JSON,
        "top_logprobs": JSON,
        "prompt_logprobs": JSON,
        "min_tokens": st.integers(-1, 3) | JSON,
        "stream": st.booleans(),
        "echo": JSON,
        "chat_template_kwargs": JSON,
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
    },
)
