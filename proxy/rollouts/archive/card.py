"""The card of an archive: a README.md as the Hugging Face Hub reads it, with the columns and how to read them."""

from typing import Final

from proxy.rollouts.archive.columns import COLUMNS, SCHEMA

CARD_NAME: Final = "README.md"

_HEADER: Final = """\
---
pretty_name: Recorded rollouts
tags:
- reinforcement-learning
- rollouts
- tokentape
configs:
- config_name: default
  data_files:
  - split: train
    path: "date=*/*.parquet"
---
"""

_TEXT: Final = """\
# Recorded rollouts

Rollouts of language models, recorded by TokenTape: for each call of an agent the token ids that the engine saw and sampled,
with their logprobs, the request and the response. One row is one step; the columns of its rollout are repeated in each row.
The files of `date=YYYY-MM-DD` have the rollouts that were finished on that day (UTC).

A rollout that was changed after it was archived is in a later file again. Its newest version has the highest `touched_ms`.

```sql
SELECT rollout_id, reward, step_id, prompt_ids, completion_ids, logprobs
FROM read_parquet('date=*/*.parquet')
QUALIFY touched_ms = max(touched_ms) OVER (PARTITION BY rollout_id)
ORDER BY rollout_id, index
```

`tokentape import` brings the rollouts back into a store, from which every trainer's format can be exported.

Schema version {schema}:

| column | type | content |
|---|---|---|
{rows}
"""


def card() -> bytes:
    """Return the text of a new card."""
    return f"{_HEADER}{_TEXT.format(schema=SCHEMA, rows=column_table())}".encode()


def column_table() -> str:
    """Return the rows of a Markdown table of all columns."""
    return "\n".join(f"| `{name}` | {_kind(kind)} | {text} |" for name, (kind, text) in COLUMNS.items())


def _kind(kind: str) -> str:
    return _KINDS.get(kind, kind)


_KINDS: Final = {
    "text": "string",
    "json": "string (JSON)",
    "ids": "list of int32",
    "floats": "list of float32",
    "texts": "list of string",
    "time": "timestamp (ms, UTC)",
    "bool_": "bool",
    "prompts": "list of lists of int32",
    "choices": "list of (ids, logprobs)",
    "blocks": "list of (name, block)",
}
