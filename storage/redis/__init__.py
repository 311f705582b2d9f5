"""The store on a Redis or Valkey server or cluster.

    store          rollouts, with their announcements and cache
    listing        the names of rollouts, newest first, and by the values of fields
    timers         the timers of rollouts
    queue          the queues of groups
    changes        notifications about changes
    keys           all keys, with their types and lifetimes
    scripts        the Lua scripts (`lua/`)
    cluster        the servers of a store, such as the primaries of a cluster and their slots
    connections    the connections to one server; replies -> values, and errors of redis-py -> errors of the store
    server_info    INFO: version, warnings, and which of WAIT, WAITAOF and PING follows a write

The path of a command: `store`, `cluster` (if there is one), `connections`; of its reply: `connections`, `store`.
"""
