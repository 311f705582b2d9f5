"""Connections to the engine endpoints: detection, health checks, routing, queues and requests.

endpoint          one engine, its ejection, its queue of calls that is fair between rollouts, what calls showed about it, and
                  the order in which calls try the endpoints
client            requests to endpoints, their errors, detection and health checks
context_window    token counts of prompts, and what else is requested before a call
http_client       HTTP/1.1 on aiohttp's connections
registry          the current list of endpoints
tokenizers        configured tokenizers, and texts of token ids

aiohttp's exceptions are translated here: callers see only exceptions of `proxy.errors`. Nothing in this package interprets a
body.
"""
