"""`tokentape track`: logs each finished rollout once to W&B, MLflow or standard output: its values, and some texts.

It follows `/events`. The line of a rollout is on disk before it is passed on to the tracker, which gets the lines that it lacks
after a failure: so the command may die at any time.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from proxy.cli.console import print_json, print_note
from proxy.cli.render import RolloutView, StepView
from proxy.cli.runner import Exit, fail
from tokentape import Client, ClientError
from tokentape.transport import require
from tokentape.types import Rollout

Entry = dict[str, Any]  # rollout_id, finished_ms, values
Track = Callable[[int, Entry, str | None], None]  # logs the entry in this line of the file, and the text of the rollout
ENDS: Final = ("failed", "aborted", "completed", "truncated")
RETRY_S: Final = 5.0
CLOCKS_MS: Final = 60_000  # between replicas
_BEGIN: Final = b'{"rollout_id":'  # of a line


@dataclass(frozen=True, slots=True)
class Tracked:
    """What is logged: versions of this policy, the text of each `sample`-th rollout (0: none), with `once` no later ones."""

    file: Path
    policy: str = "default"
    sample: int = 0
    once: bool = False


def wandb_run(project: str, name: str) -> tuple[int, Track]:
    """Open or continue a run of W&B; return how many rollouts it has, and the function that logs one."""
    require("wandb", user="--wandb", requirement="wandb")
    wandb = import_module("wandb")
    run = wandb.init(project=project, id=name, resume="allow")
    run.define_metric("rollout/*", step_metric="rollout/policy_version")

    def track(number: int, entry: Entry, text: str | None) -> None:
        logged = {f"rollout/{name}": value for name, value in entry["values"].items()}
        page = {} if text is None else {"sample": wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)}
        run.log({**logged, **page}, step=number)

    return run.step, track


def mlflow_run(experiment: str, name: str) -> tuple[int, Track]:
    """Open or continue a run of MLflow. The step of a metric is the policy version; equal metrics are stored once."""
    require("mlflow", user="--mlflow", requirement="mlflow-skinny")
    client, metric = import_module("mlflow").MlflowClient(), import_module("mlflow.entities").Metric
    found = client.get_experiment_by_name(experiment)
    place = client.create_experiment(experiment) if found is None else found.experiment_id
    quote = '"' if "'" in name else "'"
    if quote in name:
        raise ValueError(f"--run {name}: MLflow cannot search for a name with both ' and \"; use another one")
    runs = client.search_runs([place], f"attributes.run_name = {quote}{name}{quote}")
    run = runs[0] if runs else client.create_run(place, run_name=name)

    def track(number: int, entry: Entry, text: str | None) -> None:
        values, time_ms = entry["values"], entry["finished_ms"]
        step = values.get("policy_version", 0)
        metrics = [metric(f"rollout/{name}", value, time_ms, step) for name, value in values.items()]
        if text is not None:
            client.log_text(run.info.run_id, text, f"rollouts/{number}.txt")
        client.log_batch(run.info.run_id, [*metrics, metric("rollouts", number + 1, time_ms, number)])

    return int(run.data.metrics.get("rollouts", 0)), track


def printed(_number: int, entry: Entry, _text: str | None) -> None:
    """Print a line of the file."""
    print_json(entry, lines=True)


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
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process has {file.name}: use another --file") from error
        self._file.seek(0)
        *lines, cut = self._file.read().split(b"\n")  # the last one is cut if its process died
        if not all(line.startswith(_BEGIN) for line in lines) or not cut.startswith(_BEGIN[: len(cut)]):
            raise ValueError(f"{file.name} has another text than rollouts: use another --file")
        self._file.truncate(self._file.tell() - len(cut))
        if start > len(lines):
            raise ValueError(f"the run has {start} rollouts, {file.name} has {len(lines)}: use another --run or --file")
        entries = list(map(orjson.loads, lines))
        for number, entry in enumerate(entries[start:], start):
            track(number, entry, None)
        self.known = {entry["rollout_id"] for entry in entries}

    def add(self, entry: Entry, text: str | None = None) -> None:
        """Write a rollout to the file, then log it with its text."""
        self._file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        os.fsync(self._file)
        self.known.add(entry["rollout_id"])
        self._track(len(self.known) - 1, entry, text)


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


def add(client: Client, log: Log, name: str, options: Tracked) -> None:
    """Log a rollout if it is over. One that was deleted meanwhile, or with a damaged step, is not logged."""
    try:
        rollout = client.rollout(name)
        if is_over(rollout):
            values = values_of(client, rollout, options.policy)
            is_sampled = options.sample > 0 and len(log.known) % options.sample == 0
            text = text_of(client, rollout) if is_sampled else None
            log.add({"rollout_id": name, "finished_ms": rollout["finished_ms"], "values": values}, text)
    except ClientError as error:
        if error.status not in (404, 409):
            raise


def text_of(client: Client, rollout: Rollout) -> str:
    """Return what `tokentape show --whole` prints of a rollout."""
    name = rollout["rollout_id"]
    view = RolloutView(rollout, client.tree(name), list(client.steps(name)), StepView(whole=True))
    return "\n".join(line.plain for line in view.lines())


def follow(client: Client, log: Log, options: Tracked) -> None:
    """Log the rollouts that are over, then each that ends; what changes in them afterwards is not logged."""
    since_ms = 0
    for change in client.events():
        if change is None:  # changes may have been missed
            names, since_ms = missed(client, log, since_ms)
            for name in names:
                add(client, log, name, options)
            if options.once:
                return
        elif change["index"] is None and change["rollout_id"] not in log.known:  # not a step
            add(client, log, change["rollout_id"], options)


def track(url: str, api_key: str | None, options: Tracked, start: int, log_one: Track) -> None:
    """Log rollouts until Ctrl-C, also after failures of the proxy or its store; with `once`, a failure ends it.

    Raises:
        ClientError: The proxy refuses the requests, or with `once` is unreachable.
        OSError, ValueError: The file cannot be written, or belongs to another process or run.
    """
    with options.file.open("a+b") as file, Client(url, api_key=api_key) as client:
        log = Log(file, start, log_one)
        while True:
            try:
                return follow(client, log, options)
            except ClientError as error:
                if options.once or not error.may_pass:
                    raise
                print_note(f"{error}; trying again in {RETRY_S:g} s", "dim")
            time.sleep(RETRY_S)


def main(url: str, api_key: str | None, options: Tracked, tracker: Callable[[], tuple[int, Track]]) -> None:
    """Run the command; exit with a message if it fails."""
    with suppress(KeyboardInterrupt):
        try:
            track(url, api_key, options, *tracker())
        except (ClientError, ImportError, OSError, ValueError) as error:
            fail(str(error), code=Exit.FAILED)
