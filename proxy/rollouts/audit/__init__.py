"""The audit: scores recorded sequences again with an engine and classifies the differences.

| module | contents |
|---|---|
| `sample` | a recorded sequence, from an exported row or a step |
| `verdict` | the verdict: aligned, shifted, other weights, wrong tokens. Pure |
| `statistics` | the probability of chance agreement, correlation. Pure |
| `runner` | the audit of many rows: concurrent, resumable |
| `report` | results as a table or JSON |
| `background` | the audit of a share of finished steps by the server |

`proxy.rollouts.scoring` has the scoring requests. The audit never writes to the store and never changes a row.
"""
