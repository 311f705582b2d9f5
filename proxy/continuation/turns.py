"""The turns of a rollout, by the messages or the text that they answer, and the one that a call continues."""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import orjson

from proxy.continuation.types import Message, Mode, Reason, Rendering, rendering_of
from proxy.trajectory.arrays import Ids
from proxy.trajectory.conversations import (
    THOUGHTS,
    NewestMessages,
    Replies,
    bare,
    calls_of,
    canonical_calls,
    raw_calls,
    role_of,
    split_thoughts,
    text_of,
    thoughts_sent,
)
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Step, answers_of, messages_of
from proxy.trajectory.thread_rules import agent_of

Place: TypeAlias = tuple[int, bytes]  # the number of messages or bytes, and their digest

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
# Between text parts (SGLang 0.5.23, parser/jinja_template_utils.py); others have a line end.
_JOINTS: Final = {"sglang": " "}
_NO_STOPS: Final = frozenset[int]()
_NO_NAMES: Final = frozenset[str]()
_FINISHED: Final = ("stop", "length", "tool_calls", "function_call")
_TEXT_FIELDS: Final = 2  # type and text
_MEDIA: Final = ("image", "video", "audio", "file", "embeds")
_REPLY_FIELDS: Final = ("role", "content", "reasoning", "reasoning_content", "tool_calls", "function_call")
_BYTES_PER_TURN: Final = 1000  # an estimate: the objects of a turn, without its ids and its reply
_BYTES_PER_ID: Final = 4
_BYTES_PER_CALL: Final = 500  # an estimate: the objects of a tool call, without its arguments


@dataclass(slots=True, eq=False)
class Turn:
    """One choice of a recorded step."""

    step_id: str
    choice: int
    index: int
    place: Place  # the messages before it; of completions, the bytes of the prompt and completion text
    reply: Message  # as the engine returned it; empty for completions
    names: frozenset[str]  # the ids of the response and of its calls
    agent: str | None
    is_delivered: bool
    prompt: Ids  # or a later prompt that begins with it, which is shared
    prompt_length: int
    ids: Ids  # the sampled ones
    finish_reason: str | None
    stop_reason: int | str | None
    client_stops: frozenset[int]
    options: bytes
    kind: str
    model: str | None
    policy: str
    rendering: Rendering | None  # of the step's messages; None if it is the prompt
    parent: "Turn | None"  # the turn that the step continues, if its prompt was sent as ids
    problem: Reason | None  # why the turn cannot be continued
    is_hidden: bool  # the message may not contain everything that was sampled
    is_full: bool = False  # it has as many ids as the client allows
    text_start: int = 0  # of completions, the characters of the prompt text

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
class Conversations:
    """The turns of one rollout by the messages before them. `newest`: the messages of the newest call.

    Several turns can have the same messages before them, the same text and the same calls. What distinguishes them, in this
    order: IDs that the engine or TokenTape made and the agent repeats; reasoning that is sent back; what samples the call;
    unchanged text; the agent; the later messages; delivery. Nothing is guessed: what remains is returned.
    """

    newest: NewestMessages = field(default_factory=NewestMessages)
    _replies: Replies[Turn] = field(default_factory=Replies)
    _later: dict[tuple[str, int], list[Turn]] = field(default_factory=dict)  # by the step and choice that they follow
    _places: dict[str, bytes] = field(default_factory=dict)  # the digest of each step
    _names: set[str] = field(default_factory=set)

    def place(self, messages: list[Any]) -> Place:
        """Return the place of a reply to one or more messages."""
        return len(messages), self.newest.chain(messages)[-1]

    def add(self, turn: Turn, follows: Turn | None = None) -> None:
        """Add a turn; its step continues the turn `follows`, by ids or not."""
        text = text_of(turn.reply)
        _, spoken = split_thoughts(text)
        for key in {_key(turn.reply, text), _key(turn.reply, spoken)} if spoken != text else (_key(turn.reply, text),):
            self._replies.add(turn.place[1], key, turn)
        self._places[turn.step_id] = turn.place[1]
        self._names.update(turn.names)
        if follows is not None:
            self._later.setdefault((follows.step_id, follows.choice), []).append(turn)

    def follow(
        self,
        messages: list[Any],
        fits: Callable[[Turn], bool],
        *,
        agent: str | None = None,
        steps: Collection[str] = (),
        drops_thoughts: bool = False,
    ) -> Iterator[tuple[int, list[Turn]]]:
        """Yield the positions of messages that repeat a reply, the last first, with the turns that each may be.

        A position has no turn if the message has the text and the calls of one, but reasoning or IDs of another. `fits` returns
        whether a turn has the engine, model, policy and options of the call. `agent` sends the messages and names the responses
        of `steps` by ID. `drops_thoughts`: replies are compared without the `<think>` part of their text.
        """
        chain = self.newest.chain(messages)
        sent = _Sent(messages, self._names)
        named: dict[bytes | None, set[str]] = {}
        for step in steps:
            named.setdefault(self._places.get(step), set()).add(step)
        for before, replies in self._replies.follow(chain[:-1]):
            message = messages[before + 1]
            if role_of(message) != "assistant":
                continue
            text = text_of(message)
            equal = replies.get(_key(message, text), ())
            ranks = {turn: _rank(turn.reply, message, text) for turn in equal}
            equal = [turn for turn in equal if drops_thoughts or ranks[turn]]
            if equal:
                step_ids = named.get(chain[before])
                meant = [turn for turn in equal if step_ids is None or turn.step_id in step_ids]
                meant = [turn for turn in meant if sent.may_contain(turn)]
                order = (fits, ranks.__getitem__, lambda turn: turn.agent == agent)
                yield before + 1, self._nearest(meant, order, chain)

    def _nearest(self, meant: list[Turn], order: Sequence[Callable[[Turn], int]], chain: Sequence[bytes]) -> list[Turn]:
        others: tuple[Callable[[Turn], int], ...] = (
            lambda turn: self._shared(turn, chain),
            lambda turn: turn.is_delivered,
        )
        for rank in (*order, *others):
            if len(meant) < 2:
                break
            ranked = [(rank(turn), turn) for turn in meant]
            best = max(value for value, _ in ranked)
            meant = [turn for value, turn in ranked if value == best]
        return meant

    def _shared(self, turn: Turn, chain: Sequence[bytes]) -> int:
        """Find the longest recorded call after a turn that begins the messages; return its number of messages, or 0."""
        longest, following = 0, list(self._later.get((turn.step_id, turn.choice), ()))
        while following:
            later = following.pop()
            length, digest = later.place
            if length <= len(chain) and chain[length - 1] == digest:
                longest = max(longest, length)
                following += self._later.get((later.step_id, later.choice), ())
        return longest


class _Sent:
    """The replies in the messages of a call, with the names and the reasoning that its agent repeats. Each is read once."""

    def __init__(self, messages: Sequence[Any], names: Collection[str]) -> None:
        self._messages = messages
        self._known = names
        self._read: dict[int, tuple[frozenset[str], frozenset[str] | None]] = {}
        self._contained: dict[int, bool] = {}  # by the id() of a reply

    def may_contain(self, reply: Turn) -> bool:
        """Return whether the messages repeat no name or reasoning that differs from a reply or from one before it."""
        path: list[Turn] = []
        before: Turn | None = reply
        while before is not None and id(before) not in self._contained:
            path.append(before)
            before = before.parent
        result = before is None or self._contained[id(before)]
        for each in reversed(path):
            result = self._contained[id(each)] = result and self._repeats(each)
        return result

    def _repeats(self, reply: Turn) -> bool:
        position = reply.place[0]
        if position not in self._read:
            message = self._messages[position]
            self._read[position] = _known_names(message, self._known), thoughts_sent(message)
        names, thoughts = self._read[position]
        if not names <= reply.names:
            return False
        if not thoughts:
            return thoughts is not None
        recorded = thoughts_sent(reply.reply) or frozenset((bare(split_thoughts(text_of(reply.reply))[0]),))
        return thoughts <= recorded


def _known_names(message: Message, known: Collection[str]) -> frozenset[str]:
    """Return the IDs in a message that belong to recorded responses and calls.

    If the engine gave a call no ID, the dialect made one: a prefix, the step ID and the index of the call.
    """
    found = set()
    for sent in (*calls_of(message), message):
        name = sent.get("id")
        if isinstance(name, str):
            own = name if name in known else name.partition("_")[2]
            if own in known:
                found.add(own)
    return frozenset(found)


def _key(message: Message, text: str) -> bytes:
    """Return a digest that is equal for replies with the same text, apart from whitespace around it, and the same calls."""
    parts = [text.strip()]
    for call in canonical_calls(message):
        parts += call
    digest = blake2b(digest_size=16)
    for part in parts:
        value = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(value) + value)
    return digest.digest()


def _rank(reply: Message, message: Message, text: str) -> int:
    """Return how a message with this text repeats a reply: 2 unchanged, 1 formatted differently, 0 without its reasoning."""
    ours = text_of(reply)
    if ours == text:
        return 2 if raw_calls(reply) == raw_calls(message) else 1
    return 1 if ours.strip() == text.strip() else 0


@dataclass(slots=True, eq=False)
class Turns:
    """The turns of one rollout."""

    conversations: Conversations = field(default_factory=Conversations)
    by_text: dict[int, dict[bytes, list[Turn]]] = field(default_factory=dict)
    indexes: set[int] = field(default_factory=set)  # of the steps that were added
    stops: set[tuple[str, str | None, int]] = field(default_factory=set)  # engine kind, model and id that closed a turn
    calls: dict[str, Message] = field(default_factory=dict)  # the functions of the sampled tool calls, by call id
    size: int = 0  # the approximate memory in bytes, without the newest messages
    longest: int = 0  # of that, the longest reply
    named: dict[tuple[str, int], Turn] = field(default_factory=dict)  # by step id and choice
    _users: dict[int, int] = field(default_factory=dict)  # the number of turns that share an array, by its id()

    def __len__(self) -> int:
        return len(self.named)

    def add(self, step: Step, index: int | None = None) -> None:
        """Add the choices of a step that was read from, or written to, the store; `index` is its index there.

        A step that was read contains its index. A step with the client's own prompt ids is no turn: its messages are not its
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

    def _add(self, step: Step, index: int | None, body: Mapping[str, Any], place: Place, text: str | None) -> None:
        """Add the choices of a step after the messages of this place, or after this prompt text."""
        answers = answers_of(step)
        response_id = (step.response or {}).get("id")
        own_names = (response_id,) if isinstance(response_id, str) else ()
        names = {}
        for number, answer in answers.items():
            calls = _calls_by_id(step.step_id, answer.get("message"))
            names[number] = frozenset((*calls, *own_names))
            if calls:
                self.calls |= calls
                texts = [function.get("arguments") for function in calls.values()]
                size = _BYTES_PER_CALL * len(calls) + _length(texts)
                self.size += size
                self.longest = max(self.longest, size)
        before, parent, rendering = self._continued(step)
        options = options_of(body) if step.choices else b""
        prompts = [prompt if isinstance(prompt, array) else prompt[:] for prompt in step.prompts]
        for choice in step.choices:
            answer = answers.get(choice.index, {})
            turn = _turn(step, body, index, place, choice, answer, prompts, parent, rendering)
            if turn is None:
                continue
            turn.names = names.get(choice.index, _NO_NAMES)
            turn.options = options  # once for all choices: tools may be long
            if text is None:
                self.conversations.add(turn, before)
            else:
                whole = (text + str(answer.get("text", ""))).encode("utf-8", "surrogatepass")
                turn.place, turn.text_start = (len(whole), _digest(whole)), len(text)
                self.by_text.setdefault(len(whole), {}).setdefault(turn.place[1], []).append(turn)
            self.named[turn.step_id, turn.choice] = turn
            size = _length(map(turn.reply.get, ("content", *THOUGHTS)))
            self.size += _BYTES_PER_TURN + _BYTES_PER_ID * len(turn.ids) + size
            self.longest = max(self.longest, size)
            self._hold(turn.prompt)
            if turn.is_closed and turn.ids:
                self.stops.add((turn.kind, turn.model, turn.ids[-1]))
        if parent is not None:
            self._share(step, parent)

    def sampled_call(self, call_id: str) -> Message | None:
        """Return the name and the arguments of a tool call as sampled; None for an unknown id.

        If the engine assigned no id, the client has one of its dialect: a prefix, the step id and the index of the call.
        """
        return self.calls.get(call_id) or self.calls.get(call_id.partition("_")[2])

    def of_text(self, prompt: str) -> Iterator[list[Turn]]:
        """Yield the turns with a prompt and a completion text that begin this prompt, by the text, the longest first."""
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
        """Return the turn that a step follows, the same turn if the step continues it by ids, and the step's rendering.

        The rendering is None if it is the prompt.
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

    def _share(self, step: Step, parent: Turn) -> None:
        """Let the turns before a step use the array of its prompt, which begins with their ids."""
        own = next((turn for choice in step.choices if (turn := self.named.get((step.step_id, choice.index)))), None)
        if own is None or not step.exact:
            return
        before: Turn | None = parent
        while before is not None and before.prompt is not own.prompt:
            self._hold(own.prompt)
            self._release(before.prompt)
            before.prompt = own.prompt
            before = before.parent

    def _hold(self, prompt: Ids) -> None:
        users = self._users.get(id(prompt), 0)
        self._users[id(prompt)] = users + 1
        if not users:
            self.size += _BYTES_PER_ID * len(prompt)

    def _release(self, prompt: Ids) -> None:
        self._users[id(prompt)] -= 1
        if not self._users[id(prompt)]:
            del self._users[id(prompt)]
            self.size -= _BYTES_PER_ID * len(prompt)


def _calls_by_id(step_id: str, message: Any) -> dict[str, Message]:
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


def _turn(  # noqa: PLR0913, PLR0917 - the parts of a turn
    step: Step,
    body: Mapping[str, Any],
    index: int | None,
    place: Place,
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
    prompt, stops = prompts[choice.prompt], body.get("stop_token_ids")
    return Turn(
        step_id=step.step_id,
        choice=choice.index,
        index=-1 if index is None else index,
        place=place,
        reply=message,
        names=_NO_NAMES,
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


def _length(texts: Iterable[Any]) -> int:
    return sum([len(text) for text in texts if isinstance(text, str)])


def own_rendering(turn: Turn) -> Rendering:
    """Return what identifies the rendering of the messages of a turn's step."""
    return turn.rendering or rendering_of(turn.prompt_ids)


@dataclass(frozen=True, slots=True)
class Match:
    """A turn that a call continues."""

    turn: Turn
    history: list[Message]  # before the reply, as the turn's step rendered them
    reply: Message  # as the engine returned it
    new: list[Message]  # after it


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Turns with different ids that a call may continue; nothing in the call distinguishes them. The oldest is first."""

    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engine, model and policy that sample a call, and the agent that sends it."""

    kind: str  # of the engine
    model: str | None
    policy: str = DEFAULT_POLICY
    agent: str | None = None
    steps: Collection[str] = ()  # the call names their responses by id


def match(
    turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, mode: Mode, undelivered: Collection[str] = ()
) -> Match | Ambiguous | Reason | None:
    """Return the turn that a chat call continues, the reason why it continues none, or None if it is a first call.

    `body` is the body that is sent to the engine. If several turns match, the one after most messages is chosen; of equal ones,
    the one that `Conversations.follow` finds nearest. `undelivered`: steps that were marked as undelivered after they were
    added.
    """
    messages = body.get("messages")
    if not len(turns) or not isinstance(messages, list):
        return None
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "assistant" not in roles:
        return None
    if (problem := call_problem(body)) or (problem := _messages_problem(messages, roles)):
        return problem
    options = options_of(body)
    reason: Reason = "edited"
    for position, replies in turns.conversations.follow(
        messages,
        lambda turn: _fits(turn, options, sampler) is None,
        agent=sampler.agent,
        steps=sampler.steps,
        drops_thoughts=mode == "append",  # in `faithful` the template decides, but the agent removed these
    ):
        if not replies:
            if mode == "append":
                return "edited"
            continue
        turn = nearest(replies, undelivered)
        if turn is None:
            return Ambiguous(replies)
        refused = turn_problem(turn, options, sampler)
        if refused is None:
            restored = turn.restored
            history = [
                restore(restored[index], message) if index in restored else message
                for index, message in enumerate(messages[:position])
            ]
            return Match(turn, history, restore(turn.reply, messages[position]), messages[position + 1 :])
        reason = refused if reason == "edited" else reason  # the reason of the longest match
    return reason


def nearest(turns: Sequence[Turn], undelivered: Collection[str] = ()) -> Turn | None:
    """Return the youngest of turns with equal ids, the delivered ones if there are any; None if their ids differ."""
    if len(turns) == 1:
        return turns[0]
    turns = [turn for turn in turns if turn.step_id not in undelivered] or turns
    youngest = max(turns, key=lambda turn: turn.index)
    return youngest if all(turn is youngest or _has_ids_of(turn, youngest) for turn in turns) else None


def _has_ids_of(turn: Turn, other: Turn) -> bool:
    # The choices of a step share their prompt, which may be long.
    is_shared = turn.prompt is other.prompt and turn.prompt_length == other.prompt_length
    return turn.ids == other.ids and (is_shared or turn.prompt_ids == other.prompt_ids)


def call_problem(body: Mapping[str, Any]) -> Reason | None:
    """Return why a call of any dialect cannot be continued, by its options."""
    if has_own_ids(body):
        return "own_ids"
    if body.get("echo"):
        return "echo"
    if body.get("truncate_prompt_tokens") is not None:
        return "options"  # the engine may cut ids as well, and would then return others than were sent
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "prefill"
    return None


def _messages_problem(messages: Sequence[Any], roles: Sequence[Any]) -> Reason | None:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        if content is not None and not isinstance(content, str) and not _are_texts(content):
            return "content"
    if roles[-1] == "assistant":
        return "prefill"
    return None if "user" in roles else "no_user"


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        # With a field of a medium, even null, vLLM (0.32.0) ignores prompt ids.
        and (len(part) == _TEXT_FIELDS or not any(word in name for name in part for word in _MEDIA))
        for part in content
    )


def turn_problem(turn: Turn, options: bytes, sampler: Sampler) -> Reason | None:
    """Return why a turn cannot be continued by a call with these options and this sampler."""
    if turn.problem is not None:
        return turn.problem
    return _fits(turn, options, sampler) or (None if turn.ids else "empty")


def _fits(turn: Turn, options: bytes, sampler: Sampler) -> Reason | None:
    """Return why a turn does not fit: another engine, model or policy sampled it, or its call had other options."""
    if (turn.kind, turn.model, turn.policy) != (sampler.kind, sampler.model, sampler.policy):
        return "model"
    return "options" if turn.options != options else None


def restore(reply: Message, sent_back: Message) -> Message:
    """Return a reply as the engine returned it, as a message of a request.

    If the reply has no text, its content is null or empty, as the agent sent it. Tool calls have the ids that the agent sends
    back, because its tool messages refer to them; the name is the agent's.
    """
    message = {name: reply[name] for name in _REPLY_FIELDS if reply.get(name) not in (None, [], "")}
    nothing = sent_back.get("content")  # null and "" differ for some templates: what the call has is rendered
    message.setdefault("content", nothing if nothing in (None, "") else reply.get("content"))
    if sent_back.get("name") is not None:
        message["name"] = sent_back["name"]
    calls, theirs = message.get("tool_calls"), sent_back.get("tool_calls")
    if isinstance(calls, list) and isinstance(theirs, list) and len(calls) == len(theirs):
        message["tool_calls"] = [
            {**call, "id": sent["id"]} if isinstance(sent, Mapping) and sent.get("id") else call
            for call, sent in zip(calls, theirs, strict=True)
        ]
    return message


def match_text(
    turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, undelivered: Collection[str] = ()
) -> Turn | Ambiguous | Reason | None:
    """Return the turn that a text prompt continues, the reason why it continues none, or None if it is a first prompt.

    If several turns match, the longest text decides; after it the same agent, then whether the turn was delivered.
    """
    prompt = body.get("prompt")
    if not len(turns) or not isinstance(prompt, str):
        return None
    options = options_of(body)
    reason: Reason | None = None
    for equal in turns.of_text(prompt):
        problems = {turn: call_problem(body) or turn_problem(turn, options, sampler) for turn in equal}
        usable = [turn for turn, problem in problems.items() if problem is None]
        if usable:
            usable = [turn for turn in usable if turn.agent == sampler.agent] or usable
            usable = [turn for turn in usable if turn.is_delivered] or usable
            return nearest(usable, undelivered) or Ambiguous(usable)
        reason = reason or problems[equal[-1]]
    return reason
