"""The turns of a rollout: the choices of its recorded steps, indexed by the messages or the text that they answer."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson

from proxy.continuation.types import Message, Reason, Rendering, digest_of, rendering_of
from proxy.trajectory.conversations import Conversations
from proxy.trajectory.step import Choice, Ids, Step, answers_of, messages_of
from proxy.trajectory.thread_rules import agent_of

# Fields of a body that do not change the prompt of a call. A field that is unknown here may change it.
_NEUTRAL: Final = frozenset(
    {
        "messages", "prompt", "model", "stream", "stream_options", "user", "metadata", "store", "priority", "request_id", "rid",
        "service_tier", "safety_identifier", "prompt_cache_key", "session_id", "cache_salt", "vllm_xargs",
        "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_prompt_token_ids",
        "return_tokens_as_token_ids", "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
        "return_routed_experts", "return_sampling_mask", "include_reasoning", "separate_reasoning", "stream_reasoning",
        "kv_transfer_params", "input_ids", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema",
        "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "n", "best_of", "max_tokens", "max_completion_tokens",
        "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "no_stop_trim",
        "spaces_between_special_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "thinking_token_budget",
        "custom_logit_processor", "add_generation_prompt", "continue_final_message", "echo",
    }
)  # fmt: skip

BOUNDS: Final = ("max_tokens", "max_completion_tokens")
_OWN_IDS: Final = ("prompt_token_ids", "input_ids")
_JOINTS: Final = {
    "sglang": " "
}  # between text parts (SGLang 0.5.23, parser/jinja_template_utils.py); others have a line end
_NO_STOPS: Final = frozenset[int]()
_FINISHED: Final = ("stop", "length", "tool_calls", "function_call")
_BYTES_PER_TURN: Final = 1000  # an estimate: the objects of a turn, without its ids and its reply
_BYTES_PER_ID: Final = 4
_BYTES_PER_CALL: Final = 500  # an estimate: the objects of a tool call, without its arguments


@dataclass(slots=True, eq=False)
class Turn:
    """One choice of a recorded step.

    `place`: the number of messages before the reply, and their digest; of a completions step, the number of bytes of its prompt
    and completion text, and their digest; the prompt text has `text_start` characters. `reply`: the message as the engine
    returned it; empty for completions. `names`: the ids of its response and of its calls. The first `prompt_length` values of
    `prompt` are the prompt ids (a later prompt that begins with them is shared); `ids` are the sampled ones. `rendering`
    identifies the rendering of the step's messages, None if it is the prompt. `parent`: the turn that the step continues, if
    its prompt was sent as ids. `problem`: why the turn cannot be continued. `is_hidden`: the message may not contain
    everything that was sampled. `is_full`: it has as many ids as the client allows.
    """

    step_id: str
    choice: int
    index: int
    place: tuple[int, bytes]
    reply: Message
    names: frozenset[str]
    agent: str | None
    is_delivered: bool
    prompt: Ids
    prompt_length: int
    ids: Ids
    finish_reason: str | None
    stop_reason: int | str | None
    client_stops: frozenset[int]
    options: bytes
    kind: str
    model: str | None
    policy: str
    rendering: Rendering | None
    parent: "Turn | None"
    problem: Reason | None
    is_hidden: bool
    is_full: bool = False
    text_start: int = 0

    @property
    def prompt_ids(self) -> Ids:
        """The prompt ids."""
        return self.prompt[: self.prompt_length]

    @property
    def is_closed(self) -> bool:
        """Whether the last id is a stop token of the model, and not one that the client chose.

        With `tool_calls` an engine may hide a limit; vLLM 0.32 then still returns a stop token as `stop_reason`, if it is
        not the first one of the model.
        """
        if isinstance(self.stop_reason, int):
            return self.finish_reason in {"stop", "tool_calls"} and self.stop_reason not in self.client_stops
        return self.finish_reason == "stop" and self.stop_reason is None

    @property
    def is_cut(self) -> bool:
        """Whether the completion ended without a stop token."""
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)

    @property
    def restored(self) -> dict[int, Message]:
        """The replies that the rendering of the step's messages had in place of the agent's, by position."""
        replies: dict[int, Message] = {}
        turn = self.parent
        while turn is not None:
            replies[turn.place[0]] = turn.reply
            turn = turn.parent
        return replies


@dataclass(slots=True, eq=False)
class Turns:
    """The turns of one rollout.

    `calls`: the functions of the sampled tool calls, by call id. `size`: the approximate memory in bytes; `longest`: that of
    the longest reply. `indexes`: those of the steps that were added. `stops`: the engine kind, model and id of each stop token
    that closed a turn. `conversations`: the turns by messages; the memory of the newest messages is not part of `size`.
    `named`: the turns by step id and choice.
    """

    conversations: Conversations[Turn] = field(default_factory=Conversations)
    by_text: dict[int, dict[bytes, list[Turn]]] = field(default_factory=dict)
    indexes: set[int] = field(default_factory=set)
    stops: set[tuple[str, str | None, int]] = field(default_factory=set)
    calls: dict[str, Message] = field(default_factory=dict)
    size: int = 0
    longest: int = 0
    named: dict[tuple[str, int], Turn] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)  # the number of turns that share an array, by its id()

    def __len__(self) -> int:
        """Return the number of turns."""
        return len(self.named)

    def add(self, step: Step, index: int | None = None) -> None:
        """Add the choices of a step that was read from, or written to, the store; `index` is its index there.

        A step that was read has its index. A step whose client sent prompt ids of its own is no turn: its messages are not its
        prompt.
        """
        index = step.index if index is None else index
        if index is not None:
            if index in self.indexes:
                return
            self.indexes.add(index)
        body = step.body
        if has_own_ids(body):
            return
        if step.is_chat:
            if joint := _JOINTS.get(step.engine.kind):
                self.conversations.newest.joint = joint
            if messages := messages_of(step):
                self._add(step, index, body, self.conversations.place(messages), None)
        elif step.dialect == "completions" and isinstance(prompt := body.get("prompt"), str):
            self._add(step, index, body, (0, b""), prompt)

    def _add(
        self, step: Step, index: int | None, body: Mapping[str, Any], place: tuple[int, bytes], text: str | None
    ) -> None:
        """Add the choices of a step after the messages of this place, or after this prompt text."""
        answers = answers_of(step)
        for answer in answers.values():
            if calls := calls_by_id(step.step_id, answer.get("message")):
                self.calls |= calls
                size = _size_of_calls(calls)
                self.size += size
                self.longest = max(self.longest, size)
        before, parent, rendering = self._continued(step)
        options = options_of(body) if step.choices else b""
        prompts = [prompt if isinstance(prompt, array) else prompt[:] for prompt in step.prompts]
        for choice in step.choices:
            answer = answers.get(choice.index, {})
            turn = _turn(step, index, place, choice, answer, prompts, parent, rendering)
            if turn is None:
                continue
            turn.options = options  # once for all choices: tools may be long
            if text is None:
                self.conversations.add(turn, before)
            else:
                whole = (text + str(answer.get("text", ""))).encode("utf-8", "surrogatepass")
                turn.place, turn.text_start = (len(whole), _digest(whole)), len(text)
                self.by_text.setdefault(len(whole), {}).setdefault(turn.place[1], []).append(turn)
            self.named[turn.step_id, turn.choice] = turn
            texts = _size_of_texts(turn.reply)
            self.size += _BYTES_PER_TURN + _BYTES_PER_ID * len(turn.ids) + texts
            self.longest = max(self.longest, texts)
            self._hold(turn.prompt)
            if turn.is_closed and turn.ids:
                self.stops.add((turn.kind, turn.model, turn.ids[-1]))
        self._share(step, parent)

    def sampled_call(self, call_id: str) -> Message | None:
        """Return the name and the arguments of a tool call as sampled; None for an unknown id.

        If the engine assigned no id, the client has one of its dialect: a prefix, the step id and the index of the call.
        """
        return self.calls.get(call_id) or self.calls.get(call_id.partition("_")[2])

    def of_text(self, prompt: str) -> Iterator[list[Turn]]:
        """Yield the turns whose prompt and completion text this prompt begins with, by the text, the longest first."""
        text = prompt.encode("utf-8", "surrogatepass")
        found: list[list[Turn]] = []
        state, done = blake2b(digest_size=16), 0
        for length in sorted(length for length in self.by_text if length <= len(text)):
            state.update(memoryview(text)[done:length])
            done = length
            if equal := self.by_text[length].get(state.copy().digest()):
                found.append(equal)
        yield from reversed(found)

    def _continued(self, step: Step) -> tuple[Turn | None, Turn | None, Rendering | None]:
        """Return the turn that a step follows, and the same if it continues that one by ids.

        And what identifies the step's rendering, if that is not its prompt.
        """
        facts = step.extra.get("continuation")
        if not isinstance(facts, dict):
            return None, None, None
        before = self.named.get((str(facts.get("step_id")), int(facts.get("choice") or 0)))
        if "kept" not in facts:
            return before, None, None
        if facts.get("rendered") is None:
            return before, before, None
        rendered = int(facts["rendered"]), str(facts["rendered_digest"]), int(facts["rendered_last"])
        return before, before, Rendering(*rendered)

    def _share(self, step: Step, parent: Turn | None) -> None:
        """Let the turns before a step use the array of its prompt, which begins with theirs."""
        own = next((turn for choice in step.choices if (turn := self.named.get((step.step_id, choice.index)))), None)
        if own is None or not step.exact:
            return
        turn = parent
        while turn is not None and turn.prompt is not own.prompt:
            self._hold(own.prompt)
            self._release(turn.prompt)
            turn.prompt = own.prompt
            turn = turn.parent

    def _hold(self, prompt: Ids) -> None:
        """Count one more turn that has this array as its prompt."""
        users = self._users.get(id(prompt), 0)
        self._users[id(prompt)] = users + 1
        if not users:
            self.size += _BYTES_PER_ID * len(prompt)

    def _release(self, prompt: Ids) -> None:
        self._users[id(prompt)] -= 1
        if not self._users[id(prompt)]:
            del self._users[id(prompt)]
            self.size -= _BYTES_PER_ID * len(prompt)


def calls_by_id(step_id: str, message: Any) -> dict[str, Message]:
    """Return the functions of a reply's tool calls by id; a call without an id of its own has the step id and its index."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    found: dict[str, Message] = {}
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        name, function = (call.get("id"), call.get("function")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not name or name in found:
            name = f"{step_id}_{number}"
        found[name] = function if isinstance(function, dict) else {}
    return found


def has_own_ids(body: Mapping[str, Any]) -> bool:
    """Return whether the client of a call sends prompt ids itself."""
    for name in _OWN_IDS:
        if body.get(name) is not None:
            return True
    params = body.get("kv_transfer_params")
    return bool(isinstance(params, Mapping) and params)


def options_of(body: Mapping[str, Any]) -> bytes:
    """Return the digest of everything in a body that may change its prompt, except messages and text."""
    options = {name: value for name, value in body.items() if name not in _NEUTRAL and value is not None}
    choice = body.get("tool_choice")
    if choice == "none" or isinstance(choice, dict):
        options["tool_choice"] = choice  # templates get no tools, or only this one
    return _digest(orjson.dumps(options, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _turn(  # noqa: PLR0917 - the parts of a turn
    step: Step,
    index: int | None,
    place: tuple[int, bytes],
    choice: Choice,
    answer: Mapping[str, Any],
    prompts: Sequence[Ids],
    parent: Turn | None,
    rendering: Rendering | None,
) -> Turn | None:
    """Return the turn of a choice; None if the response has no message or text for it."""
    message = answer.get("message") if step.is_chat else {}
    if not isinstance(message, dict):
        return None
    is_usable = step.exact and step.status == "complete" and choice.finish_reason in _FINISHED
    if choice.prompt >= len(prompts) or not isinstance(answer.get("text", ""), str):
        return None
    prompt, body = prompts[choice.prompt], step.body
    stops = body.get("stop_token_ids")
    response_id = (step.response or {}).get("id")
    names = {*calls_by_id(step.step_id, message), *([response_id] if isinstance(response_id, str) else ())}
    return Turn(
        step_id=step.step_id,
        choice=choice.index,
        index=-1 if index is None else index,
        place=place,
        reply=message,
        names=frozenset(names),
        agent=agent_of(step.extra, step.request),
        is_delivered=step.delivered,
        prompt=prompt,
        prompt_length=len(prompt),
        ids=choice.ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        client_stops=frozenset([stop for stop in stops if type(stop) is int]) if isinstance(stops, list) else _NO_STOPS,
        options=b"",
        kind=step.engine.kind,
        model=step.model_served,
        policy=step.policy,
        rendering=rendering,
        parent=parent,
        problem=None if is_usable else "flagged",
        is_hidden=(bool(message.get("tool_calls")) and body.get("parallel_tool_calls") is False)
        or (step.request.get("include_reasoning") is False and body.get("include_reasoning") is not False),
        is_full=any(type(body.get(name)) is int and len(choice.ids) >= body[name] for name in BOUNDS),
    )


def _size_of_texts(reply: Message) -> int:
    """Return the approximate memory of a reply without its tool calls in bytes."""
    texts = (reply.get("content"), reply.get("reasoning"), reply.get("reasoning_content"))
    return sum([len(text) for text in texts if isinstance(text, str)])


def _size_of_calls(calls: Mapping[str, Message]) -> int:
    """Return the approximate memory of the functions of tool calls in bytes."""
    texts = [function.get("arguments") for function in calls.values()]
    return _BYTES_PER_CALL * len(calls) + sum([len(text) for text in texts if isinstance(text, str)])


def own_rendering(turn: Turn) -> Rendering:
    """Return what identifies the rendering of the messages of a turn's step."""
    return turn.rendering or rendering_of(turn.prompt_ids)


def end_of_rendering(turn: Turn, full: Ids) -> tuple[int, int] | None:
    """Return the index and the last id of the rendering of the messages of a turn's step.

    None if `full` does not begin with all ids of that rendering but the last.
    """
    rendering = turn.rendering
    if rendering is None:  # it is the prompt: comparing ids takes a quarter of the time of two digests
        prompt = turn.prompt_ids
        last, last_id = len(prompt) - 1, prompt[-1]
        begins = full[:last] == prompt[:last]
    else:
        last, last_id = rendering.length - 1, rendering.last
        begins = digest_of(full[:last]) == rendering.digest
    return (last, last_id) if begins and len(full) > last else None
