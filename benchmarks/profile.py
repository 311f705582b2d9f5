"""Where the CPU time of a call goes: samples of TokenTape's process while 16 clients call it.

A timer of CPU time interrupts the process, and the sample is the Python function that runs. What the event loop does in C
between two functions, mostly reads and writes of sockets, counts for the function that runs next; what threads do, for the
function that the event loop runs meanwhile.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import results
from benchmarks.load import Calls, chat, conversation
from benchmarks.rows import run
from benchmarks.servers import started

_LOOP = "event loop, HTTP of agents"
_GENERATED = {
    "__create_fn__.<locals>.__init__": "constructors of dataclasses",
    "<lambda>": "constructors of named tuples",
}
_CLIENTS = 16
_SHOWN = 12
_SMALL = 0.03  # of each load's time: areas that are shown together
LOADS: dict[str, tuple[str, Calls, int]] = {
    "whole": ("unstreamed, 1,000 + 200 tokens", chat("whole"), 60),
    "stream": ("a burst of 200 events", chat("stream"), 20),
    "paced": ("an event each 8 ms", chat("paced"), 2),
    "turns": ("a turn of a conversation, 1k to 20k tokens, faithful", conversation(1_000, 1_000, 20, "faithful"), 8),
}


class Sample(NamedTuple):
    """Samples of one function, called directly or not by a file of TokenTape."""

    file: str
    function: str
    owner: str | None
    count: int

    @property
    def place(self) -> str:
        """The function and its file."""
        return _GENERATED.get(self.function, f"`{self.function}` ({self.file})")

    @property
    def area(self) -> str:
        """The package of TokenTape that the time is spent for."""
        if self.owner is None:
            return _LOOP
        return "/".join(Path(self.owner).parent.parts[:2])


class Profile(NamedTuple):
    """The samples of a load, and the CPU time of a call in µs: of TokenTape, of its store, and of bare."""

    samples: Sequence[Sample]
    proxy_us: float
    store_us: float
    bare_us: float

    def us(self, key: Callable[[Sample], str]) -> Counter[str]:
        """Return the µs of a call by this property of samples."""
        total = sum(sample.count for sample in self.samples)
        found: Counter[str] = Counter()
        for sample in self.samples:
            found[key(sample)] += sample.count
        return Counter({name: count / total * self.proxy_us for name, count in found.items()})


def measured(calls: Calls, rollouts: int) -> Profile:
    """Return the profile of a load, with new servers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        options = ("faithful", "", str(path))
        with (
            started("upstream") as upstream,
            started("bare", upstream.url) as bare,
            started("tokentape", upstream.url, f"embedded:{folder}/store", *options) as server,
        ):
            for place in (bare, server):
                run(place, calls, _CLIENTS, 1)
            alone, ours = (run(place, calls, _CLIENTS, rollouts) for place in (bare, server))
        samples = [Sample(*sample) for sample in json.loads(path.read_text())]
    return Profile(samples, ours.proxy_us, ours.store_us, alone.proxy_us)


def keep(command: str) -> None:
    """Measure and write where the CPU time of calls goes."""
    profiles = {what: measured(calls, rollouts) for what, calls, rollouts in LOADS.values()}
    areas = {what: profile.us(lambda sample: sample.area) for what, profile in profiles.items()}
    names = [name for name, _ in sum(areas.values(), Counter()).most_common()]
    large = [name for name in names if any(areas[what][name] > _SMALL * profiles[what].proxy_us for what in areas)]
    lines = {name: [found[name] for found in areas.values()] for name in large}
    lines["other packages"] = [sum(us for name, us in found.items() if name not in large) for found in areas.values()]
    lines["**TokenTape's process**"] = [profile.proxy_us for profile in profiles.values()]
    lines["its store"] = [profile.store_us for profile in profiles.values()]
    lines["bare"] = [profile.bare_us for profile in profiles.values()]
    rows = [[name, *(f"{value:,.0f}" for value in values)] for name, values in lines.items()]
    unstreamed = next(iter(profiles.values()))
    functions = unstreamed.us(lambda sample: sample.place).most_common(_SHOWN)
    how = (
        "CPU time of a call in µs with 16 clients, by the package that spends it or calls the library that does; reads and "
        "writes of sockets count for the function that runs next, and threads for what the event loop runs meanwhile.\n"
    )
    own = [[name, f"{value:.0f}"] for name, value in functions]
    tables = (
        results.table(["µs of a call", *profiles], rows),
        "The functions with the most time of their own, unstreamed:\n",
    )
    results.write(
        "profile", "Where the time of a call goes", command, how, *tables, results.table(["function", "µs"], own)
    )
