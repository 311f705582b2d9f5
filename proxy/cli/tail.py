"""`tokentape tail`: prints steps as any process stores them, one line per step.

It follows `/events`. An event names a stored step; `tail` then fetches that step and earlier ones that it has not printed.

1. Each step is printed once, and the steps of a rollout in stored order.
2. Events are not repeated, so after a reconnect `tail` searches for steps that were stored meanwhile.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import NOT_FOUND
from typing import Any, Final
from urllib.parse import urlencode

import orjson
from rich.console import Console
from rich.text import Text

from proxy.cli.console import print_json, print_lines, print_note, visible
from proxy.cli.control import Control, ControlAddress, Refused, connected
from proxy.cli.render import counts, latency, outcome, policy, summary, verdict
from proxy.protocols.response import EventParser
from proxy.server.shutdown import stopped_by_signals

MAX_REMEMBERED: Final = 10_000  # rollouts and step IDs; a forgotten rollout continues with its next event
READ_TIMEOUT_S: Final = 40  # the proxy sends a comment every 15 s
BACKOFF_S: Final = (0.5, 10)  # initial and maximum delay between connection attempts; it doubles
MAX_SEARCHED: Final = 1000  # newest rollouts that are searched after a reconnect
CLOCK_SKEW_S: Final = 1  # between the proxy's processes


async def tail(address: ControlAddress, rollout_id: str | None, last: int, out: Console, *, as_json: bool) -> None:
    """Print steps until SIGINT or SIGTERM; of a single rollout, print its `last` steps first.

    Raises:
        OSError: The first connection failed, or the proxy returned an error.
    """

    def print_step(step: Mapping[str, Any]) -> None:
        row = summary(step)
        if as_json:
            print_json(row, lines=True)
        else:
            print_lines(out, [line(row, with_rollout=rollout_id is None)], indent=14)

    with stopped_by_signals():
        async with connected(address) as control:
            await Tail(control, rollout_id, last, print_step).follow()


def line(row: dict[str, Any], *, with_rollout: bool) -> Text:
    """Return a step summary as one line."""
    time = datetime.fromtimestamp(row["time"]).astimezone()
    named = policy(row)
    return Text.assemble(
        (f"{time:%H:%M:%S}.{time.microsecond // 1000:03d}", "dim"),
        *(("  ", (f"{visible(row['rollout_id']):<26}", "bold")) if with_rollout else ()),
        (f"  #{row['index']:<4}", "cyan"),
        f"  {visible(row['dialect']):<11}  {visible(row['model'] or '?')}",
        f"  {counts(row):<46}  {latency(row):>7}{named and '  ' + named}  ",
        verdict(row),
        outcome(row),
    )


class Tail:
    """Follows the steps of a proxy, or of one rollout, and calls `on_step` for each.

    `is_connected` is set while it receives events.
    """

    def __init__(
        self, client: Control, rollout_id: str | None, last: int, on_step: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._client = client
        self._only = rollout_id
        self._last = last
        self._on_step = on_step
        self._next: OrderedDict[str, int] = OrderedDict()  # by rollout, the index of the next step to print
        self._printed: OrderedDict[str, None] = OrderedDict()  # step IDs
        self.is_connected = asyncio.Event()
        self._since = 0.0  # unix seconds by the proxy's clock; steps stored earlier are not printed

    async def follow(self) -> None:
        """Follow until cancelled, and reconnect when the connection fails. Raises OSError if the first connection fails."""
        delay_s = BACKOFF_S[0]
        while True:
            try:
                async with aclosing(self._changes()) as changes:
                    async for change in changes:
                        delay_s = BACKOFF_S[0]
                        await (self._catch_up() if change is None else self._process(change))
            except BrokenPipeError:
                raise  # standard output is closed
            except OSError as error:
                if not self._since or (isinstance(error, Refused) and error.status < 500):
                    raise
                print_note(f"{error}; reconnecting", "dim")
            self.is_connected.clear()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, BACKOFF_S[1])

    async def _changes(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield each change; first None if steps may have been missed."""
        path = "/events" if self._only is None else f"/events?{urlencode({'rollout_id': self._only})}"
        async with self._client.response(path, timeout_s=READ_TIMEOUT_S) as response:
            if self._since or self._only is not None:
                yield None
            self._since = self._since or parsedate_to_datetime(response.headers["Date"]).timestamp()
            self.is_connected.set()
            events = EventParser()
            async for chunk in response.parts():
                for event in events.feed(chunk):
                    if event.name == b"changed":
                        yield orjson.loads(event.payload)

    async def _catch_up(self) -> None:
        """Print the steps that were stored while not connected."""
        if self._only is not None:
            await self._catch_up_with(self._only)
            return
        rollouts = (await self._client.list_items("rollouts", MAX_SEARCHED))["rollouts"]
        since_ms = (self._since - CLOCK_SKEW_S) * 1000
        for rollout in reversed([rollout for rollout in rollouts if rollout["touched_ms"] >= since_ms]):
            name = rollout["rollout_id"]
            await self._print_from(name, self._next.get(name, 0), any_age=name in self._next)

    async def _catch_up_with(self, name: str) -> None:
        try:
            rollout = await self._client.rollout(name)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
            print_note(f"rollout {name!r} does not exist yet; waiting for its first step", "dim")
            return
        start = max(rollout["counts"]["steps"] - self._last, 0)
        await self._print_from(name, self._next.get(name, start), any_age=True)

    async def _process(self, change: dict[str, Any]) -> None:
        name, index = change["rollout_id"], change["index"]
        if index is not None and change["step_id"] not in self._printed:
            # If the index is below the next one, the rollout was deleted and opened again.
            await self._print_from(name, min(self._next.get(name, index), index), any_age=True)

    async def _print_from(self, name: str, start: int, *, any_age: bool = False) -> None:
        """Print a rollout's unprinted steps from index `start`; without `any_age`, only those stored since the last one."""
        try:
            async for step in self._client.steps(name, after=start - 1 if start else None):
                _remember(self._next, name, step["index"] + 1)
                stored = step["timing"]["stored"] or 0
                if step["step_id"] not in self._printed and (any_age or stored >= self._since):
                    _remember(self._printed, step["step_id"], None)
                    self._since = max(self._since, stored)
                    self._on_step(step)
        except Refused as error:
            if error.status != NOT_FOUND:  # deleted meanwhile
                raise


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
