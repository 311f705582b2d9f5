"""The endings of the latest steps of a rollout, to find drift as soon as its next step is stored.

A window is found early so that its texts can be requested while the engine is available. `proxy.trajectory.drift`
later decides, over the whole rollout, which steps drifted and the kind of drift; it also finds the drift that is missed here.

Only the common case is covered: the messages repeat the reply unchanged at its position, and the ids differ within it or
before it. A step costs a digest of its reply and a comparison of its sampled ids, however long its rollout is.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.trajectory.arrays import Ids, Prompt
from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversations import Digests, role_of, thinks
from proxy.trajectory.drift import AROUND, OPENING, Window, window_at
from proxy.trajectory.step import Step, answers_of, messages_of

_ENDING_BYTES: Final = 1000  # an estimate: of one ending without its ids
_MAX_PER_POLICY: Final = 16
_LONGEST: Final = 2**18  # characters of a reply: their digest takes half a millisecond; longer ones are not remembered
_BEFORE: Final = OPENING + AROUND  # ids of the prompt that a window may contain


@dataclass(frozen=True, slots=True)
class _Ending:
    """How one choice ended."""

    engine: str
    position: int  # of the reply in later messages
    size: tuple[int, int]  # of the reply
    reply: bytes  # its digest
    has_thoughts: bool
    offset: int  # the position of the first of these ids
    ids: Ids  # the last ones of the prompt and all sampled ones

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)


class Endings:
    """The endings of the latest steps of one rollout by policy. `size`: their approximate memory in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._of: dict[str, deque[_Ending]] = {}

    def __repr__(self) -> str:
        return f"<Endings of {len(self._of)} policies, {self.size} bytes>"

    def add(self, step: Step) -> Window | None:
        """Add the ending of a step.

        Return the window around the position where its prompt differs from the step that it continues, if they differ
        and the kind may depend on the texts of the window.
        """
        if not step.is_chat or not step.choices or not step.prompts:
            return None
        messages = messages_of(step)
        window = _window(self._of.get(step.policy, ()), messages, step)
        if endings := _endings_of(step, len(messages)):
            known = self._of.setdefault(step.policy, deque())
            known += endings
            self.size += sum(map(_bytes, endings))
            while len(known) > _MAX_PER_POLICY:
                self.size -= _bytes(known.popleft())
        return window


def _window(known: Sequence[_Ending], messages: list[Any], step: Step) -> Window | None:
    prompt = step.prompts[0]
    if not known or _follows(known[-1], messages, prompt):
        return None
    nearest = _continued(known, messages)
    if not nearest:
        return None
    if any(prompt[ending.offset : ending.end] == ending.ids for ending in nearest):
        return None
    ending = nearest[0]
    index = ending.offset + count_equal(ending.ids, prompt[ending.offset : ending.end])
    may_show = index - AROUND >= ending.offset or ending.offset == 0
    if not may_show or (ending.has_thoughts and not thinks(messages[ending.position])):
        return None
    window = window_at(ending.engine, ending.ids, prompt[ending.offset : index + AROUND], index, ending.offset)
    return None if window.is_cut_off else window


def _follows(newest: _Ending, messages: list[Any], prompt: Prompt) -> bool:
    """Return whether a prompt continues the ids of the newest ending, and its messages have no later reply."""
    later = messages[newest.position + 1 :]
    has_reply = any(role_of(message) == "assistant" for message in later)
    return prompt[newest.offset : newest.end] == newest.ids and not has_reply


def _continued(known: Collection[_Ending], messages: list[Any]) -> list[_Ending]:
    """Find the last message that repeats a reply at its position; return all endings with this reply there."""
    digests = Digests()
    for position in sorted({ending.position for ending in known if ending.position < len(messages)}, reverse=True):
        size = _size(messages[position])
        alike = [ending for ending in known if ending.position == position and ending.size == size]
        if not alike:  # an agent's message can have many megabytes, and needs no digest
            continue
        reply = digests.of(messages[position])
        if found := [ending for ending in alike if ending.reply == reply]:
            return found
    return []


def _endings_of(step: Step, position: int) -> list[_Ending]:
    digests, answers, found = Digests(), answers_of(step), []
    for choice in step.choices[:_MAX_PER_POLICY]:
        message = answers.get(choice.index, {}).get("message")
        if not isinstance(message, dict) or choice.prompt or not choice.ids:
            continue
        prompt = step.prompts[0]
        offset = max(len(prompt) - _BEFORE, 0)
        ids = prompt[offset:] + choice.ids
        size = _size(message)
        if size[0] < 0 or sum(size) > _LONGEST:
            continue
        found.append(_Ending(step.engine.name, position, size, digests.of(message), thinks(message), offset, ids))
    return found


def _size(message: Any) -> tuple[int, int]:
    """Return the lengths of a message's content and of the arguments of its calls.

    They are equal for equal messages.
    """
    if not isinstance(message, dict):
        return -1, 0
    content, calls = message.get("content") or "", message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return (
        len(content) if isinstance(content, str) else -1,
        sum(len(text) for text in arguments if isinstance(text, str)),
    )


def _bytes(ending: _Ending) -> int:
    return len(ending.ids) * ending.ids.itemsize + _ENDING_BYTES
