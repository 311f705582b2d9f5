"""The request parameters that change the distribution of the recorded logprobs.

Each engine decides which of them affect its logprobs, and in which modes (`Engine.constrains`). Only the request and the
known defaults of the engine are considered, not what the server adds itself: vLLM's `--tool-strict-level`, or the grammar
that its Mistral parser always sets.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

# Values without effect; null and empty values have none either. vLLM 0.32.0 and SGLang 0.5.23 agree on them.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "thinking_token_budget": (),
    "custom_logit_processor": (),
}
BIASES: Final = frozenset(
    {
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "custom_logit_processor",
    }
)
ALL: Final = frozenset(_NEUTRAL)
PROCESSED: Final = (
    "processed_logprobs",
    "processed_logits",
)  # vLLM's modes after all sampling steps are applied to the logits


def has_grammar(sampling: Mapping[str, Any], fields: Iterable[str]) -> bool:
    """Return whether the request has a grammar: a schema, a forced or strict tool, or one of these fields."""
    form, choice = sampling.get("response_format"), sampling.get("tool_choice")
    return (
        (isinstance(form, dict) and form.get("type", "text") != "text")
        or choice == "required"
        or isinstance(choice, dict)
        or (choice != "none" and any(map(_is_strict, tools_of(sampling))))
        or any(sampling.get(name) for name in fields)
    )


def changes_distribution(sampling: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether one of these sampling parameters has a value that takes effect."""
    return any(sampling.get(name) not in (None, [], {}, "", *_NEUTRAL[name]) for name in names)


def tools_of(sampling: Mapping[str, Any]) -> list[Any]:
    """Return the offered tools; empty if they are not a list."""
    tools = sampling.get("tools")
    return tools if isinstance(tools, list) else []


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True
