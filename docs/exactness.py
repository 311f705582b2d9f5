"""docs/exactness.md: for each engine and mode what is exact, what is flagged and why, out of the tables in the code."""

from collections.abc import Iterator

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines import ENGINES, Engine, Traits
from proxy.protocols.engines.quirks import QUIRKS, CallTraits, Quirk, applicable, choose_framing
from proxy.trajectory.fidelity import PROBLEMS

_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "plain": "Any other (plain)"}
_OPENING = """A step is **exact** when everything shows that its ids and logprobs are what the engine sampled, and that the
prompt's ids are what it saw; else it is **flagged** with each reason ([fidelity.md](fidelity.md)), and left out of exports
unless asked for. The checks run on every answer: what stands below is what is *known beforehand*, by engine and version. A
step that fails without a line here is flagged all the same, and logged and counted as a new fact
(`tokentape_unexpected_losses_total`).

`record.streaming: auto` sends a stream upstream as a stream (*live*), unless a line below says that the engine's streams
lose something: then the call is asked unstreamed and the answer is told as the engine's own events (*replay*), with
comments as keep-alive meanwhile. `GET /engines` shows which engine was found, and which of the two its streams are.

`record.logprobs` says which logprobs are asked for where the client asks for none; what a client asks itself it gets, and it is
recorded. `full`, the default, and `sampled` give each sampled id its logprob: what an engine is asked differs only with
SGLang's completions, where `sampled` leaves out the alternative beside the token's own. `off` asks for none, where the trainer
computes them anew: ids are as complete, and the step is exact without them. Rows of the formats `sequences` and `steps` then
have null for each; a format that has one for each sampled token refuses the rollout. Sessions of Atropos, its `/generate`
and Osmosis' flat calls, whose answers have logprobs, get them all the same. llama.cpp's ids are among its logprobs in a
live stream and with several choices, so they are asked for there; SGLang older than 0.5.23 tells ids with logprobs alone, if
at all, so its steps are flagged `no_token_ids`.
"""

_UNSEEN = """## What no check shows

The checks compare what one answer contains. They cannot show:

- A vLLM stream of **one choice** in which two events changed places. TCP keeps their order; only the engine itself could mix
  them up. With several choices, or several prompts, each event also counts the tokens of its choice
  (`continuous_usage_stats`), so there it shows. For one choice that costs more of a call than the check is worth.
- A lost or repeated event in a stream whose engine ignores `stream_options.include_usage`: nothing counts its tokens. vLLM,
  SGLang and llama.cpp all send the usage. A stream of vLLM's chat or completions, or of SGLang's completions, that should
  have it and does not is flagged `no_usage`.
- An id that the engine reports wrongly everywhere, with counts and logprobs that fit. `tokentape audit` scores it again.

Two kinds of servers send usage in streams unasked. A vLLM with `--enable-force-include-usage` is recognised by its first
stream of one choice; until then a stream of several choices reaches its client without the usage. An SGLang with
`stream_response_default_include_usage` looks like any other, so its clients see no usage unless they request it.

"""
_TRANSLATED = """## Dialects by way of chat

Their steps are chat steps, and as exact. What such a dialect cannot carry to the agent and back is not in the next prompt as it
was sampled; the tree shows it as drift ([dialects.md](dialects.md)).

| dialect | what is lost | when | the drift |
|---|---|---|---|
"""
_NOT_CARRIED = (
    ("messages", "how a call's arguments were spelt", "nobody knows the call any more", "`tool_call_rewritten`"),
    ("messages", "reasoning", "the agent leaves `thinking` blocks out", "`reasoning_stripped`"),
    ("messages", "that content was empty, not null", "the agent leaves empty blocks out", "as the template has it"),
    ("messages", "empty reasoning", "always: it is none", "as the template has it"),
    ("messages", "the id of a call", "it had none, or another's of its message", "`template`, if ids are written"),
    ("responses", "reasoning", "the agent leaves `reasoning` items out, or their text and ids", "`reasoning_stripped`"),
    ("responses", "how arguments were spelt", "nobody knows the call any more", "`tool_call_rewritten`"),
    ("responses", "empty reasoning", "always: it is none", "as the template has it"),
    ("responses", "the id of a call", "it had none: one is made, and stays", "`template`, if ids are written"),
    (
        "responses",
        "where text or reasoning stood after a call",
        "always: it comes back before it",
        "as the template has it",
    ),
)


def exactness_page(made: str) -> str:
    """The page."""
    engines = "\n".join("\n".join(_engine(engine)) for engine in ENGINES.values())
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _NOT_CARRIED)
    return f"# Exactness\n\n{made}{_OPENING}\n{engines}\n{_UNSEEN}{_TRANSLATED}{rows}"


def _engine(engine: Engine) -> Iterator[str]:
    yield f"## {_NAMES.get(engine.kind, engine.kind)}\n"
    yield (
        f"Logprobs are recorded as `{engine.logprobs_mode}` unless configured otherwise.\n"
        if (engine.logprobs_mode)
        else "Nobody says what its logprobs are of; none are recorded.\n"
    )
    yield "| dialect | unstreamed | streams, live | streams, `auto` |\n|---|---|---|---|"
    for dialect in _dialects(engine):
        yield f"| {dialect} | {_whole(engine, dialect)} | {_live(engine, dialect)} | {_auto(engine, dialect)} |"
    yield "\n| what is lost | when | the step is flagged | known from |\n|---|---|---|---|"
    for loss in QUIRKS:
        if loss.engine == engine.kind:
            where = "live streams" if loss.framings == "streams" else "always"
            codes = ", ".join(f"`{code}`" for code in loss.codes if code in PROBLEMS)
            yield f"| {loss.what} | {', '.join(loss.dialects)}; {where} | {codes} | {loss.source} |"
    yield ""


def _dialects(engine: Engine) -> tuple[DialectName, ...]:
    return ("chat", "completions", "generate") if engine.kind == "vllm" else ("chat", "completions")


def _met(engine: Engine, dialect: DialectName, *, live: bool, has_parser: bool) -> list[Quirk]:
    """What an ordinary call to a current server meets."""
    return applicable(engine.kind, _ordinary(engine, dialect, has_parser=has_parser), live=live)


def _ordinary(engine: Engine, dialect: DialectName, *, has_parser: bool) -> CallTraits:
    return CallTraits(dialect, {"stream": True}, Traits(engine.kind, "99", has_parser=has_parser))


def _whole(engine: Engine, dialect: DialectName) -> str:
    losses = [loss for loss in QUIRKS if loss.engine == engine.kind and dialect in loss.dialects]
    if any("no_token_ids" in loss.codes for loss in losses if loss.framings == "always"):
        return "flagged: text only"
    return "exact, but for the lines below" if losses else "exact"


def _live(engine: Engine, dialect: DialectName) -> str:
    cases = {
        has_parser: any(loss.framings == "streams" for loss in _met(engine, dialect, live=True, has_parser=has_parser))
        for has_parser in (True, False)
    }
    if all(cases.values()):
        return "flagged"
    return "as unstreamed if the server has a parser, else flagged" if any(cases.values()) else "as unstreamed"


def _auto(engine: Engine, dialect: DialectName) -> str:
    """How a stream goes, by what is known of the server."""
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
