"""The agent of a call, after which its thread is named: by the header `X-Agent-Name`, or a sub-agent by Codex's metadata."""

import re
from collections.abc import Mapping
from typing import Any, Final

from proxy.trajectory.json_bytes import parse_text

AGENT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SUB_AGENT: Final = "sub-agent:"  # precedes the name of a task, which no header can


def agent_of(extra: Mapping[str, Any], request: Mapping[str, Any]) -> str | None:
    """Return the name of the agent that made a call, from its `extra` and its client's body; None if the client names none."""
    named = extra.get("agent")
    return named if isinstance(named, str) and named else _codex_agent(request)


def _codex_agent(request: Mapping[str, Any]) -> str | None:
    """Return the task of a sub-agent of Codex 0.169, `sub-agent:root.count` for `/root/count`.

    The sub-agents of its default model begin with the history of their caller, so that no text distinguishes them. The model
    names the tasks: rewards are compared with those of other sub-agents, not of tasks with the same name.
    """
    metadata = request.get("client_metadata")
    turn = metadata.get("x-codex-turn-metadata") if isinstance(metadata, dict) else None
    if not isinstance(turn, str):
        return None
    try:
        fields = parse_text(turn)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("subagent_kind") != "thread_spawn":
        return None
    path = fields.get("agent_name")
    name = path.strip("/").replace("/", ".") if isinstance(path, str) else ""
    return f"{SUB_AGENT}{name}" if AGENT_NAME.fullmatch(name) else None
