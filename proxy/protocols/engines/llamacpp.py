"""llama.cpp's server: ids inside its logprobs, complete ids by `verbose`, prompt ids by a follow-up request.

Verified on the server inside the wheel xllamacpp 2026.10.11549, with SmolLM2-135M-Instruct.

Rule 1: a character split over several tokens has an entry for its last token only, and a matched stop string has none;
        so entries are not assumed to be complete: `__verbose.tokens` is (in every case tried, with as many ids as usage
        counts), and disagreements with it are flagged. It covers the first choice only.
Rule 2: `top_logprobs: 1` is sent with `logprobs`: without it there are 20 alternatives per token, with 0 no logprobs.
Rule 3: `logprobs` with `tools` in a stream is a 400, so it is not requested there.
Rule 4: a chat stream has no entry for the EOS, and lists no tokens; a completions stream has both, like a whole response.
        The ids of a stream, and of several choices, are read from the entries: logprobs are always requested there.
Rule 5: the prompt's ids are never returned. `__verbose.prompt` is the text that was tokenized, and `/tokenize` tokenizes it
        again; the engine's count must agree.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.base import DialectName, Json, is_on, text_or_none
from proxy.protocols.engines.base import (
    BOTH,
    CHAT,
    COMPLETIONS,
    PROMPT_FIELDS,
    CallOptions,
    Engine,
    FollowUpRequest,
    Injection,
    Probed,
    Quirk,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    Traits,
    always,
    has,
    index_of,
    logprobs_of,
    requests_no_tokens,
    sampling_defaults,
    several,
    without,
)

_VERBOSE = "__verbose"


def _has_prompts_that_are_no_ids(body: Mapping[str, Any], _options: CallOptions) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and not all(type(token) is int for token in prompt)


_QUIRKS: Final[tuple[Quirk, ...]] = (
    Quirk(
        CHAT, "streams", "The EOS has no logprob, and `verbose` lists no tokens.",
        ("logprob_count", "completion_count", "no_logprobs"), "seen on 2026.10", always,
    ),
    Quirk(
        BOTH, "always", "A character of several tokens has a logprob for the last one only. Some tokens of a "
        "matched stop string have none.", ("logprob_count", "completion_count", "no_logprobs"), "seen on 2026.10",
        always,
    ),
    Quirk(
        BOTH, "always", "Several choices: usage counts only one of them.",
        ("uncounted",), "seen on 2026.10", several,
    ),
    Quirk(
        COMPLETIONS, "always", "Several prompts, or one of text and ids: their ids are unavailable.",
        ("no_prompt_ids", "uncounted"), "seen on 2026.10", _has_prompts_that_are_no_ids,
    ),
    Quirk(
        COMPLETIONS, "always", "`logprobs: 0`: no logprobs, and a stream has no ids then.",
        ("no_logprobs", "no_token_ids", "completion_count"), "run on 2026.10",
        lambda body, _: type(body.get("logprobs")) is int and body["logprobs"] == 0,
    ),
    Quirk(
        BOTH, "always", "`max_tokens: 0` still samples one token.", ("phantom_token",),
        "seen on 2026.10", requests_no_tokens,
    ),
    Quirk(
        BOTH, "always", "`post_sampling_probs`: probabilities in place of logprobs.",
        ("bad_logprob",), "seen on 2026.10", has("post_sampling_probs"),
    ),
)  # fmt: skip


class Llamacpp(Engine):
    """llama.cpp's server: a step is exact if every sampled id has a logprob, else it is flagged."""

    kind = "llamacpp"
    quirks = _QUIRKS
    logprobs_mode = "raw_logprobs"  # the same number at temperature 0 and 0.8
    sums_usage = False
    probe_paths = ("/props",)
    owners = ("llamacpp",)
    detokenize_path = "/detokenize"
    detokenized_field = "content"
    translation: Mapping[str, Any] = {"thought": "reasoning_content"}
    shape = StreamShape(
        head=frozenset({"created", "id", "model", "system_fingerprint", "object"}),
        role={"role": "assistant", "content": None},
        last=("timings",),
        null_logprobs=False,
    )

    def identify(self, probed: Probed) -> Traits | None:
        """It names itself in the `Server` header; /props has its build and its sampling defaults."""
        if probed.owner not in self.owners and not any(server.startswith("llama.cpp") for server in probed.servers):
            return None
        props = probed.facts("/props")
        defaults = sampling_defaults(props.get("default_generation_settings"), "params")
        return Traits(self.kind, text_or_none(props.get("build_info")), sampling_defaults=defaults)

    def inject(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Injection:
        """Request `verbose` and `return_tokens` for ids and the prompt, `logprobs` where the server permits it."""
        requested = options.requested
        if PROMPT_FIELDS.get(dialect) not in body:
            return Injection()  # refused, or vLLM's own endpoint
        problems = ("phantom_token",) if body.get("max_tokens") == 0 else ()  # the server samples one token
        fields: Json = {} if is_on(body.get("verbose")) else {"verbose": True}
        if not is_on(body.get("return_tokens")):
            fields["return_tokens"] = True
        keys = {_VERBOSE} if "verbose" in fields else set()
        # `__verbose` lacks tokens at the end of a stream, and the tokens of some choices.
        are_ids_there = requested.choices != 1 or is_on(body.get("stream"))
        needs_logprobs = options.adds_logprobs or (not requested.logprobs and are_ids_there)
        if needs_logprobs and not _refuses_logprobs(dialect, body):
            fields |= {"logprobs": True, "top_logprobs": 1} if dialect == "chat" else {"logprobs": 1}
            keys |= {"logprobs"} if dialect == "chat" else set()  # absent from a chat response without logprobs
        rules = StripRules(logprobs=dialect == "completions" and "logprobs" in fields, keys=frozenset(keys))
        return Injection(fields, rules, problems)

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Return false: logprobs are of the model's own logits, before grammars and samplers."""
        return False

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Return false for a stream with tools and logprobs: a 400 that must remain one."""
        return not (dialect == "chat" and body.get("tools") and is_on(body.get("logprobs")))

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        if not rules.anything:
            return response
        shown = {key: value for key, value in response.items() if key not in rules.keys}
        choices = response.get("choices")
        if isinstance(choices, list):
            shown["choices"] = [without(choice, rules) for choice in choices]
        return shown

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Strip a chunk: no event exists only because of the flags."""
        return self.strip(dialect, chunk, rules)

    def follow_up(self, dialect: DialectName, body: Mapping[str, Any], response: Json) -> FollowUpRequest | None:
        """Request the ids of the prompt, by its text; only available for chat and for a single text prompt."""
        prompt = (response.get(_VERBOSE) or {}).get("prompt")
        is_text = dialect == "chat" or isinstance(body.get("prompt"), str)
        if not is_text or not isinstance(prompt, str):
            return None
        return FollowUpRequest("/tokenize", {"content": prompt, "parse_special": True, "add_special": False})

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Return the ids in `__verbose` if present, else in the logprob entries."""
        verbose = response.get(_VERBOSE) or {}
        choices = response.get("choices") or ()
        # One block for all choices: with several choices it cannot be assigned.
        sampled = tuple(_sampled(choice, verbose if len(choices) == 1 else {}) for choice in choices)
        prompt = body.get("prompt") if dialect == "completions" else None
        is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        prompt_ids, notes = list(prompt) if isinstance(prompt, list) and is_ids else None, {}
        if prompt_ids is None and isinstance(found, dict):
            prompt_ids, notes = found.get("tokens"), {"prompt_ids": "tokenized again"}
        found_problems = {
            "ids_disagree": any(map(_disagree, choices, sampled)),
            "uncounted": any(choice.counted is None for choice in sampled),
            "prompt_count": verbose.get("tokens_evaluated") not in {None, len(prompt_ids or ())},
        }
        problems = tuple(code for code, holds in found_problems.items() if holds)
        return Tokens(prompt_ids, sampled, problems, notes)


def _refuses_logprobs(dialect: DialectName, body: Mapping[str, Any]) -> bool:
    """Return whether logprobs would be refused, or would make a refused call (`top_logprobs` without them) succeed."""
    if dialect == "completions":
        return False
    return bool(body.get("top_logprobs")) or (is_on(body.get("stream")) and bool(body.get("tools")))


def _sampled(choice: Json, verbose: Json) -> Sampled:
    """Return one choice's tokens. If entries do not match the complete ids, there are fewer logprobs than ids."""
    entries = (choice.get("logprobs") or {}).get("content")
    of_entries = None if entries is None else [entry["id"] for entry in entries]
    return Sampled(
        index=index_of(choice),
        ids=verbose.get("tokens") or of_entries,
        logprobs=logprobs_of(choice),
        finish_reason=choice.get("finish_reason"),
        stop_reason=verbose.get("stopping_word") or None,
        counted=verbose.get("tokens_predicted"),
    )


def _disagree(choice: Json, sampled: Sampled) -> bool:
    entries = (choice.get("logprobs") or {}).get("content") or ()
    ids = sampled.ids or []
    return len(entries) == len(ids) and any(entry["id"] != token for entry, token in zip(entries, ids, strict=True))
