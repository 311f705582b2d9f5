"""A simulated vLLM that writes what it samples: `python -m … PORT MODEL LOG`.

A line of the log is written before the first byte of the response: the ID of the call, its time, the digest of the prompt's
ids, and the ids and logprobs of the completion. Nothing of it passes through a proxy.
"""

import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from unittest.mock import patch

import orjson
from aiohttp import web
from tests.system.faults.training.ledger import digest_of

from proxy.simulator import server
from proxy.simulator.engine import Engine, Round
from proxy.simulator.options import Options

TOKEN_DELAY_S = 0.003
_called: ContextVar[web.Request] = ContextVar("called")


class LoggedEngine(Engine):
    """Samples a call as a whole, and writes it, before it responds."""

    log = None

    async def respond(self, request, response) -> web.StreamResponse:
        _called.set(request)
        return await super().respond(request, response)

    def rounds(self, response) -> Iterator[Round]:
        rounds = list(super().rounds(response))
        tokens = [token for tokens in rounds for _, token in tokens]
        sampled = {
            "call": _called.get().headers.get("X-Request-Id", ""),
            "at": time.time(),
            "model": self.options.model,
            "prompt": digest_of(response.prompt.ids),
            "ids": [token.id for token in tokens],
            "logprobs": [token.logprobs[0].logprob for token in tokens],
        }
        self.log.write(orjson.dumps(sampled) + b"\n")
        return iter(rounds)


def main() -> None:
    port, model, log = sys.argv[1:]
    options = Options(model=model, strict_models=True, token_delay_s=TOKEN_DELAY_S)
    with patch.object(server, "Engine", LoggedEngine):
        app = server.make_engine(options)
    with Path(log).open("ab", buffering=0) as LoggedEngine.log:
        web.run_app(app, host="127.0.0.1", port=int(port), print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
