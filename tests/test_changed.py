"""`make check` runs the tests of what changed."""

import pytest
from tests.changed import PAGES, found_for

TESTS = {
    "tests/export/test_trl.py": "from tests.support.worked import rows\n",
    "tests/export/test_trl_async.py": "from proxy.export import trl\n",
    "tests/export/test_trlx.py": "from proxy.export.base import Format\n",
    "tests/storage/redis/test_store.py": "from tests.support import worked\n",
}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("tests/export/test_trlx.py", {"tests/export/test_trlx.py"}),
        ("proxy/export/trl.py", {"tests/export/test_trl.py", "tests/export/test_trl_async.py"}),
        ("proxy/export/base.py", {"tests/export/test_trlx.py"}),
        ("storage/redis/store.py", {"tests/storage/redis/test_store.py"}),
        ("tests/support/worked.py", {"tests/export/test_trl.py", "tests/storage/redis/test_store.py"}),
        ("tests/export/conftest.py", set(TESTS) - {"tests/storage/redis/test_store.py"}),
        ("docs/formats.md", PAGES),
        ("storage/redis/lua/open.lua", set()),
    ],
)
def test_a_changed_file_has_its_tests(changed, found):
    assert found_for(changed, TESTS) == found
