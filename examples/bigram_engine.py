"""A policy small enough to read: a table of bigram logits, served as vLLM serves a model.

Shows what an engine must tell for its steps to be exact: the ids of the prompt, the sampled ids, and a logprob for each. The
policy is 28 x 28 numbers (26 letters, a space, and the newline that ends a turn), and `POST /load_weights` replaces them.
`grpo_numpy.py` trains it, through the proxy.
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
END = VOCABULARY.index("\n")  # ends every turn, the user's as well as the engine's

Table = npt.NDArray[np.float32]  # [token before, token]


def encode(text: str) -> list[int]:
    """The ids of a text's letters and spaces; what is neither is left out."""
    return [VOCABULARY.index(sign) for sign in text.lower() if sign in VOCABULARY[:END]]


def decode(ids: Sequence[int]) -> str:
    """The text of ids, without the end of the turn."""
    return "".join(VOCABULARY[token] for token in ids if token != END)


def log_softmax(logits: Table) -> Table:
    """The logprobs of each row of logits."""
    shifted: Table = logits - logits.max(axis=-1, keepdims=True)
    logprobs: Table = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


class Policy:
    """The weights that sample now, and the dice. A turn is sampled by the same weights from its first token to its last."""

    def __init__(self, seed: int | None = None) -> None:
        size = len(VOCABULARY)
        self.logprobs = log_softmax(np.zeros((size, size), dtype=np.float32))
        self._random = np.random.default_rng(seed)
        self._one_at_a_time = Lock()

    def load(self, raw: bytes) -> None:
        """Sample from these logits (float32, row by row) from the next call on."""
        self.logprobs = log_softmax(np.frombuffer(raw, dtype="<f4").reshape(self.logprobs.shape))

    def sample(self, last: int, most: int) -> tuple[list[int], list[float], str]:
        """A turn after this token: its ids, the logprob of each, and why it ended."""
        with self._one_at_a_time:
            logprobs, units = self.logprobs, self._random.random(most)
        ids: list[int] = []
        told: list[float] = []
        for unit in units:
            rising = np.exp(logprobs[last]).cumsum(dtype=np.float64)
            token = int(np.searchsorted(rising, unit * rising[-1], side="right"))
            ids.append(token)
            told.append(float(logprobs[last, token]))
            if token == END:
                return ids, told, "stop"
            last = token
        return ids, told, "length"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A chat completion as vLLM 0.32 answers it. The template: each message, then the end of its turn."""
        prompt = [token for message in asked["messages"] for token in [*encode(message["content"]), END]]
        ids, logprobs, finish = self.sample(prompt[-1], asked.get("max_tokens") or 16)
        scored = [{"token": VOCABULARY[token], "logprob": each} for token, each in zip(ids, logprobs, strict=True)]
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


class Exchange(BaseHTTPRequestHandler):
    """The routes. The proxy takes what answers `/version` for a vLLM, and asks it for ids."""

    policy: Policy
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """What the proxy asks to learn what this is, and whether it is well."""
        models = {"object": "list", "data": [{"id": "bigram", "object": "model"}]}
        known: dict[str, dict[str, Any]] = {"/version": {"version": "bigram-0.1"}, "/health": {}, "/v1/models": models}
        self._reply(known.get(self.path))

    def do_POST(self) -> None:
        """`/v1/chat/completions`, and the trainer's `/load_weights`."""
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/load_weights":
            self.policy.load(raw)
            self._reply({"success": True})
        elif self.path == "/v1/chat/completions":
            self._reply(self.policy.answer(json.loads(raw)))
        else:
            self._reply(None)

    def log_message(self, *_: object) -> None:
        """Nothing: the proxy keeps what was asked and answered."""

    def _reply(self, body: dict[str, Any] | None) -> None:
        raw = json.dumps({"detail": "Not Found"} if body is None else body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def serving(host: str, port: int, seed: int | None = None) -> Iterator[str]:
    """The engine, listening in a thread: its URL. A port of 0 takes a free one."""
    routes = type("Routes", (Exchange,), {"policy": Policy(seed)})
    with ThreadingHTTPServer((host, port), routes) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()  # s, in which a shutdown is seen
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8402", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the dice; by chance if none")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    with serving(host, int(port), options.seed) as url:
        print(f"the bigram policy listens on {url}", flush=True)
        with suppress(KeyboardInterrupt):
            Event().wait()


if __name__ == "__main__":
    main()
