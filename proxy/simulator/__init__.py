"""A simulated inference server without a GPU: deterministic, with the HTTP API of vLLM or SGLang.

The path of a call, by module: `server` (the aiohttp application) -> `vllm/routes` or `sglang/routes` (each on the base of
`routes`) -> `requests` (fields and bounds; `errors` builds error responses) -> `prompts` (messages to text by `history` and
`template` or `jinja_template`, text to ids by `tokenizer`; or the ids of the request by `given_ids`) -> `engine` (calls in
flight, pacing, writing) -> `model` (`distribution`, `sampler`, `tool_arguments`, `script`, `call_syntax`) -> `generation`
(text, stops, lengths) -> `parser` (reasoning and tool calls) -> the response, by `chat`, `completions` and `generate` of
`vllm/` or `sglang/`, which share `wire` and `weights`.

Only `server`, `engine` and the routes use sockets. `benchmarks/train_vocabulary.py` makes `vocabulary.json`.
"""
