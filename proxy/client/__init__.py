"""The Python client of the control face, and the ManagedServer over the proxy.

    asking      [pure] what is asked, what is refused, how long to wait before asking again
    verbs       [pure] one function a route: its ask
    shapes      [pure] what the proxy answers, as types
    blocking    Client
    awaiting    AsyncClient
    batches     batches as an async iterator, their leases kept alive
    nodes       [pure] SequenceNode, and nodes that grow by id prefix
    rendering   [pure] texts of ids and messages, for people
    scoring     the likeliest ids at each place of a prompt
    managed     ManagedServer, as Atropos' environments use it
    adapter     ManagedServer with the face of an OpenAI client

`Client` and `AsyncClient` need nothing installed but httpx2. ManagedServer and what belongs to it speak in the objects of
`openai`, and are loaded only when asked for.

>>> from openai import OpenAI
>>> from proxy.client import Client
>>> with Client("http://127.0.0.1:8400") as client:
...     opened = client.open_rollout(metadata={"task": "sum"})
...     with OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
...         reply = agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
...     finished = client.finish_rollout(opened["rollout_id"], reward=1.0)
...     rows = list(client.export_rollout(opened["rollout_id"], format="sequences"))
>>> finished["status"], finished["reward"], len(rows)
('completed', 1.0, 1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from proxy.client.asking import ClientError
from proxy.client.awaiting import AsyncClient
from proxy.client.batches import Batch
from proxy.client.blocking import Client
from proxy.client.shapes import ClaimedGroup

if TYPE_CHECKING:
    from proxy.client.adapter import ManagedServerAdapter
    from proxy.client.managed import ManagedServer
    from proxy.client.nodes import SequenceNode

__all__ = [
    "AsyncClient",
    "Batch",
    "ClaimedGroup",
    "Client",
    "ClientError",
    "ManagedServer",
    "ManagedServerAdapter",
    "SequenceNode",
]

_LATER: Final = {"ManagedServer": "managed", "ManagedServerAdapter": "adapter", "SequenceNode": "nodes"}


def __getattr__(name: str) -> Any:
    """What needs more than httpx2 is imported when it is first named."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
