"""The endpoints of vLLM and SGLang that sample from ids without a chat template, forwarded without translation."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from proxy.errors import UnprocessableRequest
from proxy.protocols.accumulators import Accumulator, GenerateAccumulator, Json, text_of
from proxy.protocols.dialects.base import Dialect, DialectName, ResponseOptions, is_on, requested_of, sample_count

_BOUND = "max_completion_tokens"  # of the other dialects; vLLM's SamplingParams accept only `max_tokens`


class Generate(Dialect):
    """`POST /inference/v1/generate` of vLLM: one prompt of ids, `sampling_params.n` choices.

    vLLM 0.32.0 serves it with `--enable-scale-out`, and otherwise returns 403 with an error in OpenAI's format, which is
    forwarded. Verified there, streamed and unstreamed: the sampled `token_ids` are always returned, in both output modes.
    `return_token_ids` adds the ids of the prompt (streamed: keys of the first chunk, absent without it). Logprobs are returned
    if `sampling_params.logprobs` is not null; 0 requests the sampled token's own.
    """

    name: DialectName = "generate"
    accumulator = GenerateAccumulator
    prompt_field = "token_ids"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `token_ids` refers to the prompt's ids: the sampled ones are always returned."""
        sampling = self.sampling(body)
        return requested_of(body, sampling, logprobs=sampling.get("logprobs") is not None)

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `sampling_params` object, in which the bound on tokens has one name only."""
        params = body.get("sampling_params")
        return {name: value for name, value in params.items() if name != _BOUND} if isinstance(params, dict) else {}

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return the prompt's ids; None if image placeholders lengthen them (`features`), or the engine is to truncate them."""
        ids = body.get("token_ids")
        is_changed = body.get("features") is not None or self.sampling(body).get("truncate_prompt_tokens") is not None
        return [ids] if isinstance(ids, list) and not is_changed else None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return a new `sampling_params` object. A body without one remains unchanged: the engine refuses it."""
        params = body.get("sampling_params")
        if not isinstance(params, dict) or not (fields or unset):
            return {}, set()
        changes = {name: value for name, value in fields.items() if name != _BOUND}
        if _BOUND in fields:
            changes["max_tokens"] = fields[_BOUND]
        unchanged = {name: value for name, value in params.items() if name not in unset}
        return {"sampling_params": {**unchanged, **changes}}, set()


# The parameters of `sampling_params` that other dialects name differently.
_OTHER_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_NATIVE_NAMES: Final = {"max_completion_tokens": "max_new_tokens"} | {new: old for old, new in _OTHER_NAMES.items()}
_NOT_SAMPLING: Final = frozenset({"model"})  # in the rules of a rollout: the engine rejects unknown parameters
# The lists of `meta_info` with an entry per sampled token, which a continued stream continues (tokenizer_manager.py:258).
_LISTS: Final = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)  # fmt: skip


class SglangGenerateAccumulator(Accumulator):
    """Accumulates the events of a stream.

    A stream repeats all of a choice in each event, or continues it (server flag `--incremental-streaming-output`). Its counts
    show which: `completion_tokens` is always the count of the whole choice. An event that repeats may have more ids than it
    counts, since the server adds to its lists before it writes them; the last one has as many.
    """

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self.problems: set[str] = set()
        self.is_cumulative = True  # until a choice is continued

    def feed(self, chunk: Json) -> bool:
        index = chunk.get("index", 0)
        if type(index) is not int:
            raise TypeError(f"a choice's index must be an integer, not {index!r}")
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        elif choice.is_finished:
            self.problems.add("content_after_end")
        before = choice.is_finished
        choice.feed(chunk, self.problems)
        self.is_cumulative = self.is_cumulative and not choice.is_continued
        self.finished += choice.is_finished and not before
        return choice.is_finished and not before

    def finish(self) -> Json:
        return {"choices": [choice.finish() for _, choice in sorted(self._choices.items())]}


class _Choice:
    """One choice of a stream: its last event, and what is joined of the events that it continues."""

    __slots__ = ("_ids", "_last", "_lists", "_texts", "is_continued", "is_finished")

    def __init__(self) -> None:
        self._last: Json = {}
        self._ids: list[Any] = []
        self._lists: dict[str, list[Any]] = {}
        self._texts: list[str] = []
        self.is_continued = False
        self.is_finished = False

    def feed(self, chunk: Json, problems: set[str]) -> None:
        meta, ids = chunk["meta_info"], chunk["output_ids"]
        count = meta["completion_tokens"]
        if type(ids) is not list or type(count) is not int:
            raise TypeError("output_ids must be a list, and completion_tokens an integer")
        if self._last and _constants(chunk) != _constants(self._last):
            problems.add("changed_midstream")
        lists = {name: meta[name] for name in _LISTS if meta.get(name)}
        text = text_of(chunk.get("text", ""))
        if self.is_continued or len(ids) < count or ids[: len(self._ids)] != self._ids:
            self._continue(ids, lists, count)
            self._texts.append(text)
            if len(self._ids) != count:
                problems.add("running_count")
        else:
            self._ids, self._lists, self._texts = ids, {**self._lists, **lists}, [text] if text else self._texts
        self._last = chunk
        self.is_finished = meta["finish_reason"] is not None

    def _continue(self, ids: list[Any], lists: Mapping[str, list[Any]], count: int) -> None:
        if not self.is_continued:  # until now, these are lists of events
            self._ids, self._lists = self._ids.copy(), {name: values.copy() for name, values in self._lists.items()}
            self.is_continued = True
        _join(self._ids, ids, count)
        for name, values in lists.items():
            _join(self._lists.setdefault(name, []), values, count)

    def finish(self) -> Json:
        last = self._last
        texts = {"text": "".join(self._texts)} if "text" in last else {}
        meta, count = last["meta_info"], None if self.is_finished else last["meta_info"]["completion_tokens"]
        lists = {name: values[:count] for name, values in self._lists.items()}
        return {**last, **texts, "output_ids": self._ids[:count], "meta_info": {**meta, **lists}}


def _constants(chunk: Json) -> tuple[Any, ...]:
    """Return the values that do not change within the events of a choice."""
    meta = chunk["meta_info"]
    return meta.get("id"), meta.get("prompt_tokens"), chunk.get("prompt_token_ids")


def _join(known: list[Any], more: list[Any], count: int) -> None:
    """Extend a list of `count` entries in total.

    The last event of an aborted choice repeats the last token (serving_chat.py:2537).
    """
    surplus = len(known) + len(more) - count
    known.extend(more[surplus:] if surplus > 0 and known[-surplus:] == more[:surplus] else more)


class SglangGenerate(Dialect):
    """`POST /generate` of SGLang, text or ids in and out: one or several prompts, `sampling_params.n` choices of each.

    Shapes were seen on SGLang 0.5.23. A response has one object for each choice: alone for one prompt and one sample, else in a
    list. Here these objects are `choices`: in a list each has an `index`, as in streams; a single one has none.
    """

    name: DialectName = "sglang_generate"
    counts_in_choices = True
    accumulator = SglangGenerateAccumulator
    prompt_field = "text"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `token_ids` refers to the prompt's ids: the sampled ones are always returned."""
        samples, prompts = sample_count(_first(body)), _prompt_count(body)
        logprobs = body.get("return_logprob")
        return ResponseOptions(
            token_ids=is_on(body.get("return_prompt_token_ids")),
            logprobs=any(map(is_on, logprobs)) if isinstance(logprobs, list) else is_on(logprobs),
            samples=samples,
            choices=samples * prompts if samples and prompts else None,
        )

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters by the names of other dialects; from a list, parameters with equal values for all prompts."""
        params = body.get("sampling_params")
        first = _first(body)
        if isinstance(params, list):
            first = {
                name: value
                for name, value in first.items()
                if all(isinstance(other, dict) and name in other and other[name] == value for other in params)
            }
        found = {_OTHER_NAMES.get(name, name): value for name, value in first.items()}
        processor = body.get("custom_logit_processor")
        return found if processor is None else {**found, "custom_logit_processor": processor}

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        ids = body.get("input_ids")
        if body.get("text") is not None or not isinstance(ids, list) or not ids:
            return None
        return ids if isinstance(ids[0], list) else [ids]

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return new `sampling_params`.

        Raises UnprocessableRequest for a list of different parameters: a rollout's rules cannot be applied to it.
        """
        changes = {_NATIVE_NAMES.get(name, name): fields[name] for name in fields if name not in _NOT_SAMPLING}
        removed = {_NATIVE_NAMES.get(name, name) for name in unset}
        params = body.get("sampling_params")
        if not (changes or removed):
            return {}, set()
        if isinstance(params, list) and any(other != params[0] for other in params):
            raise UnprocessableRequest(
                "The sampling rules of this rollout cannot be applied to a list of different sampling_params. "
                "Send one object, or a call for each prompt.",
                param="sampling_params",
            )
        kept = {name: value for name, value in _first(body).items() if name not in removed}
        return {"sampling_params": {**kept, **changes}}, set()

    def read_body(self, body: Any) -> Json | None:
        if isinstance(body, list):
            choices = [{**choice, "index": index} for index, choice in enumerate(body) if _is_choice(choice)]
            return {"choices": choices} if choices and len(choices) == len(body) else None
        return {"choices": [body]} if _is_choice(body) else None

    def write_body(self, response: Mapping[str, Any]) -> Any:
        choices: list[Json] = response["choices"]
        if len(choices) == 1 and "index" not in choices[0]:
            return choices[0]
        return [{name: value for name, value in choice.items() if name != "index"} for choice in choices]


def has_beams(params: Any) -> bool:
    """Return whether `sampling_params`, or one of their list, requests a beam search."""
    some = params if isinstance(params, list) else [params]
    return any(isinstance(each, dict) and each.get("beam_width") not in (None, 1) for each in some)


def _first(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling parameters of the first prompt; empty if they are invalid."""
    params = body.get("sampling_params")
    first = params[0] if isinstance(params, list) and params else params
    return first if isinstance(first, dict) else {}


def _prompt_count(body: Mapping[str, Any]) -> int | None:
    """Return the number of prompts; None for an invalid body, which the engine rejects."""
    if (text := body.get("text")) is not None:
        return len(text) or None if isinstance(text, list) else 1
    prompts = body.get("input_ids", body.get("input_embeds"))
    if not isinstance(prompts, list) or not prompts:
        return None
    depth = 1 if body.get("input_ids") is not None else 2  # of one prompt: a list of ids, or of vectors
    first: Any = prompts
    for _ in range(depth):
        first = first[0] if isinstance(first, list) and first else None
    return len(prompts) if isinstance(first, list) else 1


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("meta_info"), dict) and type(value.get("output_ids")) is list
    )
