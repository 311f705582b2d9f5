"""The markers of a chat template, which become single tokens of the simulated model.

A marker is a piece of the template's text in one of these forms, without white space, quotes or braces inside:

    <|name|>  <|name>  <name|>    a bar beside a bracket, ASCII or full-width (U+FF5C, as in DeepSeek's templates)
    <name>  </name>  <ns:name>    a tag without attributes
    [NAME]  [/NAME]               upper-case letters, digits and underscores, at least two

Markers that a template composes, like `'<|' + role + '|>'`, are not found. Comments of the template have no markers. A
template that names `bos_token` or `eos_token` writes these, too.
"""

import re
from pathlib import Path
from typing import Final

from proxy.simulator.tokenizer import NAMED_TOKENS

BOS: Final = "<s>"
"""The value of `bos_token`."""

_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)
_MARKER: Final = re.compile(
    r"<[|\uff5c][^\s<>{}'\"\\]*>"
    r"|<[^\s<>{}'\"\\|\uff5c]+[|\uff5c]>"
    r"|</?[A-Za-z_][\w:.-]*>"
    r"|\[/?[A-Z][A-Z0-9_]+\]"
)


def uses_bos(template: str) -> bool:
    """Return whether the template writes `bos_token`."""
    return "bos_token" in _COMMENT.sub("", template)


def markers_of(template: str, eos: str) -> list[str]:
    """Return the markers that are not tokens of every simulated model, in the order of the template."""
    text = _COMMENT.sub("", template)
    found = _MARKER.findall(text)
    found += [BOS] if uses_bos(template) else []
    found += [eos] if "eos_token" in text else []
    return [marker for marker in dict.fromkeys(found) if marker not in NAMED_TOKENS]


def read_template(path: Path) -> str:
    """Read a chat template; raises OSError or ValueError if the file cannot be read."""
    return path.read_text(encoding="utf-8")
