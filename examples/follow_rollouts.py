"""Writes a line for each finished rollout to a file, as they end: reward, lengths, drift and staleness.

Shows how to follow `/events` so that each rollout is logged once. The line is on disk before it is passed on, for example to a
tracker (track_rollouts.py), which continues after the last line that it has. So this program may die at any time.
"""

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tokentape import Client, ClientError
from tokentape.types import Rollout

Entry = dict[str, Any]  # rollout_id, finished_ms, values
Track = Callable[[int, Entry], None]  # logs the entry in this line of the file
ENDS = ("failed", "aborted", "completed", "truncated")
RETRY_S = 5.0
CLOCKS_MS = 60_000  # between replicas


def values_of(client: Client, rollout: Rollout, policy: str) -> dict[str, float]:
    """Return the logged values of a rollout. The version sampled its oldest live token; unknown values are omitted."""
    values: dict[str, float] = {
        name: rollout["counts"][name] for name in ("steps", "prompt_tokens", "sampled_tokens", "flagged")
    }
    values["completed"] = int(rollout["status"] == "completed")
    if rollout["reward"] is not None:
        values["reward"] = rollout["reward"]
    tree = client.tree(rollout["rollout_id"], texts=False)
    values["drift"] = tree["counts"]["drift"]
    own = (node for node in tree["nodes"] if node.get("policy", "default") == policy and "inherited" not in node)
    known = [(node.get("policy_epoch", 0), node["policy_version"] or "") for node in own]
    numbers = [(epoch, int(version)) for epoch, version in known if version.isdecimal()]
    announced = client.policy(policy)
    if numbers:
        epoch, values["policy_version"] = min(numbers)
        if epoch == announced["epoch"] and (announced["version"] or "").isdecimal():
            values["staleness"] = int(announced["version"]) - values["policy_version"]
    return values


def is_over(rollout: Rollout) -> bool:
    """Return whether a rollout is finished, and has its reward unless it failed."""
    return rollout["status"] in (ENDS[:2] if rollout["reward"] is None else ENDS)


class Log:
    """A file, which this locks, and the tracker, which first gets the lines from `start` that it lacks."""

    def __init__(self, file: BinaryIO, start: int, track: Track) -> None:
        self._file, self._track = file, track
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.seek(0)
        lines = [line for line in self._file if line.endswith(b"\n")]  # the last one is cut if its process died
        self._file.truncate(sum(map(len, lines)))
        if start > len(lines):
            raise SystemExit(f"The run has {start} rollouts, {file.name} has {len(lines)}: use another --run or --file")
        for number, line in enumerate(lines[start:], start):
            track(number, json.loads(line))
        self.known = {json.loads(line)["rollout_id"] for line in lines}

    def add(self, entry: Entry) -> None:
        """Write a rollout to the file, then log it."""
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file)
        self.known.add(entry["rollout_id"])
        self._track(len(self.known) - 1, entry)


def missed(client: Client, log: Log, since_ms: int) -> tuple[list[str], int]:
    """Return the rollouts that are over and not logged, the oldest first, and the time since which later ones are opened.

    All that were opened before are logged: the next search does not read them.
    """
    over: list[Rollout] = []
    newest_ms, pending_ms = since_ms, []
    for rollout in client.rollouts(since=since_ms // 1000, page=1000):
        newest_ms = max(newest_ms, rollout["created_ms"] - CLOCKS_MS)
        if rollout["rollout_id"] not in log.known:
            pending_ms.append(rollout["created_ms"])
            over += [rollout] if is_over(rollout) else []
    over.sort(key=lambda rollout: rollout["finished_ms"] or 0)
    return [rollout["rollout_id"] for rollout in over], min([newest_ms, *pending_ms])


def add(client: Client, log: Log, name: str, policy: str) -> None:
    """Log a rollout if it is over. One that was deleted meanwhile, or with a damaged step, is not logged."""
    try:
        rollout = client.rollout(name)
        if is_over(rollout):
            values = values_of(client, rollout, policy)
            log.add({"rollout_id": name, "finished_ms": rollout["finished_ms"], "values": values})
    except ClientError as error:
        if error.status not in (404, 409):
            raise


def follow(client: Client, log: Log, policy: str, *, once: bool) -> None:
    """Log the rollouts that are over, then each that ends; what changes in them afterwards is not logged."""
    since_ms = 0
    for change in client.events():
        if change is None:  # changes may have been missed
            names, since_ms = missed(client, log, since_ms)
            for name in names:
                add(client, log, name, policy)
            if once:
                return
        elif change["index"] is None and change["rollout_id"] not in log.known:  # not a step
            add(client, log, change["rollout_id"], policy)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of `run`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument("--policy", default="default", help="policy whose versions are logged (default: %(default)s)")
    parser.add_argument("--file", type=Path, default=Path("rollouts.ndjson"), help="the file (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="log the rollouts that are finished, and end")
    return parser


def run(options: argparse.Namespace, start: int, track: Track) -> None:
    """Log rollouts until the program is stopped, also after failures of the proxy or its store."""
    key = os.environ.get("TOKENTAPE_API_KEY")
    with options.file.open("a+b") as file, Client(options.url, api_key=key) as client:
        log = Log(file, start, track)
        while True:
            try:
                return follow(client, log, options.policy, once=options.once)
            except ClientError as error:
                if not error.may_pass:
                    raise
                print(f"{error}; trying again in {RETRY_S:g} s", file=sys.stderr)
            time.sleep(RETRY_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the lines to the file, and print them."""
    run(parser_of(__doc__).parse_args(arguments), 0, lambda number, entry: print(number, json.dumps(entry)))


if __name__ == "__main__":
    main()
