"""Archives in which one value was replaced: the import refuses them and writes nothing, or every reader reads what it wrote."""

from contextlib import ExitStack
from copy import deepcopy
from datetime import UTC, datetime
from random import Random
from secrets import token_hex

import orjson
import pytest
import redis
from hypothesis import strategies as st
from tests.golden.files import STORE, load
from tests.golden.reads import AFTER
from tests.golden.session import SteppedClock, staging
from tests.golden.store import load_store
from tests.support.archives import archiver, importer
from tests.support.damaged_reads import Reading, read_everything, read_one, small
from tests.support.odd_values import odd_text
from tests.support.stored_damage import odd_inside, value

from proxy.rollouts.archive.dataset import COLUMNS, ArchiveWriter, arrow, read_rows
from storage import StoreOptions, open_store

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SAVED = ("rollout", "group")
NUMBERS = (0, -1, 1, 7, 2**31 - 1, 2**62)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1e308, -0.0, 3.5, 1e39)


@pytest.fixture
async def files(server, tmp_path_factory):
    """The rows of each file of an archive of the golden store, by its name."""
    folder, prefix = tmp_path_factory.mktemp("archive"), token_hex(8)
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        load_store(client, prefix, small(load(STORE)))
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    await archiver(store, folder, clock=SteppedClock(AFTER)).sweep()
    await store.close()
    found = {}
    for path in folder.glob("*/*.parquet"):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = list(read_rows(file))
    assert found
    return found


def replaced(random, rows):
    """Replace one value of one row; return the row, the column, and the values before and afterwards."""
    row = random.choice(rows)
    present = [column for column in COLUMNS if row[column] is not None]
    column = random.choice(present if random.random() < 0.9 else list(COLUMNS))
    before = row[column]
    row[column] = other(random, column, before, random.choice(rows)[column])
    return column, before, row[column]


def other(random, column, before, beside):
    """Return another value of a column's type."""
    kind = COLUMNS[column][0]
    if random.random() < 0.1:
        return None
    if random.random() < 0.1:
        return beside
    if column in SAVED and before is not None and random.random() < 0.9:
        return within(random, before)
    match kind:
        case "text" | "json":
            text = before.encode() if isinstance(before, str) else b"{}"
            made = odd_inside(random, text) if kind == "json" and random.random() < 0.7 else odd_text(random)
            made = made.decode(errors="replace")
            return made.encode() if kind == "json" else made
        case "ids" | "floats":
            return random.randbytes(4 * random.randrange(5))
        case "time":
            return datetime.fromtimestamp(random.choice((0, 7, 4e9)), UTC)
        case "double" | "float64":
            return random.choice(FLOATS)
        case "bool_":
            return not before
        case "texts":
            return random.choice(([], ["x"], ["no_logprobs"]))
        case "prompts":
            return random.choice(([], [[]], [[1, -5]]))
        case "choices":
            return random.choice(([], [{"ids": [1], "logprobs": []}], [{"ids": [], "logprobs": [1.0]}]))
        case "blocks":
            return random.choice(([], [{"name": b"x", "block": b"y"}]))
        case "binary":
            return value(random, before or b"")
        case _:
            return random.choice(NUMBERS)


def within(random, text):
    """Return a rollout or a group with one other value in it: a field, a count, a mark, or a part of it."""
    saved = orjson.loads(text)
    part = random.choice(("fields", "fields", "fields", "counts", "marks", "name", "created_ms", "touched_ms"))
    if part == "fields" and saved[part]:
        name = random.choice(sorted(saved[part]))
        saved[part][name] = value(random, saved[part][name].encode("latin-1")).decode("latin-1")
    elif part == "counts":
        saved[part][random.choice((*saved[part], "steps", "late", "x"))] = random.choice(NUMBERS)
    elif part == "marks":
        name = random.choice((*saved[part], "late:x", "undelivered:x", "member:x", "finished:x", "replaced:x"))
        saved[part][name] = random.choice(("", "x", "\xff"))
    else:
        saved[part] = random.choice((orjson.Fragment(odd_text(random)), "x", 5, saved.get(part)))
    return orjson.dumps(saved)


def write(folder, files):
    """Write the files of an archive. Raises one of pyarrow's errors for a value that a column cannot have."""
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file, ExitStack() as stack:
            writer = ArchiveWriter(file)
            stack.callback(writer.abandon)
            for row in rows:
                writer.write({column: _json_as_bytes(column, each) for column, each in row.items()})
            writer.close()


def _json_as_bytes(column, text):
    return text.encode() if COLUMNS[column][0] == "json" and isinstance(text, str) else text


async def imported(server, client, files, folder, seed):
    """Import an archive with one other value."""
    random, prefix = Random(seed), token_hex(8)
    files = deepcopy(files)
    what = replaced(random, files[random.choice(sorted(files))])
    library = arrow()
    try:
        write(folder / prefix, files)
    except (library.ArrowInvalid, library.ArrowTypeError, OverflowError, UnicodeEncodeError):
        return  # no value of the column
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    try:
        try:
            await importer(store, folder / prefix).run()
        except ValueError as refused:
            names = [name async for name in store.names()] + [name async for name in store.groups.names()]
            assert names == [], (what, refused)
            assert "Nothing was imported" in str(refused), (what, refused)
            return
        async with staging(store, SteppedClock(AFTER), [], None, name="vllm", hides_keys=False) as stage:
            read = Reading(stage, what)
            await read_everything(read, random)
            for path in ("/rollouts?limit=1000", "/groups?limit=1000"):
                listed = await read("GET", path)
                assert not listed.get("unreadable"), (what, listed["unreadable"])
            for name in [name async for name in store.names()]:
                await read_one(read, name.replace("/", "%2F").replace(" ", "%20"), random)
    finally:
        await store.close()
        if keys := list(client.scan_iter(match=f"{prefix}*", count=1000)):
            client.delete(*keys)


async def test_an_archive_with_another_value_is_refused_or_readable(fuzz, server, files, tmp_path):
    """In every column, and in every field of rollouts, groups and records."""
    with redis.Redis(unix_socket_path=str(server.socket)) as client:

        async def check(seed):
            await imported(server, client, files, tmp_path, seed)

        await fuzz(0.05, st.integers(0, 2**40), check)
