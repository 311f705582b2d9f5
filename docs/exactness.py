"""Generates docs/exactness.md: what is exact and what is flagged, by engine.

The results of real engines are in docs/certified: `make certified` runs `tokentape certify` and records them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from proxy.cli.certify.certificate import FAULTS, MEANINGS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import Engine
from proxy.trajectory.step import PROBLEMS

CERTIFIED = Path(__file__).parent / "certified"
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "plain": "Any other server (plain)"}
_OPENING = """\
A step is **exact** if all checks show that its ids and logprobs are what the engine sampled, and its prompt ids what the engine
processed. Otherwise it is **flagged** with each [reason](fidelity.md), and only `include=flagged` exports it. A reason that the
tables below lack is logged and counted in `tokentape_unexpected_losses_total`.

**Is training on my engine safe?** Run this against a new engine, release or flags:

```console
$ tokentape certify http://127.0.0.1:8000
```

It sends each shape of a call to the engine alone and through TokenTape, compares the responses, checks the step, and lets vLLM
and SGLang score its tokens again. Exit code 0: every shape is exact, flagged for a known limitation, or not served. With
`--admin` it also changes the weight version, pauses, and aborts **all** calls of the engine. Below are results on a CPU with
tiny models ([files][certified]). vLLM 0.32.0 in bfloat16 on one H200 gives the same; its scores of 1,816 recorded tokens differ
by 0.009 on average, 0.062 at most.

[certified]: https://github.com/tokentape/tokentape/tree/main/docs/certified

*Flagged*: a known limitation of the engine. *Forks*: recorded exactly, but the conversation becomes several sequences, with
more tokens to train. Do not train after *wrong*, *differs* or *failed*; `certify` explains them.

**Streams.** `record.streaming: auto` streams a streamed call (*live*), unless the engine's streams have a limitation below;
then the engine gets it unstreamed, and the client the response as the engine's events (*replay*). `GET /engines` shows the
mode. vLLM reports the weight version of each token in `/inference/v1/generate`, SGLang in `/generate` and unstreamed or
replayed calls; other tokens get the announced policy version.

**Clients that leave** leave a partial step with the ids of every event that arrived: all ids, if the call has one choice and
TokenTape can abort it by its id: at SGLang, and for chat and completions at vLLM with `--enable-scale-out` or
`VLLM_SERVER_DEV_MODE=1`. TokenTape gives such calls an id (`rid`, `request_id`), from which the engine makes the `id` of its
response, unless the client chooses one, by `X-Request-Id` too. An update with `in_flight: resume` loses no token of them, also
unstreamed.

**Logprobs.** `record.logprobs` determines what is requested if the client requests no logprobs:

- `full` (default) and `sampled` record a logprob for each sampled id. `sampled` omits the alternative to each token in SGLang's
  completions.
- `off`, for trainers that compute logprobs themselves, keeps steps exact, except with SGLang before 0.5.23 (`no_token_ids`).
  `sequences` and `steps` contain null; formats that require logprobs reject the rollout. Calls whose responses need logprobs
  (Atropos, Osmosis, llama.cpp's live streams and calls with several choices) still request them.

**Truncated sampling.** With top-k, top-p or min-p, some engines return logprobs over the kept tokens only. Normalize over the
same tokens, the *sampling mask*.

| engine | logprobs | sampling mask |
|---|---|---|
| vLLM, `processed_logprobs` | over the kept tokens | of `/inference/v1/generate` only, with `--return-sampling-mask` |
| vLLM, `raw_logprobs` | over all tokens | - |
| SGLang | over all tokens; with a mask over the kept ones | of chat calls with a `top_k`, if `record.sampling_masks` is true |

vLLM 0.32.0 returns masks on GPUs only, and then status 500 for calls without a `top_k` or with temperature 0. SGLang 0.5.23 ran
with a `top_k` of at most 4,000. Set a `top_k` for all calls with `sampling.default`. `logprobs_over` of a row's span shows what
its logprobs are over ([formats](formats.md#sequences)). Scored again over them, logprobs differ by less than 1e-5 on SGLang
0.5.23, and by 0.010 on average, 0.098 at most, on vLLM 0.32.0 in bfloat16.

**Routed experts** of mixture-of-experts models, for routing replay, on GPUs only. `record.routed_experts` requests them for
SGLang's chat calls (`--enable-return-routed-experts`); vLLM with the same flag returns them for all unstreamed calls, and in
streams of `/inference/v1/generate`. Rows of `sequences` carry the experts of every token but the last once, or none if a step
lacks some; a step with another number is flagged `bad_experts`. A token that two calls process can have other experts in the
later one (7 of 7,033 on vLLM 0.32.0); rows keep the first. SGLang's are tested with the simulator only.
"""

_UNSEEN = """## What the checks cannot detect

- Two swapped events of a vLLM stream with **one choice**. With several choices or prompts, token counts in each event
  (`continuous_usage_stats`) reveal a swap.
- A lost or repeated event in a stream without usage. TokenTape requests usage; streams of vLLM's chat and completions and of
  SGLang's completions that lack it are flagged `no_usage`.
- A wrong id that the engine reports consistently. `tokentape audit` scores it again.

Clients of a vLLM with `--enable-force-include-usage` get streams of several choices without usage, until a stream of one choice
of the same rollout, or of three others within ten minutes, reveals the option. Clients of SGLang with
`stream_response_default_include_usage` get usage only on request.
"""


def exactness_page(made: str) -> str:
    """Return the page."""
    engines = "\n".join("\n".join(_engine(engine)) for engine in ENGINES.values())
    return f"# Exactness\n\n{made}{_OPENING}\n{engines}\n{_UNSEEN}"


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
    yield "| limitation | when | flagged as |\n|---|---|---|"
    for quirk in engine.quirks:
        where = "; live streams only" if quirk.framings == "streams" else ""
        codes = ", ".join(f"`{code}`" for code in quirk.codes if code in PROBLEMS)
        yield f"| {quirk.what} | {', '.join(quirk.dialects)}{where} | {codes} |"
    yield ""


def _certified(version: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield the results of one engine: the number of shapes by verdict, and the names of those that are not exact."""
    engine, scores = found["engine"], found["scores"]
    streams = " and ".join(f"{dialect} {mode}" for dialect, mode in engine["streams"].items())
    yield f"### {version}, certified with TokenTape {found['tokentape']} on {found['date']}\n"
    counts = ", ".join(f"{found['counts'][verdict]} {verdict}" for verdict in MEANINGS if verdict in found["counts"])
    scored = f" It scored {scores['tokens']:,} recorded tokens again." if scores["tokens"] else ""
    yield f"Streams: {streams}. {counts}.{scored}\n"
    names: dict[str, dict[str, list[str]]] = {}
    for row in found["rows"]:
        verdicts = {cell["verdict"] for cell in (row["whole"], row["streamed"]) if cell is not None}
        for verdict in verdicts - {"exact", "ok", "not served"}:
            names.setdefault(verdict, {}).setdefault(row["topic"], []).append(row["name"])
    for verdict, topics in names.items():
        listed = "; ".join(f"{topic}: {', '.join(shapes)}" for topic, shapes in topics.items())
        yield f"{f'**{verdict}**' if verdict in FAULTS else verdict.capitalize()}: {listed}.\n"
