"""`tokentape tail`: steps, a line each, as they are stored by whatever process.

Holds the following of `/events` and the lines. An event says that a step came; the step itself is asked for, with those
before it that were not told yet.

Rule 1: a step is told once, and those of one rollout in the order of storing.
Rule 2: what was stored while the connection was broken is told after it: nothing is told of it a second time, so it is
        looked for.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import orjson
from rich.console import Console
from rich.text import Text

from proxy.cli.api_client import ControlClient, path_of
from proxy.cli.console import print_json, print_lines, remark, visible
from proxy.cli.export import Refused, connected, sentence_of
from proxy.cli.render.step import counts_of, latency_of, summary, verdict_of
from proxy.cli.show import ControlAddress
from proxy.protocols.sse import EventParser
from proxy.server.shutdown import stopped_by_signals

_REMEMBERED: Final = 10_000  # rollouts and steps; an older one is told from the next event on
_SILENT_S: Final = 40  # the proxy says something every 15 s
_PAUSES_S: Final = (0.5, 10)  # between two tries to connect, twice as long each time: at first, and at the most
_LOOKED_AT: Final = 1000  # rollouts that are looked at after a broken connection, the newest ones
_SKEW_S: Final = 1  # by which the clocks of the proxy's processes may differ
_GONE = 404


async def tail(place: ControlAddress, rollout_id: str | None, last: int, out: Console, *, as_json: bool) -> None:
    """Print steps as they come, until a signal says otherwise; of one rollout first its `last`.

    Raises OSError with a sentence if the proxy cannot be reached at first, or refuses.
    """

    def tell(step: dict[str, Any]) -> None:
        told = summary(step)
        if as_json:
            print_json(told, lines=True)
        else:
            print_lines(out, [line(told, with_rollout=rollout_id is None)], indent=14)

    with stopped_by_signals():
        async with connected(place.url, place.settings, place.api_key) as (session, url):
            await Tail(ControlClient(session, url), rollout_id, last, tell).follow()


def line(told: dict[str, Any], *, with_rollout: bool) -> Text:
    """A step on one line."""
    at = datetime.fromtimestamp(told["time"]).astimezone()
    of_policy = "" if told["policy_version"] is None else f"  policy {visible(told['policy_version'])}"
    return Text.assemble(
        (f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}", "dim"),
        *(("  ", (f"{visible(told['rollout_id']):<26}", "bold")) if with_rollout else ()),
        (f"  #{told['index']:<4}", "cyan"),
        f"  {visible(told['dialect']):<11}  {visible(told['model'] or '?')}",
        f"  {counts_of(told):<24}  {latency_of(told):>7}{of_policy}  ",
        verdict_of(told),
        ("" if told["delivered"] else "  not delivered") + ("  late" if told.get("late") else ""),
    )


class Tail:
    """The steps of a proxy, or of one rollout, from now on; `tell` gets each. `is_connected` is set while events come."""

    def __init__(
        self, client: ControlClient, rollout_id: str | None, last: int, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._client = client
        self._only = rollout_id
        self._last = last
        self._tell = tell
        self._next: OrderedDict[str, int] = OrderedDict()  # by rollout, the index that was not told yet
        self._told: OrderedDict[str, None] = OrderedDict()  # step ids
        self.is_connected = asyncio.Event()
        self._since = 0.0  # unix seconds of the proxy's: whatever was stored before was told, or is not wanted

    async def follow(self) -> None:
        """Tell steps for ever; a connection that breaks is made again. Raises OSError if the first one cannot be made."""
        pause_s = _PAUSES_S[0]
        while True:
            try:
                async with aclosing(self._changes()) as changes:
                    async for change in changes:
                        pause_s = _PAUSES_S[0]
                        await (self._look_anew() if change is None else self._came(change))
            except BrokenPipeError:
                raise  # nobody reads what is told
            except OSError as error:
                if not self._since or (isinstance(error, Refused) and error.status < 500):
                    raise
                remark(f"{error}; trying again", "dim")
            self.is_connected.clear()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    async def _changes(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """None once connected, if there is something to look for; then each change."""
        only = {} if self._only is None else {"rollout_id": self._only}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENT_S)
        try:
            async with self._client.session.get(f"{self._client.url}/events", params=only, timeout=timeout) as answer:
                if answer.status != 200:
                    said = sentence_of(await answer.read())
                    raise Refused(f"{self._client.url}/events answered {answer.status}: {said}", answer.status)
                if self._since or self._only is not None:
                    yield None
                self._since = self._since or parsedate_to_datetime(answer.headers["Date"]).timestamp()
                self.is_connected.set()
                events = EventParser()
                async for read in answer.content.iter_any():
                    for event in events.feed(read):
                        if event.name == b"changed":
                            yield orjson.loads(event.payload)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{self._client.url} cannot be followed: {str(error) or type(error).__name__}") from error

    async def _look_anew(self) -> None:
        """Tell what came while nobody followed."""
        if self._only is not None:
            await self._look_at(self._only)
            return
        rollouts, _ = await self._client.listed("rollouts", _LOOKED_AT)
        since_ms = (self._since - _SKEW_S) * 1000
        for rollout in reversed([each for each in rollouts if each["touched_ms"] >= since_ms]):
            name = rollout["rollout_id"]
            await self._tell_from(name, self._next.get(name, 0), all_of_them=name in self._next)

    async def _look_at(self, name: str) -> None:
        try:
            rollout = await self._client.get(path_of(name))
        except Refused as refusal:
            if refusal.status != _GONE:
                raise
            remark(f"there is no rollout {name!r} yet", "dim")
            return
        begun = max(rollout["counts"]["steps"] - self._last, 0)
        await self._tell_from(name, self._next.get(name, begun), all_of_them=True)

    async def _came(self, change: dict[str, Any]) -> None:
        name, index = change["rollout_id"], change["index"]
        if index is not None and change["step_id"] not in self._told:
            # An index below the one that comes next is of another life: the rollout was deleted and opened again.
            await self._tell_from(name, min(self._next.get(name, index), index), all_of_them=True)

    async def _tell_from(self, name: str, start: int, *, all_of_them: bool = False) -> None:
        """Tell a rollout's steps from this index on: those that were not told, and were stored since."""
        try:
            async for step in self._client.steps(name, start):
                _remember(self._next, name, step["index"] + 1)
                stored = step["timing"]["stored"] or 0
                if step["step_id"] not in self._told and (all_of_them or stored >= self._since):
                    _remember(self._told, step["step_id"], None)
                    self._since = max(self._since, stored)
                    self._tell(step)
        except Refused as refusal:
            if refusal.status != _GONE:  # deleted meanwhile
                raise


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
