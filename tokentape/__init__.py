"""The Python client of TokenTape's control API, and a ManagedServer for environments written against Atropos.

    clients         AsyncClient and Client, over httpx2
    control_api     the methods of both: one for each route
    transport       Request, ClientError, the retry policy, and waits
    batches         batches as an async iterator that keeps their leases alive
    managed_server  ManagedServer with the names, arguments and results of Atropos' own, and its OpenAI adapter
    mismatch_sums   mismatch: how a trainer's logprobs differ from the recorded ones
    nodes           SequenceNode, and the texts of nodes
    testing         a pytest fixture that records an agent once, and plays it back
    types           the JSON of responses as TypedDicts
    __main__        the `tokentape` command, which starts the server's command line

`import tokentape` loads nothing else; a name is imported when it is first used. The clients require httpx2
(`pip install '.[client]'` in a clone), ManagedServer also requires openai, and mismatch numpy.

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
    from tokentape.batches import Batch
    from tokentape.clients import AsyncClient, Client
    from tokentape.managed_server import InexactStep, ManagedServer, ManagedServerAdapter
    from tokentape.mismatch_sums import mismatch
    from tokentape.nodes import SequenceNode
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
    "mismatch",
]

if not TYPE_CHECKING:  # a type checker would take __getattr__ for a module that has every name
    _MODULES: Final = {
        "AsyncClient": "clients",
        "Batch": "batches",
        "ClaimedGroup": "types",
        "Client": "clients",
        "ClientError": "transport",
        "InexactStep": "managed_server",
        "ManagedServer": "managed_server",
        "ManagedServerAdapter": "managed_server",
        "SequenceNode": "nodes",
        "mismatch": "mismatch_sums",
    }

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that the command line starts fast."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names too that are not imported yet."""
        return sorted({*globals(), *__all__})
