"""The store on a Redis or Valkey server or cluster.

    store          RedisStore
    queue          the queues of groups
    announcements  announcements, heartbeats, reservations
    changes        notifications, by Pub/Sub
    listing        the listing of names
    keys           all keys, with their types and lifetimes
    scripts        the Lua scripts (`lua/`)
    decoding       replies -> values
    durability     WAIT, WAITAOF or PING after a write
    cluster        the primaries of a cluster and their slots
    connections    the connection pool of one server
    multiplexed    one connection shared by short commands
    server_info    INFO: version, warnings
    errors         errors of redis-py and servers -> errors of the store

The path of a command: `store`, `keys`, `scripts`, `cluster` (if there is one), `connections`. The path of its reply: `errors`,
`durability`, `decoding`.
"""
