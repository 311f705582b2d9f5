"""Harbor's ATIF (v1.8, harbor 0.25): a trajectory for each rollout, with token ids and logprobs; and Harbor's RolloutDetail.

docs/harbor.md describes them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice, takewhile
from mimetypes import guess_type
from typing import Any, ClassVar, Final, TypeAlias

from proxy.export.base import IDS, JSON, LOGPROBS, PLAIN, TEXT, Columns, Fill, Format, Plan, skipped_rows
from proxy.export.sequence_view import RowSource
from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversations import Digests, Replies, calls_of, role_of, text_of
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.json_bytes import parse_text, to_json_bytes
from proxy.trajectory.openings import texts_in
from proxy.trajectory.sequence import Options, Skipped, select
from proxy.trajectory.step import Choice, Step, answers_of, is_unlogged, messages_of
from proxy.trajectory.threads import MAIN, Thread, find_threads, title_of

_SOURCES: Final[Mapping[str, str]] = {"system": "system", "developer": "system", "user": "user"}
_IMAGE_TYPES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})

_RESTORED: Final = 16  # replies that are compared with a message
_CHANGED: Final = 256  # choices that are compared with a changed message

Call: TypeAlias = tuple[Step, Choice]
_Reply: TypeAlias = tuple[Step, Choice, Mapping[str, Any]]
Result: TypeAlias = Callable[[], dict[str, Any]]  # returns the result, and adds it if the tool has not answered


@dataclass(slots=True)
class _Entry:
    """A step, or an observation of one, and the index of its message. `call` is the recorded call of a sampled step."""

    message: int
    step: dict[str, Any]
    observed: dict[str, Any] | None = None
    call: Call | None = None


@dataclass(slots=True)
class Conversation:
    """The steps of one conversation, from its calls in the order of time.

    A message becomes a step once: messages that a call has in common with the history are not repeated, and the result of a
    tool is an observation of the step that called it. A reply that the next call does not contain was abandoned: it, and
    what followed the messages in common, are removed, and return if a later call contains them. Of several choices, the
    choice that the next call contains is the reply. An assistant message that was not sampled in this conversation is copied
    context, which consumers do not train.

    A call costs time for its new messages, and for the comparison with the call before.

    Invariant: the entries from `_settled` on are ordered by their messages; earlier entries are never removed.
    """

    _entries: list[_Entry] = field(default_factory=list)
    _settled: int = 0
    _messages: list[Any] = field(default_factory=list)
    _replies: list[tuple[Choice, Mapping[str, Any]]] = field(default_factory=list)  # of the call before
    _callers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # steps that called a tool, by its call ID
    _sampled: Replies[_Reply] = field(default_factory=Replies)
    _digests: Digests = field(default_factory=Digests)
    _kept: set[str] = field(default_factory=set)  # the recorded steps with a reply among the entries
    _said: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # by step and choice, which may return
    _text: str = ""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps, numbered from 1."""
        entries = [entry for entry in self._entries if entry.observed is None]
        return [
            {"step_id": number, **entry.step, **({} if entry.call is None else {"metrics": _metrics(*entry.call)})}
            for number, entry in enumerate(entries, 1)
        ]

    @property
    def calls(self) -> list[Call]:
        """The calls with a reply in the conversation, each with the choice of that reply."""
        return [entry.call for entry in self._entries if entry.call is not None]

    @property
    def prompt(self) -> str:
        """The texts before the first reply."""
        before = takewhile(lambda entry: entry.call is None, self._entries)
        return "\n".join(_text({"content": entry.step["message"]}) for entry in before)

    def add(self, step: Step, choices: Sequence[Choice]) -> None:
        """Add a call and its reply: of several choices, the choice that the next call continues, or the first."""
        answers, messages = answers_of(step), messages_of(step)
        chain = [b"", *self._digests.chain(messages)]  # of the messages before each index
        if messages:
            at = self._after_reply(messages)
            for index in range(at, len(messages)):
                if not self._restore(index, messages[index], chain[index]):
                    self._add_message(index, messages[index])
        else:
            self._add_text(step, answers.get(choices[0].index, {}).get("text"))
        self._messages = messages
        self._replies = [
            (choice, _reply_of(answers.get(choice.index, {}), is_chat=bool(messages))) for choice in choices
        ]
        for choice, reply in self._replies:
            self._sampled.add(chain[-1], _copy_key(reply), (step, choice, reply))
        self._add_sampled(len(messages), step, *self._replies[0])

    def results(self) -> dict[tuple[str, str, str], dict[str, Result]]:
        """Return the results of tool calls by the text of an argument; these by recorded step, tool and title of the text."""
        found: defaultdict[tuple[str, str, str], dict[str, Result]] = defaultdict(dict)
        for entry in self._entries:
            if entry.call is None:
                continue
            for called in entry.step.get("tool_calls", ()):
                for text in texts_in(called["arguments"]):
                    key = entry.call[0].step_id, called["function_name"], title_of(text)
                    found[key].setdefault(text.strip(), partial(_observed, entry.step, called["tool_call_id"]))
        return found

    def _after_reply(self, messages: Sequence[Any]) -> int:
        """Return the index after the previous reply. If it is missing, remove it; return the index of the first new message."""
        if not self._replies:
            return 0
        common = count_equal(self._messages, list(messages))
        is_whole = common == len(self._messages) < len(messages)
        by_key: dict[Hashable, int] = {}
        for number, (_, reply) in enumerate(self._replies):
            by_key.setdefault(_copy_key(reply), number)
        if is_whole:
            chosen = self._copied(messages[common], by_key)
            if chosen is None:
                changed = (_may_be_copy(messages[common], reply) for _, reply in self._replies[:_CHANGED])
                chosen = next((at for at, may_be in enumerate(changed) if may_be), None)
            if chosen is not None:
                self._choose(chosen)
                return common + 1
        for index in range(len(messages) - 1, common - 1, -1):
            chosen = self._copied(messages[index], by_key)
            if chosen is not None:
                self._choose(chosen)
                self._settled = len(self._entries)  # the history was changed or cut: it is not repeated
                return index + 1
        self._abandon(common)
        return common

    def _copied(self, message: Any, by_key: Mapping[Hashable, int]) -> int | None:
        """Return the number of the first reply of the call before that equals this message; None if no reply does."""
        if role_of(message) != "assistant":
            return None
        keys = tuple(map(str, _call_ids(message))), _text(message)
        numbers = sorted(number for key in keys if (number := by_key.get(key)) is not None)
        return next((number for number in numbers if _is_copy(message, self._replies[number][1])), None)

    def _choose(self, number: int) -> None:
        if number:
            step, _ = self._remove().call or (None, None)
            assert step is not None
            self._add_sampled(len(self._messages), step, *self._replies[number])

    def _restore(self, index: int, message: Any, before: bytes) -> bool:
        """Add the message with this index as the reply that was sampled after the messages before it; return whether it was.

        The agent returns to a conversation that it left: it searches a tree, or runs equal sub-agents in parallel.
        """
        found = self._sampled.at(before).get(_copy_key(message), ()) if role_of(message) == "assistant" else ()
        for step, choice, reply in islice(found, _RESTORED):
            if step.step_id not in self._kept and _is_copy(message, reply):
                self._add_sampled(index, step, choice, reply)
                return True
        return False

    def _add_sampled(self, index: int, step: Step, choice: Choice, reply: Mapping[str, Any]) -> None:
        key = step.step_id, choice.index
        if key not in self._said:
            self._said[key] = _said(reply)
        self._append(_Entry(index, _sampled_step(step, choice, self._said[key]), call=(step, choice)))

    def _add_text(self, step: Step, text: Any) -> None:
        """Add the part of a prompt's text that is new, as a message of the user."""
        prompt = step.body.get("prompt")
        if isinstance(prompt, str):
            new = prompt.removeprefix(self._text) if self._text else prompt
            self._append(_Entry(0, {"source": "user", "message": new}))
            self._text = prompt + (text if isinstance(text, str) else "")
        self._settled = len(self._entries)

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if entry.call is not None:
            self._kept.add(entry.call[0].step_id)
        for called in entry.step.get("tool_calls", ()) if entry.observed is None else ():
            self._callers.setdefault(called["tool_call_id"], []).append(entry.step)

    def _remove(self) -> _Entry:
        entry = self._entries.pop()
        if entry.call is not None:
            self._kept.discard(entry.call[0].step_id)
        if entry.observed is None:
            for called in entry.step.get("tool_calls", ()):
                self._callers[called["tool_call_id"]].pop()
            return entry
        results = entry.step["observation"]["results"]
        results.pop()
        if not results:
            del entry.step["observation"]
        return entry

    def _abandon(self, at: int) -> None:
        while len(self._entries) > self._settled and self._entries[-1].message >= at:
            self._remove()

    def _add_message(self, index: int, message: Any) -> None:
        call_id = message.get("tool_call_id") if role_of(message) == "tool" else None
        callers = self._callers.get(call_id) if isinstance(call_id, str) else None
        if not callers:
            self._append(_Entry(index, _message_step(message)))
            return
        results = callers[-1].setdefault("observation", {"results": []})["results"]
        results.append({"source_call_id": call_id, "content": content_of(message.get("content"))})
        self._entries.append(_Entry(index, callers[-1], results[-1]))


def _copy_key(message: Mapping[str, Any]) -> Hashable:
    return tuple(map(str, _call_ids(message))) or _text(message)


def _reply_of(answer: Mapping[str, Any], *, is_chat: bool) -> Mapping[str, Any]:
    reply = answer.get("message") if is_chat else {"role": "assistant", "content": answer.get("text")}
    return reply if isinstance(reply, dict) else {"role": "assistant", "content": None}


def _observed(step: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Return the result of a tool call in the observation of its step; it is added if there is none."""
    results: list[dict[str, Any]] = step.setdefault("observation", {"results": []})["results"]
    for result in results:
        if result["source_call_id"] == call_id:
            return result
    results.append({"source_call_id": call_id})
    return results[-1]


def _message_step(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {"source": "user", "message": _text_of(message)}
    role, content = message.get("role"), content_of(message.get("content"))
    if role == "assistant":
        return {"source": "agent", **_said(message), "is_copied_context": True}
    if role in ("tool", "function"):  # of a call that this conversation does not have
        facts = {key: message[key] for key in ("tool_call_id", "name") if key in message}
        return {"source": "system", "message": "", "observation": {"results": [{"content": content, "extra": facts}]}}
    source = _SOURCES.get(role) if isinstance(role, str) else None
    extra = {} if source is not None else {"extra": {"role": role}}
    return {"source": source or "user", "message": content, **extra}


def _sampled_step(step: Step, choice: Choice, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step of a sampled reply; `said` is from `_said`. Its metrics are added once it is known to be kept."""
    versions = [span.policy_version for span in choice.spans] or [step.policy_version]
    extra = {
        "step_id": step.step_id,
        "choice": choice.index,
        "finish_reason": choice.finish_reason,
        "policy": step.policy,
        "policy_versions": versions,
        "problems": list(step.problems),
    }
    return {
        "timestamp": datetime.fromtimestamp(step.timing.received, UTC).isoformat(),
        "source": "agent",
        "model_name": step.model_served or step.model_asked or "unknown",
        **said,
        "metrics": {},
        "llm_call_count": 1,
        "extra": {name: value for name, value in extra.items() if value not in (None, [])},
    }


def _metrics(step: Step, choice: Choice) -> dict[str, Any]:
    prompt = step.prompts[choice.prompt].tolist()
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(choice.ids),
        **({} if step.cached_tokens is None else {"cached_tokens": step.cached_tokens}),
        "prompt_token_ids": prompt,
        "completion_token_ids": choice.ids.tolist(),
        **({} if is_unlogged(step) else {"logprobs": choice.logprobs.tolist()}),
    }


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls")
    said: dict[str, Any] = {"message": content_of(message.get("content"))}
    if isinstance(reasoning, str):
        said["reasoning_content"] = reasoning
    if isinstance(calls, list) and calls:
        said["tool_calls"] = [_tool_call(number, call) for number, call in enumerate(calls)]
    return said


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    """Return a tool call. Arguments that are no JSON object are in `extra`, as the model wrote them."""
    fields = call if isinstance(call, dict) else {}
    called = fields.get("function") or fields.get("custom") or {}
    called = called if isinstance(called, dict) else {}
    text = called.get("arguments", called.get("input"))
    try:
        arguments = parse_text(text) if isinstance(text, str) else text
    except ValueError:
        arguments = None
    found = {
        "tool_call_id": str(fields.get("id") or f"call_{number}"),
        "function_name": str(called.get("name") or "unknown"),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }
    return found if isinstance(arguments, dict) else {**found, "extra": {"arguments": text}}


def content_of(content: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or ATIF's parts. An image without a known type is a text with its URL."""
    if isinstance(content, list):
        return [_part(part) for part in content]
    return "" if content is None else _text_of(content)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, dict):
        if isinstance(text := part.get("text"), str):
            return {"type": "text", "text": text}
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if isinstance(url, str):
            media_type = guess_type(url)[0]
            if media_type in _IMAGE_TYPES:
                return {"type": "image", "source": {"media_type": media_type, "path": url}}
            return {"type": "text", "text": url}
    return {"type": "text", "text": _text_of(part)}


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else to_json_bytes(value).decode()


def _may_be_copy(message: Any, reply: Mapping[str, Any]) -> bool:
    """Return whether a message in the place of this reply may be a changed copy of it."""
    if role_of(message) != "assistant":
        return False
    calls, own_calls = _call_ids(message), _call_ids(reply)
    if calls and own_calls:
        return calls == own_calls
    text, own_text = _text(message), _text(reply)
    return text in own_text or own_text in text


def _is_copy(message: Any, reply: Mapping[str, Any]) -> bool:
    """Return whether a message is this reply as a client sends it back: with its tool calls, or else with its text."""
    if role_of(message) != "assistant":
        return False
    calls = _call_ids(reply)
    if calls:
        return calls == _call_ids(message)
    text = _text(reply)
    return text != "" and text == _text(message)


def _text(message: Mapping[str, Any]) -> str:
    return text_of(message).strip()


def _call_ids(message: Mapping[str, Any]) -> list[Any]:
    return [call.get("id") for call in calls_of(message)]


_VERSION: Final = "ATIF-v1.8"
_UNKNOWN: Final = "unknown"


@dataclass(slots=True)
class _Told:
    """A thread, its conversation, and its calls in the conversation."""

    thread: Thread
    name: str
    conversation: Conversation
    calls: list[tuple[Step, Choice]]

    @property
    def kind(self) -> str:
        """The kind of the thread. Rules may have given it, so that its name has precedence."""
        kind, _, digest = self.name.partition(":")
        return kind if digest or kind == MAIN else self.thread.kind


class _ByThread(Format):
    """A format with one conversation for each thread, without replies that the agent abandoned."""

    by_thread = True
    whole = True

    def told(self, steps: Sequence[Step], options: Options) -> tuple[list[_Told], list[Skipped]]:
        """Return the threads of a rollout as conversations, the main one first, and the steps that are in none."""
        chosen, skipped = select(steps, options)
        threads = find_threads({step.step_id: step for step, _ in chosen}.values())
        found: dict[str, _Told] = {}
        for _, choices in groupby(chosen, key=lambda call: call[0].step_id):
            calls = list(choices)
            step, thread = calls[0][0], threads.of[calls[0][0].step_id]
            name = step.thread or thread.name
            told = found.setdefault(name, _Told(thread, name, Conversation(), []))
            told.conversation.add(step, [choice for _, choice in calls])
        for told in found.values():
            told.calls = told.conversation.calls
        kept = {step.step_id: choice.index for told in found.values() for step, choice in told.calls}
        for step, choice in chosen:
            if step.step_id not in kept:
                skipped.append(Skipped(step.step_id, "the conversation continued without its reply", len(choice.ids)))
            elif kept[step.step_id] != choice.index:
                why = f"choice {choice.index} of the call is in no conversation"
                skipped.append(Skipped(step.step_id, why, len(choice.ids)))
        order = {thread.name: number for number, thread in enumerate(threads.all)}
        return sorted(found.values(), key=lambda told: (told.name != MAIN, order[told.thread.name])), skipped


class AtifFormat(_ByThread):
    """One trajectory for each rollout. `branches`, `max_len` and `row_weight` apply to joined rows only."""

    name = "atif"
    reward_place = "turn"
    has_images = True  # in its messages
    columns: ClassVar[Columns] = {
        "schema_version": TEXT,
        "session_id": TEXT,
        "trajectory_id": TEXT,
        "agent": JSON,
        "steps": JSON,
        "final_metrics": JSON,
        "extra": JSON,
        "subagent_trajectories": JSON,
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        threads, skipped = self.told(steps, options)
        trained = tuple(step.step_id for told in threads for step, _ in told.calls)
        rows = [trained] if threads else []
        return Plan(rows, skipped_rows(skipped), lambda: iter([_trajectory(facts, threads)] if threads else []))


def _trajectory(facts: RolloutFacts, threads: Sequence[_Told]) -> dict[str, Any]:
    main, others = threads[0], threads[1:]
    results = {key: found for told in threads for key, found in told.conversation.results().items()}
    for told in others:
        _refer(told, facts, results)
    embedded = [_document(facts, told) for told in others]
    return {**_document(facts, main), "subagent_trajectories": embedded or None}


def _refer(told: _Told, facts: RolloutFacts, results: Mapping[tuple[str, str, str], Mapping[str, Result]]) -> None:
    """Let the result of the tool call that started a thread refer to its trajectory.

    If several calls have arguments that begin alike, the call with its argument in the thread's prompt is chosen.
    """
    thread = told.thread
    found = results.get((thread.started_by or "", thread.tool or "", thread.title))
    if found is None:
        return
    prompt = told.conversation.prompt
    result = found.get(prompt.strip())  # an argument that equals the prompt is found without a search
    result = result or next((result for text, result in found.items() if text in prompt), next(iter(found.values())))
    reference = {"trajectory_id": _trajectory_id(facts, told), "session_id": facts.rollout_id}
    result().setdefault("subagent_trajectory_ref", []).append(reference)


def _trajectory_id(facts: RolloutFacts, told: _Told) -> str:
    return f"{facts.rollout_id}/{told.name}"


def _document(facts: RolloutFacts, told: _Told) -> dict[str, Any]:
    of_thread = facts.of_thread(told.name)
    steps = told.conversation.steps
    for step in steps:
        reward = facts.step_reward(step.get("extra", {}).get("step_id", ""))
        if reward is not None:
            step["extra"] = {**step["extra"], "reward": reward}
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    extra = {
        "thread": told.name,
        "kind": told.kind,
        "reward": of_thread.reward,
        "group_id": facts.group_id,
        "status": facts.status,
        "metadata": dict(facts.metadata),
    }
    return {
        "schema_version": _VERSION,
        "session_id": facts.rollout_id,
        "trajectory_id": _trajectory_id(facts, told),
        "agent": _agent(facts.metadata, told),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
            "total_cached_tokens": sum(each.get("cached_tokens", 0) for each in metrics),
            "total_steps": len(steps),
        },
        "extra": {name: value for name, value in extra.items() if value not in (None, {})},
    }


def _agent(metadata: Mapping[str, Any], told: _Told) -> dict[str, Any]:
    name, version = metadata.get("agent_name"), metadata.get("agent_version")
    tools = told.calls[-1][0].body.get("tools") if told.calls else None
    agent = {
        "name": told.thread.agent or (name if isinstance(name, str) and name else _UNKNOWN),
        "version": version if isinstance(version, str) and version else _UNKNOWN,
        "model_name": told.thread.model,
        "tool_definitions": [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else None,
    }
    return {name: value for name, value in agent.items() if value is not None}


class RolloutDetailFormat(_ByThread):
    """One RolloutDetail for each thread; its lists have an entry for each turn."""

    name = "rollout_detail"
    columns: ClassVar[Columns] = {
        "prompt_token_ids": [IDS],
        "completion_token_ids": [IDS],
        "logprobs": [LOGPROBS],
        "extra": {"step_id": [TEXT], "policy_version": [TEXT]},
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan the rows. Rendering raises Inexpressible for a turn without logprobs."""
        self.check_images(facts, steps)
        threads, skipped = self.told(steps, options)
        threads = [told for told in threads if told.calls]
        source = RowSource(self.name, facts, {step.step_id: step for step in steps}, fill)

        def rendered() -> Iterator[Any]:
            for told in threads:
                yield _detail(told, source)

        trained = [tuple(step.step_id for step, _ in told.calls) for told in threads]
        return Plan(trained, skipped_rows(skipped), rendered, threads=[told.name for told in threads])


def _detail(told: _Told, source: RowSource) -> dict[str, Any]:
    for step, _ in told.calls:
        if is_unlogged(step):
            raise source.refuse_unlogged(f"step {step.step_id!r}")
    return {
        "prompt_token_ids": [step.prompts[choice.prompt].tolist() for step, choice in told.calls],
        "completion_token_ids": [choice.ids.tolist() for _, choice in told.calls],
        "logprobs": [choice.logprobs.tolist() for _, choice in told.calls],
        "extra": {
            "step_id": [step.step_id for step, _ in told.calls],
            "policy_version": [step.policy_version for step, _ in told.calls],
        },
    }
