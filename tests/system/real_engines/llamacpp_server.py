"""A llama.cpp server: `python llamacpp_server.py MODEL PORT`, until it is terminated.

It runs in the environment that environment.py builds, so it imports nothing of this project.
"""

import signal
import sys

import xllamacpp


def serve(model: str, port: int) -> None:
    """Serve the model on this port of the loopback interface. The log goes to stderr."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"smollm2"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = 8192
    params.n_parallel = 2
    params.use_jinja = True
    # One core for the engine, the others for the tests. More threads also busy-wait for each other.
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stderr.write(f"listening on {server.listening_address}\n")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
