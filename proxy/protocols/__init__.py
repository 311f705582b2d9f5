"""The protocols of clients and engines: dialects, engines, server-sent events, and one call as an `Exchange`.

    sse          bytes -> events, however the bytes are split
    accumulators stream chunks -> the response that the unstreamed call would have returned
    response     WholeResponse, StreamResponse, RawResponse: engine bytes in, client bytes out
    exchange     one call: the request to send, the response, the bytes for the client, the step to record

The package is pure: it uses no sockets, no clock and no store.
"""
