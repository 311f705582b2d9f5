"""A minimal engine: a table of bigram logits, served with vLLM's API.

Shows what an engine has to return for its steps to be exact: the prompt ids, the sampled ids, and a logprob for each. The
policy is 28 x 28 numbers (26 letters, a space, and the newline that ends a turn), and `POST /load_weights` replaces them.
`grpo_numpy.py` trains it through the proxy.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = "abcdefghijklmnopqrstuvwxyz \n"
END = VOCABULARY.index("\n")  # ends every turn, of the user and of the engine

Table = npt.NDArray[np.float32]  # [previous token, token]


def encode(text: str) -> list[int]:
    """Return the ids of the letters and spaces of a text; other characters are dropped."""
    return [VOCABULARY.index(letter) for letter in text.lower() if letter in VOCABULARY[:END]]


def decode(ids: Sequence[int]) -> str:
    """Return the text of ids, without the end of the turn."""
    return "".join(VOCABULARY[token] for token in ids if token != END)


def log_softmax(logits: Table) -> Table:
    """Return the logprobs of each row of logits."""
    shifted: Table = logits - logits.max(axis=-1, keepdims=True)
    logprobs: Table = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


class Policy:
    """The current weights and the random generator. All tokens of a turn are sampled with the same weights."""

    def __init__(self, seed: int | None = None, context: int = -1) -> None:
        size = len(VOCABULARY)
        self.logprobs = log_softmax(np.zeros((size, size), dtype=np.float32))
        self._random = np.random.default_rng(seed)
        self._lock, self._context = Lock(), context  # the place in a prompt of the token that its turn is sampled after

    def load(self, raw: bytes) -> None:
        """Replace the logits (float32, row by row) for all later calls."""
        self.logprobs = log_softmax(np.frombuffer(raw, dtype="<f4").reshape(self.logprobs.shape))

    def sample(self, last: int, max_tokens: int) -> tuple[list[int], list[float], str]:
        """Sample a turn after the token `last`: return its ids, their logprobs and the finish reason."""
        with self._lock:
            logprobs, units = self.logprobs, self._random.random(max_tokens)
        ids: list[int] = []
        found: list[float] = []
        for unit in units:
            cumulative = np.exp(logprobs[last]).cumsum(dtype=np.float64)
            token = int(np.searchsorted(cumulative, unit * cumulative[-1], side="right"))
            ids.append(token)
            found.append(float(logprobs[last, token]))
            if token == END:
                return ids, found, "stop"
            last = token
        return ids, found, "length"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a chat completion with vLLM 0.32's fields. The chat template is each message and the end of its turn."""
        prompt = [token for message in body["messages"] for token in [*encode(message["content"]), END]]
        ids, logprobs, finish = self.sample(prompt[self._context], body.get("max_tokens") or 16)
        scored = [{"token": VOCABULARY[token], "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": decode(ids)},
            "logprobs": {"content": scored},
            "finish_reason": finish,
            "token_ids": ids,
        }
        head = {"id": "chatcmpl-bigram", "object": "chat.completion", "created": 0, "model": "bigram"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {**head, "choices": [choice], "prompt_token_ids": prompt, "usage": usage}


class Handler(BaseHTTPRequestHandler):
    """The routes. The proxy detects a vLLM by `/version` and requests token ids from it."""

    policy: Policy
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Serve the detection of the engine type and the health checks."""
        models = {"object": "list", "data": [{"id": "bigram", "object": "model"}]}
        known: dict[str, dict[str, Any]] = {"/version": {"version": "bigram-0.1"}, "/health": {}, "/v1/models": models}
        self._reply(known.get(self.path))

    def do_POST(self) -> None:
        """Serve `/v1/chat/completions`, and `/load_weights` for the trainer."""
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/load_weights":
            self.policy.load(raw)
            self._reply({"success": True})
        elif self.path == "/v1/chat/completions":
            self._reply(self.policy.answer(json.loads(raw)))
        else:
            self._reply(None)

    def log_message(self, *_: object) -> None:
        """Log nothing: the proxy records requests and responses."""

    def _reply(self, body: dict[str, Any] | None) -> None:
        raw = json.dumps({"detail": "Not Found"} if body is None else body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def serving(host: str, port: int, seed: int | None = None, context: int = -1) -> Iterator[str]:
    """Run the engine in a thread; yield its URL. Port 0 selects a free port."""
    routes = type("Routes", (Handler,), {"policy": Policy(seed, context)})
    with ThreadingHTTPServer((host, port), routes) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()  # seconds between checks for a shutdown
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8402", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the random generator (default: random)")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    with serving(host, int(port), options.seed) as url:
        print(f"The bigram policy listens on {url}", flush=True)
        with suppress(KeyboardInterrupt):
            Event().wait()


if __name__ == "__main__":
    main()
