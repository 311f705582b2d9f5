"""Generates docs/exactness.md: what is exact and what is flagged, by engine and mode, from the tables in the code."""

from collections.abc import Iterator

from proxy.protocols.dialects.base import DialectName, ResponseOptions
from proxy.protocols.engines import ENGINES, Engine, EngineCall, Traits
from proxy.protocols.engines.quirks import QUIRKS, Quirk, applicable, choose_framing
from proxy.trajectory.fidelity import PROBLEMS

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

vLLM's was read in 0.32.0, which returns masks on GPUs only; SGLang's was run on 0.5.23, with a `top_k` of at most 4,000.

Rows name it: `logprobs_over` of a span is `mask` (the row has `sampling_mask`) or `truncated` (the kept tokens are unknown:
drop or correct such spans), and absent for logprobs over all tokens ([formats](formats.md#sequences),
[decision 114](decisions/114-sampling-masks.md)). Set a `top_k` for all calls with `sampling.default`. Scored again by SGLang
0.5.23 over the recorded masks, at temperatures 1 and 0.7, the logprobs differ by less than 1e-5.
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
    engines = "\n".join("\n".join(_engine(engine)) for engine in ENGINES.values())
    return f"# Exactness\n\n{made}{_OPENING}\n{engines}\n{_UNSEEN}{_TRANSLATED}"


def _engine(engine: Engine) -> Iterator[str]:
    yield f"## {_NAMES.get(engine.kind, engine.kind)}\n"
    yield (
        f"Default of `logprobs_mode`: `{engine.logprobs_mode}`.\n"
        if engine.logprobs_mode
        else "The meaning of its logprobs is unknown; none are recorded.\n"
    )
    yield "| dialect | unstreamed | streams, live | streams, `auto` |\n|---|---|---|---|"
    for dialect in _dialects(engine):
        yield f"| {dialect} | {_whole(engine, dialect)} | {_live(engine, dialect)} | {_auto(engine, dialect)} |"
    yield "\n| limitation | when | flagged as | source |\n|---|---|---|---|"
    for quirk in QUIRKS:
        if quirk.engine == engine.kind:
            where = "live streams" if quirk.framings == "streams" else "always"
            codes = ", ".join(f"`{code}`" for code in quirk.codes if code in PROBLEMS)
            yield f"| {quirk.what} | {', '.join(quirk.dialects)}; {where} | {codes} | {quirk.source} |"
    yield ""


def _dialects(engine: Engine) -> tuple[DialectName, ...]:
    own: dict[str, tuple[DialectName, ...]] = {"vllm": ("generate",), "sglang": ("sglang_generate",)}
    return ("chat", "completions", *own.get(engine.kind, ()))


def _met(engine: Engine, dialect: DialectName, *, live: bool, has_parser: bool) -> list[Quirk]:
    """Return the quirks that apply to an ordinary call to a current server."""
    return applicable(engine.kind, _ordinary(engine, dialect, has_parser=has_parser), live=live)


def _ordinary(engine: Engine, dialect: DialectName, *, has_parser: bool) -> EngineCall:
    traits = Traits(engine.kind, "99", has_parser=has_parser)
    return EngineCall(dialect, {"stream": True}, ResponseOptions(), traits)


def _whole(engine: Engine, dialect: DialectName) -> str:
    quirks = [quirk for quirk in QUIRKS if quirk.engine == engine.kind and dialect in quirk.dialects]
    if any("no_token_ids" in quirk.codes for quirk in quirks if quirk.framings == "always"):
        return "flagged: text only"
    return "exact, except below" if quirks else "exact"


def _live(engine: Engine, dialect: DialectName) -> str:
    cases = {
        has_parser: any(
            quirk.framings == "streams" for quirk in _met(engine, dialect, live=True, has_parser=has_parser)
        )
        for has_parser in (True, False)
    }
    if all(cases.values()):
        return "flagged"
    return "as unstreamed if the server has a parser, else flagged" if any(cases.values()) else "as unstreamed"


def _auto(engine: Engine, dialect: DialectName) -> str:
    """Return the mode of streams with `auto`, by the server's traits."""
    can_replay = engine.can_replay(dialect, {"stream": True})
    cases = {
        has_parser: choose_framing(
            "auto", engine.kind, _ordinary(engine, dialect, has_parser=has_parser), can_replay=can_replay
        )
        for has_parser in (True, False)
    }
    if len(set(cases.values())) == 1:
        return cases[True]
    return f"{cases[True]} if the server has a parser, else {cases[False]}"
