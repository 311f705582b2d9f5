"""The threads of a real agent: a title and a sub-agent beside the main conversation."""

from fakes import proxying

from .recorded import recorded
from .running import PROGRAMS, address, run
from .test_loops import OFF, TERMS


async def test_the_main_thread_of_claude_code_is_one_row(environment, scripted, store, http, tmp_path):
    """In TRL's format; its title is auxiliary, and its sub-agent is called by a tool."""
    async with scripted() as engine, proxying(engine, store, **TERMS, **OFF) as served:
        program = PROGRAMS / "claude_code_agents.sh"
        where = address(served.url, "r")
        await run("cli", program, "Delegate the counting.", where=where, environment=environment, folder=tmp_path)
        found = await recorded(http, served.url, "r")
        async with http.get(f"{served.url}/rollouts/r/export?format=trl&threads=main") as response:
            exported = (await response.json())["rows"]
    threads = {thread["kind"]: thread for thread in found.tree["threads"]}

    assert {"main": 2, "auxiliary": 1, "sub-agent": 1} == {kind: thread["steps"] for kind, thread in threads.items()}
    assert ("main", "Agent") == (threads["sub-agent"]["parent"], threads["sub-agent"]["tool"])
    assert 1 == len(exported) == len(exported[0]["prompt_ids"])
    assert 3 == len(found.rows)
