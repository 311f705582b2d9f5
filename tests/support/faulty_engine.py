"""A model of engines: from a truth (the sampled tokens) and a request to each engine's response, streamed or not.

The shapes are those recorded under tests/cassettes (vLLM 0.32.0, SGLang 0.5.23, llama.cpp 2026.10). Fields that a
request does not enable are absent or null, as there. `engine_faults` changes a response; `faulty_calls` draws requests
and encodes the bytes.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

Json = dict[str, Any]
MODEL = "tiny"
FINGERPRINT = "vllm-0.32.0-bab274f1"
CREATED = 1795229439


@dataclass
class Drawn:
    """One choice as it was sampled. `sizes` are the numbers of tokens in the chunks of a stream."""

    index: int
    prompt: int
    ids: list[int]
    logprobs: list[float]
    finish: str
    sizes: list[int]

    def pieces(self) -> list[tuple[list[int], list[float]]]:
        """Return the ids and logprobs of each chunk."""
        found, start = [], 0
        for size in self.sizes:
            found.append((self.ids[start : start + size], self.logprobs[start : start + size]))
            start += size
        return found


@dataclass
class Truth:
    """What was sampled: the ids of each prompt, and each choice."""

    prompts: list[list[int]]
    choices: list[Drawn]
    versions: list[str] = field(default_factory=lambda: ["default"])

    def usage(self, **more: Any) -> Json:
        prompt, sampled = sum(map(len, self.prompts)), sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled, **more}


@dataclass
class Event:
    """One event of a stream, or a whole response: a JSON value, with or without a name."""

    value: Any
    name: bytes = b""


@dataclass
class Written:
    """A response that is about to be sent. An unstreamed one has one event. `tail` are bytes after the end."""

    events: list[Event]
    is_stream: bool
    done: bool = True
    tail: bytes = b""


@dataclass
class EngineRequest:
    """A request to an engine: kind, endpoint, body, and the options that decide the response's shape."""

    kind: str
    dialect: str
    body: Json

    @property
    def sampling(self) -> Json:
        return self.body.get("sampling_params", {}) if self.dialect == "generate" else self.body

    @property
    def returns_logprobs(self) -> bool:
        value = self.sampling.get("logprobs")
        return value is True if self.dialect == "chat" else value is not None

    @property
    def names_ids(self) -> bool:
        return self.kind == "vllm" and self.body.get("return_tokens_as_token_ids") is True

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

    def usage_option(self, name: str) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get(name) is True


def write_response(request: EngineRequest, truth: Truth, random: Random) -> Written:
    """Return the correct response of this engine to this body."""
    writing = {"vllm": _Vllm, "sglang": _Sglang, "llamacpp": _Llamacpp}[request.kind](request, truth, random)
    if request.streams:
        return Written(writing.stream(), is_stream=True)
    return Written([Event(writing.whole())], is_stream=False)


class _Engine:
    """Code shared by the engines: texts of tokens, entries of logprobs, the order of chunks."""

    head: Json
    thoughts: Json = {"reasoning": None}

    def __init__(self, request: EngineRequest, truth: Truth, random: Random) -> None:
        self.request, self.truth, self.random = request, truth, random
        self.is_chat = request.dialect == "chat"
        kind = "chat.completion" if self.is_chat else "text_completion"
        kind += ".chunk" if self.is_chat and request.streams else ""
        self.head = {
            "id": f"chatcmpl-{random.getrandbits(64):016x}",
            "object": kind,
            "created": CREATED,
            "model": MODEL,
        }

    def text(self, ids: list[int]) -> str:
        return "".join(f" t{token}" for token in ids)

    def token(self, token: int) -> str:
        return f"token_id:{token}" if self.request.names_ids else f" t{token}"

    def entries(self, ids: list[int], logprobs: list[float]) -> list[Json]:
        """Return chat's entries of logprobs."""
        return [
            {"token": self.token(token), "logprob": logprob, "bytes": [32, 116], "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]

    def legacy(self, ids: list[int], logprobs: list[float]) -> Json:
        """Return the logprobs lists of completions."""
        names = [self.token(token) for token in ids]
        tops = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
        return {"text_offset": [0] * len(ids), "token_logprobs": list(logprobs), "tokens": names, "top_logprobs": tops}

    def logprobs(self, ids: list[int], logprobs: list[float]) -> Json | None:
        if not self.request.returns_logprobs or not ids:
            return None
        return {"content": self.entries(ids, logprobs)} if self.is_chat else self.legacy(ids, logprobs)

    def message(self, choice: Drawn) -> Json:
        """Return a message: text, reasoning or a tool call."""
        content, calls = self.text(choice.ids), []
        if choice.finish == "tool_calls":
            content, calls = None, [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        return {"role": "assistant", "content": content, **self.thoughts, **({"tool_calls": calls} if calls else {})}

    def delta(self, choice: Drawn, ids: list[int], *, first: bool) -> Json:
        if choice.finish == "tool_calls":
            call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": ""}}
            return {"tool_calls": [call if first else {"index": 0, "function": {"arguments": "{}"}}]}
        return {"content": self.text(ids)}

    def interleaved(self, chunks: list[list[Event]]) -> list[Event]:
        """Return the chunks of all choices mixed; each choice keeps its order."""
        waiting, found = [list(events) for events in chunks if events], []
        while waiting:
            events = self.random.choice(waiting)
            found.append(events.pop(0))
            waiting = [events for events in waiting if events]
        return found

    def prompt_of(self, choice: Drawn) -> list[int]:
        return list(self.truth.prompts[choice.prompt])


class _Vllm(_Engine):
    """vLLM 0.32.0: chat, completions and generate."""

    def whole(self) -> Json:
        if self.request.dialect == "generate":
            return self.generate_whole()
        with_ids = self.request.body.get("return_token_ids") is True
        choices = []
        for choice in self.truth.choices:
            content = {"message": self.message(choice)} if self.is_chat else {"text": self.text(choice.ids)}
            prompt = (
                {}
                if self.is_chat
                else {"prompt_logprobs": None, "prompt_token_ids": self.prompt_of(choice) if with_ids else None}
            )
            choices.append(
                {"index": choice.index, **content, "logprobs": self.logprobs(choice.ids, choice.logprobs),
                 "finish_reason": choice.finish, "stop_reason": None, "token_ids": list(choice.ids) if with_ids else None,
                 **prompt, "routed_experts": None}
            )  # fmt: skip
        shared = {"prompt_token_ids": list(self.truth.prompts[0]) if with_ids else None} if self.is_chat else {}
        return {**self.head, "choices": choices, "service_tier": None, "system_fingerprint": FINGERPRINT,
                "usage": self.truth.usage(prompt_tokens_details=None), **shared, "kv_transfer_params": None}  # fmt: skip

    def stream(self) -> list[Event]:
        is_generate = self.request.dialect == "generate"
        chunk = self.generate_chunks if is_generate else self.chat_chunks if self.is_chat else self.text_chunks
        roles = [self.role(choice) for choice in self.truth.choices] if self.is_chat else []
        events = [*roles, *self.interleaved([chunk(choice) for choice in self.truth.choices])]
        if is_generate:
            events[0].value = self.with_prompt(events[0].value)
        if self.request.usage_option("include_usage"):
            head = {**self.head, "system_fingerprint": FINGERPRINT}
            head = {"request_id": "g-1", "output_mode": "tokens"} if is_generate else head
            events.append(Event({**head, "choices": [], "usage": self.truth.usage()}))
        elif not is_generate:
            events[-1].value["system_fingerprint"] = FINGERPRINT
        return events

    def counted(self, choice: Drawn, sampled: int) -> Json:
        """Return the running counts of a choice, if they are requested."""
        if not (self.request.usage_option("include_usage") and self.request.usage_option("continuous_usage_stats")):
            return {}
        prompt = len(self.truth.prompts[choice.prompt])
        return {"usage": {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}}

    def role(self, choice: Drawn) -> Event:
        delta = {"role": "assistant", "content": ""}
        first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt = {"prompt_token_ids": list(self.truth.prompts[0])} if self.request.body.get("return_token_ids") else {}
        return Event({**self.head, "choices": [first], **self.counted(choice, 0), **prompt, "prompt_text": None})

    def chat_chunks(self, choice: Drawn) -> list[Event]:
        events, sampled = [], 0
        for position, (ids, logprobs) in enumerate(choice.pieces()):
            sampled += len(ids)
            is_last = position == len(choice.sizes) - 1
            delta = self.delta(choice, ids, first=position == 0)
            payload = {"index": choice.index, "delta": delta, "logprobs": self.logprobs(ids, logprobs),
                    "finish_reason": choice.finish if is_last else None}  # fmt: skip
            payload |= {"stop_reason": None} if is_last else {}
            payload |= {"token_ids": list(ids)} if self.request.body.get("return_token_ids") else {}
            events.append(Event({**self.head, "choices": [payload], **self.counted(choice, sampled)}))
        return events

    def text_chunks(self, choice: Drawn) -> list[Event]:
        events, sampled = [], 0
        with_ids = self.request.body.get("return_token_ids") is True
        for position, (ids, logprobs) in enumerate(choice.pieces()):
            sampled += len(ids)
            is_last = position == len(choice.sizes) - 1
            payload = {"index": choice.index, "text": self.text(ids), "logprobs": self.logprobs(ids, logprobs),
                    "finish_reason": choice.finish if is_last else None, "stop_reason": None,
                    "prompt_token_ids": self.prompt_of(choice) if with_ids and position == 0 else None,
                    "token_ids": list(ids) if with_ids else None}  # fmt: skip
            events.append(Event({**self.head, "choices": [payload], **self.counted(choice, sampled)}))
        return events

    def generate_logprobs(self, ids: list[int], logprobs: list[float]) -> Json | None:
        if not self.request.returns_logprobs:
            return None
        pairs = zip(ids, logprobs, strict=True)
        return {
            "content": [
                {"token_id": i, "logprob": p, "rank": 3, "top_logprobs": [{"token_id": i, "logprob": p}]}
                for i, p in pairs
            ]
        }

    def versions(self, choice: Drawn) -> list[Json]:
        """Return spans of weight versions over a choice's ids."""
        half = len(choice.ids) // 2
        bounds = [0, len(choice.ids)] if len(self.truth.versions) == 1 or not half else [0, half, len(choice.ids)]
        return [
            {"version": version, "start": start, "end": end}
            for version, start, end in zip(self.truth.versions, bounds, bounds[1:], strict=False)
        ]

    def generate_choice(self, choice: Drawn, ids: list[int], logprobs: list[float], *, last: bool) -> Json:
        return {"index": choice.index, "finish_reason": choice.finish if last else None, "stop_reason": None,
                "token_ids": list(ids), "routed_experts": None, "sampling_mask": None,
                "weight_versions": self.versions(choice) if last else None,
                "logprobs": self.generate_logprobs(ids, logprobs)}  # fmt: skip

    def generate_whole(self) -> Json:
        choices = [self.generate_choice(c, c.ids, c.logprobs, last=True) for c in self.truth.choices]
        prompt = list(self.truth.prompts[0]) if self.request.body.get("return_token_ids") else None
        return {"request_id": "g-1", "model": MODEL, "created": CREATED, "usage": self.truth.usage(prompt_tokens_details=None),
                "prompt_logprobs": None, "prompt_token_ids": prompt, "mm_placeholders": None, "output_mode": "tokens",
                "choices": choices}  # fmt: skip

    def generate_chunks(self, choice: Drawn) -> list[Event]:
        events, sampled = [], 0
        for position, (ids, logprobs) in enumerate(choice.pieces()):
            sampled += len(ids)
            payload = self.generate_choice(choice, ids, logprobs, last=position == len(choice.sizes) - 1)
            usage = self.counted(choice, sampled).get("usage")
            events.append(Event({"request_id": "g-1", "usage": usage, "output_mode": "tokens", "choices": [payload]}))
        return events

    def with_prompt(self, chunk: Json) -> Json:
        with_ids = self.request.body.get("return_token_ids") is True
        return {**chunk, "prompt_token_ids": list(self.truth.prompts[0])} if with_ids else chunk


class _Sglang(_Engine):
    """SGLang 0.5.23: chat unstreamed, chat in framed streams (with a parser), completions."""

    thoughts: Json = {"reasoning_content": None}

    def meta(self, choice: Drawn) -> Json:
        pairs = [[p, i, f" t{i}"] for i, p in zip(choice.ids, choice.logprobs, strict=True)]
        spans = [{"version": self.truth.versions[0], "start": 0, "end": len(choice.ids)}]
        prompt = len(self.truth.prompts[choice.prompt])
        return {"id": self.head["id"], "finish_reason": {"type": choice.finish}, "prompt_tokens": prompt,
                "num_retractions": 0, "completion_tokens": len(choice.ids), "weight_versions": spans,
                "output_token_logprobs": pairs}  # fmt: skip

    def whole(self) -> Json:
        body, choices = self.request.body, []
        for choice in self.truth.choices:
            content = {"message": self.message(choice)} if self.is_chat else {"text": self.text(choice.ids)}
            payload = {"index": choice.index, **content, "logprobs": self.logprobs(choice.ids, choice.logprobs),
                   "finish_reason": choice.finish, "matched_stop": None}  # fmt: skip
            if body.get("return_token_ids") is True:
                name = "response_token_ids" if self.is_chat else "token_ids"
                payload |= {name: list(choice.ids), "prompt_token_ids": self.prompt_of(choice)}
            if self.is_chat and body.get("return_meta_info") is True:
                payload["meta_info"] = self.meta(choice)
            choices.append(payload)
        spans = [{"version": self.truth.versions[0], "start": 0, "end": len(self.truth.choices[0].ids)}]
        return {**self.head, "choices": choices, "usage": self.truth.usage(prompt_tokens_details=None, reasoning_tokens=0),
                "metadata": {"weight_version": self.truth.versions[0], "weight_versions": spans}}  # fmt: skip

    def stream(self) -> list[Event]:
        chunks = self.chat_chunks if self.is_chat else self.text_chunks
        events = self.interleaved([chunks(choice) for choice in self.truth.choices])
        if self.is_chat and self.request.body.get("return_output_ids_in_sglext"):
            lists = [list(choice.ids) for choice in self.truth.choices]
            extension = {"input_ids": list(self.truth.prompts[0]), "output_ids": lists}
            name = b"sglext_ids" if self.random.random() < 0.7 else b""
            events.append(Event({**self.head, "choices": [], "usage": None, "sglext": extension}, name))
        if self.request.usage_option("include_usage"):
            events.append(Event({**self.head, "choices": [], "usage": self.truth.usage(reasoning_tokens=0)}))
        return events

    def chat_chunks(self, choice: Drawn) -> list[Event]:
        base = {"index": choice.index, "logprobs": None, "finish_reason": None, "matched_stop": None}
        payloads = [{**base, "delta": {"reasoning_content": None, "role": "assistant", "content": ""}}]
        for position, (ids, logprobs) in enumerate(choice.pieces()):
            delta = {"reasoning_content": None, **self.delta(choice, ids, first=position == 0)}
            payloads.append({**base, "delta": delta, "logprobs": self.logprobs(ids, logprobs)})
        payloads.append({**base, "delta": {"reasoning_content": None}, "finish_reason": choice.finish})
        return [Event({**self.head, "choices": [payload]}) for payload in payloads]

    def text_chunks(self, choice: Drawn) -> list[Event]:
        events = []
        for position, (ids, logprobs) in enumerate(choice.pieces()):
            is_last = position == len(choice.sizes) - 1
            payload = {"index": choice.index, "text": self.text(ids), "logprobs": self.logprobs(ids, logprobs),
                    "finish_reason": choice.finish if is_last else None, "matched_stop": None}  # fmt: skip
            if self.request.body.get("return_token_ids") is True:
                payload |= {"token_ids": list(ids)} | (
                    {"prompt_token_ids": self.prompt_of(choice)} if position == 0 else {}
                )
            events.append(Event({**self.head, "choices": [payload], "usage": None}))
        return events


class _Llamacpp(_Engine):
    """llama.cpp: chat and completions, with ids in `__verbose` and in the entries of logprobs."""

    def entries(self, ids: list[int], logprobs: list[float]) -> list[Json]:
        return [{"id": token, **entry} for token, entry in zip(ids, super().entries(ids, logprobs), strict=True)]

    def logprobs(self, ids: list[int], logprobs: list[float]) -> Json | None:
        return {"content": self.entries(ids, logprobs)} if self.request.returns_logprobs and ids else None

    def message(self, choice: Drawn) -> Json:
        return {"role": "assistant", "content": self.text(choice.ids)}

    def verbose(self, tokens: list[int]) -> Json:
        first = self.truth.choices[0]
        return {"index": 0, "content": "", "tokens": tokens, "tokens_predicted": len(first.ids), "prompt": "the prompt",
                "tokens_evaluated": len(self.truth.prompts[0]), "stopping_word": "", "truncated": False}  # fmt: skip

    def tail(self) -> Json:
        sampled, prompt = len(self.truth.choices[0].ids), len(self.truth.prompts[0])  # of one choice only
        return {"usage": {"completion_tokens": sampled, "prompt_tokens": prompt, "total_tokens": prompt + sampled}}

    def whole(self) -> Json:
        choices = []
        for choice in self.truth.choices:
            content = {"message": self.message(choice)} if self.is_chat else {"text": self.text(choice.ids)}
            logprobs = self.logprobs(choice.ids, choice.logprobs)
            shown = {"logprobs": logprobs} if logprobs or not self.is_chat else {}
            choices.append({"finish_reason": choice.finish, "index": choice.index, **content, **shown})
        verbose = (
            {"__verbose": self.verbose(list(self.truth.choices[0].ids))} if self.request.body.get("verbose") else {}
        )
        return {"choices": choices, **self.head, **self.tail(), **verbose, "timings": {"cache_n": 1}}

    def stream(self) -> list[Event]:
        events = self.interleaved([self.chunks(choice) for choice in self.truth.choices])
        if self.request.body.get("verbose"):
            events[-1].value["__verbose"] = self.verbose([])
        if not self.is_chat:
            events[-1].value |= self.tail()
        elif self.request.usage_option("include_usage"):
            events.append(Event({"choices": [], **self.head, **self.tail(), "timings": {"cache_n": 1}}))
        return events

    def chunks(self, choice: Drawn) -> list[Event]:
        base = {"finish_reason": None, "index": choice.index}
        payloads = [{**base, "delta": {"role": "assistant", "content": None}}] if self.is_chat else []
        for ids, logprobs in choice.pieces():
            text = {"delta": {"content": self.text(ids)}} if self.is_chat else {"text": self.text(ids)}
            payloads.append({**base, **text, "logprobs": self.logprobs(ids, logprobs)})
        ending = {"delta": {}} if self.is_chat else {"text": "", "logprobs": None}
        payloads.append({**base, **ending, "finish_reason": choice.finish})
        return [Event({"choices": [payload], **self.head}) for payload in payloads]
