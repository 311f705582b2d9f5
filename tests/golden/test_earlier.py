"""A store that the version of November 2026 wrote (4fe0cfe) exports what that version exported.

`earlier.json.zst` has the store and the exports. Fields that rows have since then are listed here, and nothing else differs:
ids, masks, logprobs, rewards, advantages and the order of rows do not change.
"""

import re
from secrets import token_hex

import pytest
import redis
from golden_files import check, load
from golden_reads import AFTER
from golden_session import SteppedClock, staging
from golden_store import load_store

from storage import StoreOptions, open_store

# Of spans, in rows of `sequences` (docs/decisions/008); null, because the earlier version did not record it.
CONSTRAINED = ',"constrained":null'


@pytest.fixture
async def exports(server):
    """The exports of that version, and those of this one."""
    earlier, prefix = load("earlier"), token_hex(8)
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        load_store(client, prefix, earlier["store"])
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    async with staging(store, SteppedClock(AFTER), [], None, name="simulator") as stage:
        found = {path: (await stage.get(path))["body"] for path in earlier["exports"]}
    await store.close()
    return earlier["exports"], found


async def test_rows_of_an_earlier_store_are_those_of_its_version(exports):
    """Byte for byte, in eleven formats; spans of `sequences` have one field more."""
    before, now = exports

    check(before, {path: body.replace(CONSTRAINED, "") for path, body in now.items()})


async def test_sequences_of_an_earlier_store_have_19_more_bytes_for_each_span(exports):
    before, now = exports
    paths = [path for path in before if "format=sequences" in path]

    for path in paths:
        assert len(now[path]) - len(before[path]) == 19 * len(re.findall(r'"start":', before[path]))
    assert 3 == len(paths)
