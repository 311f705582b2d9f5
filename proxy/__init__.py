"""The recording proxy.

The folders, from the lowest layer to the highest; a folder imports only lower ones (tests/test_layout.py enforces it):

    errors, clock   errors that clients receive; time and ids
    config/         settings
    trajectory/     [pure] steps, their tree, sequences, drift and fidelity
    continuation/   [pure] the prompts of calls that continue recorded steps
    protocols/      [pure] dialects of clients, engines, and the exchange between them
    export/         [pure] one module per trainer
    simulator/      a deterministic engine without a GPU
    telemetry/      logs and metrics
    upstream/       the engines' endpoints: routing, queues, health checks, requests
    rollouts/       rollouts, groups and steps in the store; the recorder; the audit
    api/            HTTP: the model API, the control API, other systems' protocols, the web page
    server/         the process: application, listeners, workers, shutdown
    cli/            the command line

A call is received by `api.model.routes`, planned by `protocols.plan`, sent by `upstream`, interpreted by `protocols.exchange`
and stored by `rollouts.recorder`; only then does `api.model.relay` send the end of the response. Pure modules perform no I/O.
"""
