"""A simulated inference server without a GPU: deterministic, with the HTTP API of vLLM or SGLang.

The path of a call, by module: `server` (the aiohttp application) -> `vllm` or `sglang` (routes and responses) -> `requests`
(fields and bounds; `errors` builds error responses) -> `prompts` (messages to text by `template` or
`jinja_template`, text to ids by `tokenizer`, or the ids of the request; calls, and turns of a `script`) -> `engine` (calls in
flight, pacing, writing) -> `model` (text, stops, lengths, over `sampler`) -> `parser` (reasoning and tool calls) -> the
response.

Only `server`, `engine` and the routes use sockets. `benchmarks/train_vocabulary.py` makes `vocabulary.json`.
"""
