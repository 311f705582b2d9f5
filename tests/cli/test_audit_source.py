"""Rows to audit."""

import aiohttp
import orjson
import pytest
from aiohttp import web

from proxy.cli.audit import rows_of_file, rows_of_proxy
from proxy.cli.export import ExportRequest

ROWS = [{"rollout_id": "a", "group_id": "g", "token_ids": [1] * 50_000}, {"rollout_id": "b", "group_id": None}]
TEXT = b"\n".join(map(orjson.dumps, ROWS))


def wanted(*rollouts: str, group: str | None = None) -> ExportRequest:
    return ExportRequest("sequences", rollouts, group, "exact", "ndjson")


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
async def test_rows_of_a_file_are_chosen_by_rollout_and_group(tmp_path, end):
    """With an end of line at the end or without."""
    path = tmp_path / "rows"
    path.write_bytes(TEXT + end)

    async def names(chosen):
        return [row["rollout_id"] async for row in rows_of_file(path, chosen)]

    assert ["a", "b"] == await names(wanted())
    assert ["b"] == await names(wanted("b"))
    assert ["a"] == await names(wanted(group="g"))


@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_rows_of_a_proxy_come_line_by_line(engine, end):
    """However long a line is, and however it is cut."""

    async def respond(request, body):
        assert "/rollouts/a%2Fb/export?format=sequences&include=exact&container=ndjson" == request.raw_path
        return web.Response(body=TEXT + end)

    engine.respond = respond
    async with aiohttp.ClientSession() as session:
        assert ROWS == [row async for row in rows_of_proxy(session, engine.url + "/", wanted("a/b"))]


async def test_what_is_not_json_is_told_with_its_line(tmp_path):
    """A file of another kind."""
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}\nPAR1')

    with pytest.raises(ValueError, match="line 2: not JSON"):
        [row async for row in rows_of_file(path, wanted())]
