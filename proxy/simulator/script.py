"""Scripts: the replies of the simulated model, turn by turn, in place of drawn words.

Scripted text is sampled like any other: as ids, with logprobs, and parsed as a reply. The number of assistant messages in
a chat determines its turn, so every rollout, retry and branch gets its own turn.

    - say: I look that up.                             # a list of turns; every field is optional
      think: The user wants the weather.
      call: [{name: weather, arguments: {city: Oslo}}]   # arguments that are a string are written unchanged
    - fail: {status: 503, times: 2}                    # the first two attempts at this turn
      say: It rains.
      cut: 3                                           # the next attempt disconnects after three tokens
    - say: The sun shines.
      cut: [{after: 2, by: abort}, 1]                  # the first attempt is aborted, the second disconnects

or several conversations; the first applies that has its `when` in the first user message, or else in the next ones:

    - when: Oslo
      turns: [{say: It rains.}]
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.template import call_text, content_text

_STRICT: Final = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class ScriptedCall:
    """A tool call."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class Failure:
    """An error response to the first `times` attempts."""

    status: int = 500
    times: int = 1
    message: str = "the script requests this error"


@dataclass(frozen=True, config=_STRICT)
class Cut:
    """An early end of a response after this many of its tokens.

    It is aborted by the engine, or its connection is lost, after an event or within the next one (`torn`).
    """

    after: int
    by: Literal["abort", "lost", "torn"] = "lost"


@dataclass(frozen=True, config=_STRICT)
class Turn:
    """One reply: reasoning, text and calls, in this order.

    `fail`: error responses before it. `cut`: how the attempts after them end early, one by one; a number disconnects.
    """

    say: str = ""
    think: str = ""
    call: list[ScriptedCall] = field(default_factory=list)
    fail: Failure | None = None
    cut: int | Cut | list[int | Cut] | None = None

    @property
    def cuts(self) -> list[Cut]:
        """`cut` as a list."""
        listed = self.cut if isinstance(self.cut, list) else [] if self.cut is None else [self.cut]
        return [Cut(cut) if isinstance(cut, int) else cut for cut in listed]

    def text(self, calls: str | None = None) -> str:
        """Return the reply as the model writes it; `calls` is the text of its calls, by default as the template's."""
        text = (f"<think>{self.think}</think>" if self.think else "") + self.say
        calls = "\n".join(call_text(call.name, call.arguments) for call in self.call) if calls is None else calls
        return "\n".join(filter(None, (text, calls)))


@dataclass(frozen=True, config=_STRICT)
class Conversation:
    """The turns of chats that contain `when` in their first user message, or else in a later one."""

    turns: list[Turn]
    when: str = ""


_FILE: Final = TypeAdapter(list[Turn] | list[Conversation])


class Script:
    """A script, and how many attempts there were at each of its turns."""

    __slots__ = ("_attempts", "_conversations")

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = tuple(conversations)
        self._attempts: Counter[tuple[str, int, int]] = Counter()

    def turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, Cut | None]:
        """Return the turn of a chat, and how this attempt ends early (None: it does not).

        Raises RequestError if this attempt fails by the script, or the script has no conversation or turn for it.
        """
        users = [content_text(message.get("content")) for message in messages if message.get("role") == "user"] or [""]
        topic = users[0]  # later ones are needed for Codex, whose first message has the working directory
        number = sum(message.get("role") == "assistant" for message in messages)
        matching = (i for text in users for i, each in enumerate(self._conversations) if each.when in text)
        index = next(matching, None)
        if index is None:
            raise invalid_value(f"The script has no conversation for {topic[:80]!r}.", "messages")
        turns = self._conversations[index].turns
        if number >= len(turns):
            raise invalid_value(f"The script has {len(turns)} turns, and this is turn {number + 1}.", "messages")
        turn = turns[number]
        attempt = self._attempts[topic, index, number]
        self._attempts[topic, index, number] += 1
        failures = 0 if turn.fail is None else turn.fail.times
        if turn.fail is not None and attempt < failures:
            raise RequestError(turn.fail.message, status=turn.fail.status, kind="InternalServerError")
        return turn, turn.cuts[attempt - failures] if attempt - failures < len(turn.cuts) else None


def read_script(path: Path) -> Script:
    """Read a script from a YAML or JSON file.

    Raises:
        ValueError: the file is not a script; the message names the problems.
        OSError: the file cannot be read.
    """
    try:
        entries = _FILE.validate_python(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"script {path} is not valid YAML: {error}") from error
    except ValidationError as invalid:
        problems = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in invalid.errors()[:4]]
        raise ValueError(f"script {path} is invalid: {'; '.join(problems)}") from invalid
    turns = [entry for entry in entries if isinstance(entry, Turn)]
    conversations = [entry for entry in entries if isinstance(entry, Conversation)]
    return Script(conversations or [Conversation(turns)])
