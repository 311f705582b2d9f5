"""Generates docs/exactness.md: what is exact and what is flagged, by engine.

The results of real engines are those of `tokentape certify` in docs/certified, which `make certified` records.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from proxy.cli.certify.certificate import FAULTS, MEANINGS
from proxy.protocols.engines import ENGINES, Engine
from proxy.protocols.engines.quirks import QUIRKS
from proxy.trajectory.fidelity import PROBLEMS

CERTIFIED = Path(__file__).parent / "certified"
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "plain": "Any other server (plain)"}
_OPENING = """After this page you know which calls of your engine are recorded exactly, and which are flagged and why.

A step is **exact** if all checks show that its ids and logprobs are those that the engine sampled, and that the prompt
ids are those that the engine processed. Otherwise it is **flagged** with each [reason](fidelity.md), and only
`include=flagged` exports it. A step that is flagged for a reason that the tables below lack is logged and counted in
`tokentape_unexpected_losses_total`.

**Streams.** `record.streaming: auto` sends a streamed call as a stream (*live*), unless the engine's streams have a
limitation below. Then the call is sent unstreamed and its response rendered as the engine's events (*replay*), after
comments as keep-alive. `GET /engines` shows the detected engine and the mode of its streams. Live streams of SGLang's chat
and completions have no weight versions, so their tokens have the announced policy version; with `replay` each has its own.

**Clients that leave.** What was sampled until then is a partial step. It has the ids of every event that arrived; a call of
SGLang with one choice is aborted by its id, and has all of them, also if it is replayed or unstreamed.

**Is training on my engine safe?** Run this against a new engine, a new release or other flags:

```console
$ tokentape certify http://127.0.0.1:8000
```

It sends each shape of a call to the engine alone and through TokenTape, compares what an agent sees, checks the recorded
step, and lets the engine score the recorded tokens again (vLLM and SGLang). Exit code 0: every shape is exact, flagged for
a known limitation, or not served by the engine. With `--admin` it also changes the weight version, pauses, and aborts
**all** calls of the engine. Its last line is for bug reports. The tables below are its results with the engines of `make
test-engine`, which compares each run with them: on a CPU, with tiny models. vLLM 0.32.0 in bfloat16 on one H200 (torch
2.11, Triton attention, eager) has the same result in each cell; its scores of 1,816 recorded tokens differ by 0.009 on
average, 0.062 at most.

| result | meaning |
|---|---|
{meanings}

**Logprobs.** `record.logprobs` determines which logprobs are requested if the client requests none:

- `full` (default) and `sampled` record a logprob for each sampled id. For SGLang's completions `sampled` omits the
  alternative to each token.
- `off` is for trainers that compute logprobs themselves. Steps are still exact, except with SGLang before 0.5.23
  (`no_token_ids`). Logprobs are null in the formats `sequences` and `steps`, and formats that require them reject the
  rollout. Calls whose responses need logprobs (Atropos, Osmosis, llama.cpp's live streams and calls with several
  choices) still request them.

**Truncated sampling.** With top-k, top-p or min-p, some engines return logprobs over the tokens that these kept. A trainer
that normalizes over all tokens then has likelihood ratios other than 1 for unchanged weights; it has to normalize over the
same tokens, the *sampling mask*.

| engine | logprobs | sampling mask |
|---|---|---|
| vLLM, `processed_logprobs` | over the kept tokens | of `/inference/v1/generate` only, with `--return-sampling-mask` |
| vLLM, `raw_logprobs` | over all tokens | - |
| SGLang | over all tokens; with a mask over the kept ones | of chat calls with a `top_k`, if `record.sampling_masks` is true |

vLLM's was run on 0.32.0, which returns masks on GPUs only, also in streams, and then status 500 for calls without a `top_k` or
with temperature 0; SGLang's was run on 0.5.23, with a `top_k` of at most 4,000.

Rows name it: `logprobs_over` of a span is `mask` (the row has `sampling_mask`) or `truncated` (the kept tokens are unknown:
drop or correct such spans), and absent for logprobs over all tokens ([formats](formats.md#sequences)).
Set a `top_k` for all calls with `sampling.default`. Scored again by SGLang
0.5.23 over the recorded masks, at temperatures 1 and 0.7, the logprobs differ by less than 1e-5; by vLLM 0.32.0 in bfloat16, at
temperatures of 0.7 to 1.5, by 0.010 on average and 0.098 at most.

**Routed experts** of mixture-of-experts models, for routing replay. With `record.routed_experts`, they are requested of
SGLang (`--enable-return-routed-experts`) for chat calls; vLLM with `--enable-return-routed-experts` returns them for all
unstreamed calls, and in streams of `/inference/v1/generate`. A continued call requests those from the last sampled token on
only, which is read for the first time. Rows of `sequences` have the experts of every token but the last once, or none if a
step lacks some; a step with another number of them is flagged `bad_experts`. Both engines return them on GPUs only. vLLM
0.32.0 was run on one, with a small model: all rows of conversations of six calls had them. Of 7,033 tokens that two calls
processed, 7 had other experts in the later call; rows have those of the first one. SGLang's were read in 0.5.23, and run
with the simulator.
"""

_UNSEEN = """## What the checks cannot detect

- Two events of a vLLM stream with **one choice** that the engine sent in the wrong order. For several choices or
  prompts, token counts in each event (`continuous_usage_stats`) reveal a swap.
- A lost or repeated event in a stream without usage. TokenTape requests it; streams of vLLM's chat and completions and
  of SGLang's completions that lack it are flagged `no_usage`.
- A wrong id that the engine reports consistently. `tokentape audit` scores it again.

Clients of a vLLM with `--enable-force-include-usage` get streams of several choices without usage, until a stream of
one choice of the same rollout, or of three others within ten minutes, reveals the option. Clients of SGLang with
`stream_response_default_include_usage` get usage only on request.

"""
_TRANSLATED = """## Dialects translated to chat

Their steps are chat steps, and as exact. The tree reports as drift what [Messages](dialects.md#what-is-lost) and
[Responses](dialects.md#items-that-the-agent-sends-back) cannot carry.
"""


def exactness_page(made: str) -> str:
    """Return the page."""
    meanings = "\n".join(f"| {verdict} | {meaning} |" for verdict, meaning in MEANINGS.items())
    engines = "\n".join("\n".join(_engine(engine)) for engine in ENGINES.values())
    return f"# Exactness\n\n{made}{_OPENING.replace('{meanings}', meanings)}\n{engines}\n{_UNSEEN}{_TRANSLATED}"


def _engine(engine: Engine) -> Iterator[str]:
    yield f"## {_NAMES.get(engine.kind, engine.kind)}\n"
    yield (
        f"Default of `logprobs_mode`: `{engine.logprobs_mode}`.\n"
        if engine.logprobs_mode
        else "The meaning of its logprobs is unknown; none are recorded.\n"
    )
    for path in sorted(CERTIFIED.glob(f"{engine.kind}-*.json")):
        version, _, flags = path.stem.removeprefix(f"{engine.kind}-").partition("-")
        yield from _certified(f"{version} {flags.replace('-', ' ')}".strip(), orjson.loads(path.read_bytes()))
    yield "| limitation | when | flagged as | source |\n|---|---|---|---|"
    for quirk in QUIRKS:
        if quirk.engine == engine.kind:
            where = "live streams" if quirk.framings == "streams" else "always"
            codes = ", ".join(f"`{code}`" for code in quirk.codes if code in PROBLEMS)
            yield f"| {quirk.what} | {', '.join(quirk.dialects)}; {where} | {codes} | {quirk.source} |"
    yield ""


def _certified(version: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield the results of one engine; shapes of a topic with equal results are one row."""
    engine, scores = found["engine"], found["scores"]
    streams = " and ".join(f"{dialect} {mode}" for dialect, mode in engine["streams"].items())
    yield f"### {version}, certified with TokenTape {found['tokentape']} on {found['date']}\n"
    counts = ", ".join(f"{found['counts'][verdict]} {verdict}" for verdict in MEANINGS if verdict in found["counts"])
    scored = f" It scored {scores['tokens']:,} recorded tokens again." if scores["tokens"] else ""
    yield f"Streams: {streams}. {counts}.{scored}\n"
    yield "| calls | whole | streamed | why |\n|---|---|---|---|"
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in found["rows"]:
        cells = [row["whole"], row["streamed"]]
        verdicts = [
            "" if cell is None else f"**{cell['verdict']}**" if cell["verdict"] in FAULTS else cell["verdict"]
            for cell in cells
        ]
        why = " ".join(dict.fromkeys(_why(cell) for cell in cells if cell is not None and cell["why"]))
        rows.setdefault((row["topic"], *verdicts, why.replace("|", "\\|")), []).append(row["name"])
    for (topic, whole, streamed, why), names in rows.items():
        yield f"| {topic}: {'; '.join(names)} | {whole} | {streamed} | {why} |"
    yield ""


def _why(cell: dict[str, Any]) -> str:
    """Return the sentence of a result; the engine's own words are in the file only."""
    if cell["verdict"] in FAULTS:
        return "docs/certified has the difference."
    sentence: str = cell["why"]
    return sentence.partition(": ")[0] if cell["verdict"] == "not served" else sentence
