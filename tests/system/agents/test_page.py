"""Every program of docs/clients.md, run unmodified by its own client against the proxy.

Each must print the scripted outcome, and all steps of its rollout must be exact.
"""

import re

import pytest
from tests.support.fakes import proxying
from tests.support.pages import Block, blocks_of

from .clients import PAGE
from .recorded import recorded
from .running import address, installed_version, run
from .seen import DOCUMENT, ON_THE_PAGE_ONLY, Seen
from .test_loops import APPEND, DRIFTING, OFF


def programs() -> dict[str, Block]:
    """Return the program below each heading of the page."""
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    headings = [
        section.partition("\n")[0] for section in sections for _ in re.findall(r"^```\w", section, re.MULTILINE)
    ]
    found = zip(headings, blocks_of(DOCUMENT), strict=True)
    return {heading: block for heading, block in found if block.checked_by is not None}


def test_every_program_of_the_page_has_a_client():
    """And every client has a program."""
    assert {client.heading for client in PAGE} == programs().keys()


def program_of(client, folder):
    """Write the program of the page to a file."""
    program = folder / ("program.mjs" if client.runs == "node" else "program")
    program.write_text(programs()[client.heading].text)
    return program


@pytest.mark.parametrize("client", PAGE, ids=lambda client: client.heading)
async def test_the_steps_of_an_unmodified_client_are_exact(client, environment, table, scripted, store, http, tmp_path):
    """The program prints the outcome; its rollout is named by the base URL only."""
    program = program_of(client, tmp_path)
    async with scripted() as engine, proxying(engine, store, **OFF) as served:
        where = address(served.url, "a%20client")
        printed = await run(client.runs, program, where=where, environment=environment, folder=tmp_path)
        found = await recorded(http, served.url, "a%20client")

    assert "It is 4." in printed
    assert found.rollouts == ["a client"]
    assert found.steps
    assert found.inexact == []
    assert found.steps == found.complete
    dialects = ", ".join(sorted({step["dialect"] for step in found.steps}))
    version = f"{client.package} {await installed_version(client.runs, client.package, environment)}"
    seen = Seen(version, dialects, found.drift)
    table.page[client.heading] = seen


@pytest.mark.parametrize("client", ON_THE_PAGE_ONLY, ids=lambda client: client.heading)
async def test_a_client_without_a_loop_is_one_sequence_in_append(
    client, environment, table, scripted, store, http, tmp_path
):
    """The prompts after the first are sent as ids, which differ from what the template renders."""
    program = program_of(client, tmp_path)
    async with scripted(**DRIFTING) as engine, proxying(engine, store, **APPEND) as served:
        where = address(served.url, "a-client")
        printed = await run(client.runs, program, where=where, environment=environment, folder=tmp_path)
        found = await recorded(http, served.url, "a-client")
    table.page_append[client.heading] = found.forks

    assert "It is 4." in printed
    assert found.steps == found.complete
    assert found.inexact == []
    assert (found.refused, len(found.rows)) == ("", 1), found.why
    assert len(found.steps) - 1 == found.differing
