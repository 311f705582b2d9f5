"""A pytest fixture that records the calls of an agent in a file on the first run, and answers them from it on later ones.

    from tokentape.testing import tape

    weather = tape("tapes/weather.jsonl")

    def test_the_agent_answers(weather):
        assert "Oslo" in run_agent("What is the weather?")  # reads OPENAI_BASE_URL and OPENAI_API_KEY

The first run requires an engine, TOKENTAPE_ENGINE=http://127.0.0.1:8000, or a running proxy, TOKENTAPE_URL=http://127.0.0.1:8400.
Later ones require neither. A call that the file does not have is refused with 422, and the test ends with an error. To record
again, delete the file.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tokentape.clients import Client

Scope = Literal["session", "package", "module", "class", "function"]
_START_S: Final = 60.0
_POLL_S: Final = 0.02
_MAX_SERVERS: Final = 4  # of different files; the tests of a module mostly have one
_MAX_BACK: Final = 8  # steps: calls of several conversations may alternate
_MIN_REPEATED: Final = 200  # characters
_LISTENING: Final = re.compile(r"listening (http://\S+)")


@dataclass(frozen=True, slots=True)
class Tape:
    """What a test gets: the base URL of OpenAI's API with the key of its rollout, and whether the calls are recorded now."""

    base_url: str
    api_key: str
    rollout_id: str
    url: str  # of the proxy, which has the rollout
    is_recording: bool

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of OpenAI, Anthropic and Google find the proxy. They are set during the test."""
        root = self.base_url.removesuffix("/v1")
        bases = {"OPENAI": self.base_url, "ANTHROPIC": root, "GOOGLE_GEMINI": root}
        names = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
        return {f"{name}_BASE_URL": base for name, base in bases.items()} | dict.fromkeys(names, self.api_key)


def tape(
    file: str | Path,
    *,
    ignore: Sequence[str] = (),
    presets: Sequence[str] = (),
    url: str | None = None,
    engine: str | None = None,
    terms: Mapping[str, Any] | None = None,
    complete: bool = False,
    scope: Scope = "function",
) -> Any:
    """Return a fixture with the tape in `file`, a path from the folder of the test file. Its value is a `Tape`.

    `ignore`: texts of messages that may differ from the recorded ones, with `*` for any text within a line; `presets` have
    those of known agents. `url` and `engine` are of the first run, and have precedence over the environment. `terms` are
    those of `Client.open_rollout` for the recorded rollout, such as `model` or `sampling`. With `complete` the test fails too
    if the agent does not make all recorded calls.
    """

    @pytest.fixture(scope=scope)
    def of_tape(request: pytest.FixtureRequest) -> Iterator[Tape]:
        path = (request.path.parent / file).resolve()
        chosen = {"ignore": list(ignore), "presets": list(presets)}
        if path.exists():
            opened: AbstractContextManager[Tape] = _playing(request, path, chosen, complete=complete)
        else:
            opened = _recording(request, path, url, engine, terms or {})
        with opened as found, pytest.MonkeyPatch.context() as patch:
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield found

    return of_tape


@contextmanager
def _playing(request: pytest.FixtureRequest, path: Path, terms: Mapping[str, Any], *, complete: bool) -> Iterator[Tape]:
    """Yield a playback of the rollout in a file. Fail at the end if a call was refused or, with `complete`, is missing."""
    server = _servers(request.config).of_file(path)
    with Client(server) as client:
        source = {"of": _rollout_of(path), "on_mismatch": "refuse", **terms}
        opened = client.open_rollout(playback=source)
        yield _tape(opened, server, is_recording=False)
        shown: Mapping[str, Any] = client.send("GET", f"/rollouts/{opened['rollout_id']}")
    played = shown["playback"]
    if played["mismatches"]:
        first = played["first_mismatch"]
        pytest.fail(
            f"{path.name} did not have {played['mismatches']} of the agent's calls. The first one differs from the nearest "
            f"step {first.get('step_id')} at {first.get('path')}:\n  recorded  {first.get('recorded')!r}\n"
            f"  now       {first.get('value')!r}\nDelete the file to record it again.",
            pytrace=False,
        )
    if complete and played["answered"] < played["answerable"]:
        pytest.fail(
            f"the agent made {played['answered']} of the {played['answerable']} calls in {path.name}", pytrace=False
        )


@contextmanager
def _recording(
    request: pytest.FixtureRequest, path: Path, url: str | None, engine: str | None, terms: Mapping[str, Any]
) -> Iterator[Tape]:
    """Yield a new rollout. At the end write it to the file, unless a test has failed or made no call."""
    url = url or (None if engine else os.environ.get("TOKENTAPE_URL"))  # noqa: TID251 - of the tests
    engine = engine or os.environ.get("TOKENTAPE_ENGINE")  # noqa: TID251
    if url is None and engine is None:
        pytest.fail(
            f"{path} does not exist. Run the test once with TOKENTAPE_ENGINE (the base URL of an engine) or TOKENTAPE_URL (a "
            "running proxy), to record it.",
            pytrace=False,
        )
    failed = request.session.testsfailed
    with ExitStack() as stack:
        key = None
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            words = ("--engine", str(engine), "--store", f"embedded:{folder}/store")
            url = stack.enter_context(_serving(*words, environment=os.environ))  # noqa: TID251 - has the key of the engine
        else:
            key = os.environ.get("TOKENTAPE_API_KEY")  # noqa: TID251
        client = stack.enter_context(Client(url, api_key=key))
        opened = client.open_rollout(**terms)
        yield _tape(opened, url, is_recording=True)
        if request.session.testsfailed == failed:
            rollout = client.finish_rollout(opened["rollout_id"])
            _write(path, rollout, list(client.steps(opened["rollout_id"])))


def _tape(opened: Mapping[str, Any], url: str, *, is_recording: bool) -> Tape:
    return Tape(opened["base_url"], opened["api_key"], opened["rollout_id"], url, is_recording)


def _write(path: Path, rollout: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> None:
    """Write a line for the rollout and each of its steps, without the URLs of this machine's servers; nothing without steps."""
    if not steps:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[Mapping[str, Any]] = [{"rollout": {name: rollout[name] for name in rollout if name != "base_url"}}]
    lines += _without_repeats([{**step, "engine": {**step["engine"], "url": ""}} for step in steps])
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(
        "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines),  # noqa: TID251
        encoding="utf-8",
    )
    part.replace(path)


def _without_repeats(steps: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield steps in which {"repeats": [k, n], "then": …} has a value that begins as the one k steps before: calls repeat."""
    for index, step in enumerate(steps):
        earlier = steps[max(0, index - _MAX_BACK) : index]
        sent, changed = step["sent"], step["sent"].get("set") or {}
        request = {
            name: _shorter(value, [other["request"].get(name) for other in earlier])
            for name, value in step["request"].items()
        }
        before = [other["sent"].get("set") or {} for other in earlier]
        new = {name: _shorter(value, [other.get(name) for other in before]) for name, value in changed.items()}
        ids = _shorter(step["prompt_ids"], [other["prompt_ids"] for other in earlier])
        yield {**step, "request": request, "sent": {**sent, "set": new}, "prompt_ids": ids}


def _shorter(value: Any, earlier: Sequence[Any]) -> Any:
    """Return a value by what it repeats of the newest of these that has most of it; a short value unchanged."""
    if not isinstance(value, list | str) or (len(value) < _MIN_REPEATED and len(str(value)) < _MIN_REPEATED):
        return value
    best, back, same = 0, 0, None
    for distance, other in enumerate(reversed(earlier), 1):
        if type(other) is type(value) and (equal := _count_equal(value, other)) > best:
            best, back, same = equal, distance, other[:equal]
    if same is None:
        return value
    is_plain = isinstance(same, str) or set(map(type, same)) == {int}  # in others, 1 equals True
    if not is_plain and json.dumps(same) != json.dumps(value[:best]):  # noqa: TID251
        return value
    return {"repeats": [back, best], "then": value[best:]}


def _count_equal(a: Any, b: Any) -> int:
    """Return how many items both begin with. It bisects: slices compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _rollout_of(path: Path) -> str:
    """Return the first rollout of a file."""
    text = path.read_text(encoding="utf-8")
    try:
        first: Any = json.loads(text.partition("\n")[0])  # noqa: TID251 - the client requires no orjson
    except json.JSONDecodeError:  # a document of several lines
        first = json.loads(text)  # noqa: TID251
    return str(first.get("rollout", first)["rollout_id"])


class _Servers:
    """The proxies that answer from files; those of the latest few files run until the end of the session."""

    def __init__(self) -> None:
        self._running: OrderedDict[tuple[Path, int], tuple[str, ExitStack]] = OrderedDict()

    def of_file(self, path: Path) -> str:
        """Return the URL of the proxy with a file as it is now."""
        name = path, path.stat().st_mtime_ns
        if name not in self._running:
            stack = ExitStack()
            self._running[name] = stack.enter_context(_serving("--playback", str(path))), stack
        self._running.move_to_end(name)
        if len(self._running) > _MAX_SERVERS:
            self._running.popitem(last=False)[1][1].close()
        return self._running[name][0]

    def close(self) -> None:
        """Stop all."""
        while self._running:
            self._running.popitem()[1][1].close()


_KEY: Final = pytest.StashKey[_Servers]()


def _servers(config: pytest.Config) -> _Servers:
    if _KEY not in config.stash:
        config.stash[_KEY] = _Servers()
        config.add_cleanup(config.stash[_KEY].close)
    return config.stash[_KEY]


@contextmanager
def _serving(*words: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run `tokentape serve` on a free port, by default without TOKENTAPE_ variables; yield its URL."""
    command = [sys.executable, "-m", "tokentape", "serve", "--listen", "127.0.0.1:0", *words]
    if environment is None:
        given = os.environ  # noqa: TID251
        environment = {name: value for name, value in given.items() if not name.startswith("TOKENTAPE_")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)  # noqa: S603
        try:
            yield _until_listening(process, log.read_text)
        finally:
            process.terminate()
            process.wait()


def _until_listening(process: "subprocess.Popen[bytes]", read: Callable[[], str]) -> str:
    """Return the URL that a server prints when it listens."""
    until = time.monotonic() + _START_S
    while (found := _LISTENING.search(read())) is None:
        if process.poll() is not None or time.monotonic() > until:
            pytest.fail(f"tokentape serve did not start:\n{read()}", pytrace=False)
        time.sleep(_POLL_S)
    return found[1]
