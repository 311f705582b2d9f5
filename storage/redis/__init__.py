"""The store on Redis or Valkey: one server, or a cluster of them.

    store         the one implementation of the verbs of `storage.store`
    queue, changes, listing, announcements    the verbs of one noun each
    keys          every key, its type and its lifetime
    scripts       what must be atomic, in Lua (`lua/`)
    decoding      replies as the store's values
    durability    when a write counts as done
    connections   the pool, and the round trip to a server
    multiplexed   the connection that short commands share
    cluster       which server of a cluster holds what
    server_info   what INFO says of a server
    errors        foreign errors, translated once

A command goes from `store` through `keys` and `scripts` to `connections` (or `cluster`, which chooses among several of those)
and back through `errors`, `durability` and `decoding`.
"""
