"""The store on a Redis or Valkey server or cluster.

    store          RedisStore
    queue          the queues of groups
    announcements  announcements, heartbeats, reservations
    changes        notifications, by Pub/Sub
    listing        the listing of names
    keys           all keys, with their types and lifetimes
    scripts        the Lua scripts (`lua/`)
    durability     WAIT, WAITAOF or PING after a write
    cluster        the primaries of a cluster and their slots
    connections    the connections to one server
    replies        replies -> values, and errors of redis-py and servers -> errors of the store
    server_info    INFO: version, warnings

The path of a command: `store`, `cluster` (if there is one), `connections`; of its reply: `connections`, `store`, `replies`.
"""
