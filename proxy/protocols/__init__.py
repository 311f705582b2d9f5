"""What passes over the wire, understood without touching a socket.

    sse        bytes -> events, at any split
    fold       chunks -> the response an unstreamed call would have given
    reply      WholeReply, StreamReply, RawReply: feed the engine's bytes, get the client's
    exchange   one call: what to send, what came, what to show, what to keep

All of it is pure: no sockets, no clock, no store. `tests/test_layout.py` holds it to that.
"""
