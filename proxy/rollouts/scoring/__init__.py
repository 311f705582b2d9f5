"""Scores: the logprobs of recorded token ids from an engine now, for audits and for exports with `rescore`.

| module | contents |
|---|---|
| `requests` | the scoring requests of each engine type |
| `engines` | the engines of a scorer: timeouts, the next endpoint |
| `vocabulary` | whether two engines have the same token at each id |
| `rescoring` | the scores of exported rows: by which engine, cached, retried |
"""
