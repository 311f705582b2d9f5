"""Scripts: what the simulated model says, turn by turn, instead of drawn words.

Holds the reading of a script and the finding of a turn. Scripted text is sampled as any other: as ids, with logprobs, parsed
as a reply is. Which turn a chat is at is told by how many replies it holds already: so every rollout, retry and branch gets
the turn that is its own. It must not hold sockets.

    - say: I look that up.                             # a list of turns; each field may be absent
      think: The user wants the weather.
      call: [{name: weather, arguments: {city: Oslo}}]   # arguments as text are said as they stand
    - fail: {status: 503, times: 2}                    # the first two attempts at this turn
      say: It rains.
      cut: 3                                           # the first attempt breaks off after three tokens

or several conversations, of which the first counts whose `when` occurs in the first message of a user:

    - when: Oslo
      turns: [{say: It rains.}]
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RefusedError, bad_value
from proxy.simulator.template import call_text, content_text

_STRICT: Final = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Said:
    """A tool call."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class Failure:
    """A refusal, so many times."""

    status: int = 500
    times: int = 1
    message: str = "the script says so"


@dataclass(frozen=True, config=_STRICT)
class Turn:
    """One reply: a thought, a text, calls, in this order; or first a failure."""

    say: str = ""
    think: str = ""
    call: list[Said] = field(default_factory=list)
    fail: Failure | None = None
    cut: int | None = None

    @property
    def text(self) -> str:
        """The reply as the model writes it, and as the template repeats it."""
        said = (f"<think>{self.think}</think>" if self.think else "") + self.say
        return "\n".join(filter(None, (said, *(call_text(call.name, call.arguments) for call in self.call))))


@dataclass(frozen=True, config=_STRICT)
class Conversation:
    """Turns for the chats that speak of something; of anything, if `when` is empty."""

    turns: list[Turn]
    when: str = ""


_READ: Final = TypeAdapter(list[Turn] | list[Conversation])


class Script:
    """A script at work: it remembers which failures were had."""

    __slots__ = ("_conversations", "_had")

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = tuple(conversations)
        self._had: Counter[tuple[str, int, int]] = Counter()

    def turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, int | None]:
        """The turn that a chat is at, and after how many tokens this attempt at it breaks off.

        Raises RefusedError for a failure that the script wants, and where it has no such turn.
        """
        asked = next((content_text(one.get("content")) for one in messages if one.get("role") == "user"), "")
        number = sum(one.get("role") == "assistant" for one in messages)
        place = next((at for at, one in enumerate(self._conversations) if one.when in asked), None)
        if place is None:
            raise bad_value(f"The script has no conversation for {asked[:80]!r}.", "messages")
        conversation = self._conversations[place]
        if number >= len(conversation.turns):
            raise bad_value(
                f"The script has {len(conversation.turns)} turns, and this is turn {number + 1}.", "messages"
            )
        turn = conversation.turns[number]
        attempt = self._had[asked, place, number]
        self._had[asked, place, number] += 1
        failures = 0 if turn.fail is None else turn.fail.times
        if turn.fail is not None and attempt < failures:
            raise RefusedError(turn.fail.message, status=turn.fail.status, kind="InternalServerError")
        return turn, turn.cut if attempt == failures else None


def read_script(path: Path) -> Script:
    """The script of a YAML or JSON file. Raises ValueError, saying what is wrong with it, or OSError."""
    try:
        read = _READ.validate_python(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"the script {path} is not YAML: {error}") from error
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:4])
        raise ValueError(f"the script {path} cannot be read: {told}") from error
    turns = [one for one in read if isinstance(one, Turn)]
    return Script([one for one in read if isinstance(one, Conversation)] or [Conversation(turns)])
