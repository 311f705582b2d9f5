"""The audit: recorded sequences scored again by an engine, and what the differences mean.

| module | holds |
|---|---|
| `recorded` | one sequence as it was recorded, read off an exported row or a step |
| `verdict` | the judgement: aligned, shifted, other weights, wrong tokens. Pure |
| `scoring` | how each kind of engine is asked to score ids |
| `source` | rows out of a file or a running proxy |
| `run` | the audit of many rows: some at once, resumable |
| `report` | what people and programs read of it |
| `background` | the share of finished steps that the server audits itself |

Nothing here writes to a store or changes a row.
"""
