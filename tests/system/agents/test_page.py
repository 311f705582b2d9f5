"""Every program of docs/clients.md, run unmodified by its own client against the proxy.

Each must print the scripted outcome, and all steps of its rollout must be exact.
"""

import re

import pytest
from fakes import proxying
from pages import Block, blocks_of

from .clients import PAGE
from .recorded import recorded
from .running import address, installed_version, run
from .seen import DOCUMENT, Seen


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


@pytest.mark.parametrize("client", PAGE, ids=lambda client: client.heading)
async def test_the_steps_of_an_unmodified_client_are_exact(client, environment, table, scripted, store, http, tmp_path):
    """The program prints the outcome; its rollout is named by the base URL only."""
    program = tmp_path / ("program.mjs" if client.runs == "node" else "program")
    program.write_text(programs()[client.heading].text)
    async with scripted() as engine, proxying(engine, store) as served:
        where = address(served.url, "a%20client")
        printed = await run(client.runs, program, where=where, environment=environment, folder=tmp_path)
        found = await recorded(http, served.url, "a%20client")

    assert client.prints in printed
    assert ["a client"] == found.rollouts
    assert found.steps
    assert [] == found.inexact
    assert found.steps == found.complete
    dialects = ", ".join(sorted({step["dialect"] for step in found.steps}))
    way = "yes" if all(step["request"].get("stream") for step in found.steps) else "no"
    version = f"{client.package} {await installed_version(client.runs, client.package, environment)}"
    seen = Seen(version, dialects, len(found.steps), len(found.complete) - len(found.inexact), 0, found.drift)
    table.page[client.heading] = (way, seen)
