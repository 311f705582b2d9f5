"""A small engine to try things with: it speaks vLLM's wire shapes, is deterministic, needs no GPU.

Holds the map of the package and nothing else. The path of a call: `server` reads a body, `requests` gives its
fields types and bounds (`faults` says what is refused), `chat` renders messages by `template` or
`completions` takes prompts as they are, `model` samples tokens (`tokenizer`, `distribution`, `sampler` with
the `arguments` of tool calls), `generation` makes text of them and ends it, `parser` finds thoughts and calls
in it, and `wire` writes the answer. Everything but `server` is free of sockets. `train` made
`vocabulary.json` and is not imported.
"""
