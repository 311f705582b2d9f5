"""The Python client of TokenTape's control API, and a ManagedServer for environments written against Atropos.

    async_client     AsyncClient
    sync_client      Client, generated from async_client
    batches          batches as an async iterator that keeps their leases alive
    sync_batches     the same for Client, generated from batches
    events           changes of rollouts, followed across lost connections
    sync_events      the same for Client, generated from events
    heartbeat        the task or the thread that extends leases
    managed_server   ManagedServer with the names, arguments and results of Atropos' own
    openai_adapter   ManagedServerAdapter: a ManagedServer with the methods of an OpenAI client
    nodes            SequenceNode, and the texts of nodes
    prompt_logprobs  the most likely token ids at each position of a prompt
    requests         one function per route: method, path, query and body
    transport        Request, ClientError and the retry policy
    waits            what the clients' waits log, and how they end
    types            the JSON of responses as TypedDicts, and the protocols between these modules
    __main__         the `tokentape` command, which starts the server's command line

`import tokentape` loads nothing else; a name is imported when it is first used. The clients require httpx2
(`pip install '.[client]'` in a clone), ManagedServer also requires openai.

>>> from openai import OpenAI
>>> from tokentape import Client
>>> with Client("http://127.0.0.1:8400") as client:
...     opened = client.open_rollout(metadata={"task": "sum"})
...     with OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
...         response = agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
...     finished = client.finish_rollout(opened["rollout_id"], reward=1.0)
...     rows = list(client.export_rollout(opened["rollout_id"], format="sequences"))
>>> finished["status"], finished["reward"], len(rows)
('completed', 1.0, 1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokentape.async_client import AsyncClient
    from tokentape.batches import Batch
    from tokentape.managed_server import InexactStep, ManagedServer
    from tokentape.nodes import SequenceNode
    from tokentape.openai_adapter import ManagedServerAdapter
    from tokentape.sync_client import Client
    from tokentape.transport import ClientError
    from tokentape.types import ClaimedGroup

__all__ = [
    "AsyncClient",
    "Batch",
    "ClaimedGroup",
    "Client",
    "ClientError",
    "InexactStep",
    "ManagedServer",
    "ManagedServerAdapter",
    "SequenceNode",
]

if not TYPE_CHECKING:  # a type checker would take __getattr__ for a module that has every name
    _MODULES: Final = {
        "AsyncClient": "async_client",
        "Batch": "batches",
        "ClaimedGroup": "types",
        "Client": "sync_client",
        "ClientError": "transport",
        "InexactStep": "managed_server",
        "ManagedServer": "managed_server",
        "ManagedServerAdapter": "openai_adapter",
        "SequenceNode": "nodes",
    }

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that the command line starts fast."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names too that are not imported yet."""
        return sorted({*globals(), *__all__})
