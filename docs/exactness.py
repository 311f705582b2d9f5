"""Generates docs/exactness.md: what is exact and what is flagged, by engine and mode, from the tables in the code."""

from collections.abc import Iterator

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines import ENGINES, Engine, Traits
from proxy.protocols.engines.quirks import QUIRKS, CallTraits, Quirk, applicable, choose_framing
from proxy.trajectory.fidelity import PROBLEMS

_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "plain": "Any other server (plain)"}
_OPENING = """After this page you know which calls of your engine are recorded exactly, and which are flagged and why.

A step is **exact** if all checks show that its ids and logprobs are those that the engine sampled, and that the prompt
ids are those that the engine processed. Otherwise it is **flagged** with each [reason](fidelity.md), and only
`include=flagged` exports it. The tables below list the known limitations of each engine; a step that is flagged for
another reason is logged and counted in `tokentape_unexpected_losses_total`.

**Streams.** With `record.streaming: auto`, TokenTape sends a streamed call as a stream (*live*), unless the engine's
streams have a limitation below. Then it sends the call unstreamed and renders the response as the engine's events
(*replay*), with comments as keep-alive meanwhile. `GET /engines` shows the detected engine and the mode of its streams.

**Logprobs.** `record.logprobs` determines which logprobs are requested if the client requests none:

- `full` (default) and `sampled` record a logprob for each sampled id. They differ only for SGLang's completions:
  `sampled` omits the alternative to each token.
- `off` requests none, for trainers that compute logprobs themselves. Steps are still exact; logprobs are null in the
  formats `sequences` and `steps`, and formats that require them reject the rollout. Calls whose responses contain
  logprobs (Atropos, Osmosis) still request them, and so do llama.cpp's live streams and calls with several choices,
  whose logprobs contain the ids. Steps of SGLang before 0.5.23 are flagged `no_token_ids`.
"""

_UNSEEN = """## What the checks cannot detect

The checks compare the parts of one response with each other. They cannot detect:

- Two events of a vLLM stream with **one choice** in the wrong order. TCP preserves the order, so only the engine could
  swap them. With several choices or prompts TokenTape requests token counts in each event (`continuous_usage_stats`),
  which reveal a swap; for one choice that is too expensive.
- A lost or repeated event in a stream without usage. vLLM, SGLang and llama.cpp send usage on request
  (`stream_options.include_usage`); a stream of vLLM's chat or completions, or of SGLang's completions, without it is
  flagged `no_usage`.
- A wrong id that the engine reports consistently, with matching counts and logprobs. `tokentape audit` scores it again.

Some servers send usage that was not requested. TokenTape detects vLLM with `--enable-force-include-usage` by its first
stream of one choice; until then, clients get streams of several choices without usage. Clients of SGLang with
`stream_response_default_include_usage` get usage only on request.

"""
_TRANSLATED = """## Dialects translated to chat

Their steps are chat steps, and as exact. What such a dialect cannot carry to the agent and back is missing in the next
prompt, and the tree reports it as drift. See what is lost with [Messages](dialects.md#what-is-lost) and
[Responses](dialects.md#items-that-the-agent-sends-back).
"""


def exactness_page(made: str) -> str:
    """Return the page."""
    engines = "\n".join("\n".join(_engine(engine)) for engine in ENGINES.values())
    return f"# Exactness\n\n{made}{_OPENING}\n{engines}\n{_UNSEEN}{_TRANSLATED}"


def _engine(engine: Engine) -> Iterator[str]:
    yield f"## {_NAMES.get(engine.kind, engine.kind)}\n"
    yield (
        f"Logprobs are recorded as `{engine.logprobs_mode}` unless configured otherwise.\n"
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
    return ("chat", "completions", "generate") if engine.kind == "vllm" else ("chat", "completions")


def _met(engine: Engine, dialect: DialectName, *, live: bool, has_parser: bool) -> list[Quirk]:
    """Return the quirks that apply to an ordinary call to a current server."""
    return applicable(engine.kind, _ordinary(engine, dialect, has_parser=has_parser), live=live)


def _ordinary(engine: Engine, dialect: DialectName, *, has_parser: bool) -> CallTraits:
    return CallTraits(dialect, {"stream": True}, Traits(engine.kind, "99", has_parser=has_parser))


def _whole(engine: Engine, dialect: DialectName) -> str:
    quirks = [quirk for quirk in QUIRKS if quirk.engine == engine.kind and dialect in quirk.dialects]
    if any("no_token_ids" in quirk.codes for quirk in quirks if quirk.framings == "always"):
        return "flagged: text only"
    return "exact, except as listed below" if quirks else "exact"


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
