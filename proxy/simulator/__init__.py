"""A small engine to try things with: it speaks vLLM's or SGLang's shapes, is deterministic, needs no GPU.

Holds the map of the package and nothing else. The path of a call: `server` chooses a shape, its routes read a
body, `requests` gives its fields types and bounds (`faults` says what is refused), `chat` renders messages by
`template` or `completions` takes prompts as they are, `model` samples tokens (`tokenizer`, `distribution`,
`sampler` with the `arguments` of tool calls), `generation` makes text of them and ends it, `parser` finds thoughts
and calls in it, and `wire` writes the answer. `serving` moves it all, token by token, and `weights` notes under
which label. `asides` reads what samples nothing.

A shape is its routes and a file for each endpoint: `vllm_routes` with `chat`, `completions` and `generate`;
`sglang_routes` with `sglang_chat`, `sglang_completions` and `sglang_generate`, which share `sglang_requests` and
`sglang_wire`, and tell logprobs after temperature (`tempered`). `experts` is for those that tell them.

Everything but `server`, `serving` and the routes is free of sockets. `train` made `vocabulary.json` and is not
imported.
"""
