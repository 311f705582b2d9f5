"""Detokenizing: where each engine tells the text of ids, and under which name.

Holds the table, and the reading of an answer. It asks nothing itself.
"""

from collections.abc import Sequence
from typing import Any, Final

from proxy.engines.base import Lookup

# vLLM 0.32.0 and llama.cpp 2026.10 seen, SGLang 0.5.23 read.
_ROUTES: Final[dict[str, tuple[str, str]]] = {
    "vllm": ("/detokenize", "prompt"),
    "sglang": ("/v1/detokenize", "text"),
    "llamacpp": ("/detokenize", "content"),
}


def ask_text(kind: str, ids: Sequence[int]) -> Lookup | None:
    """What to ask an engine of this kind for the text of ids; None if it cannot be asked."""
    route = _ROUTES.get(kind)
    return Lookup(route[0], {"tokens": list(ids)}) if route else None


def read_text(kind: str, answer: Any) -> str | None:
    """The text in its answer; None if there is none."""
    route = _ROUTES.get(kind)
    text = answer.get(route[1]) if route and isinstance(answer, dict) else None
    return text if isinstance(text, str) else None
