"""The recording proxy: the map of the package, and the path of a call.

    __main__    the command line; terminal/: what its commands print; check/: what is wrong, and how to mend it
    config      the settings; errors, metrics, logs, clock: what they say
    app         puts everything together
    server      the process that listens; stopping: how it is told to end; standin: what listens while its store is away
    workers     several processes on one port; worker: one of them; totals: the metrics of all
    connections one connection of a client; reading: the bodies that come on it; bodies: what they may be
    refusals    what clients read of failures
    calls       a call is accepted: named, read, planned
    admission   and let in: its rollout opened, its place taken (places), a pause waited for (pause), guarded (guards)
    lifetimes   rollouts with calls in flight do not expire
    relay       a call is relayed: sent, shown, recorded, ended
    passthrough what is passed on unrecorded
    control/    the control API, one file a noun
    page/       the page for people, /ui; token_texts: what single tokens read
    compat/     other systems' protocols, served over ours
    upstream/   the engines' endpoints: chosen, checked, waited for, sent to; fleet: which ones there are
    recorder    the one writer of steps; standing: whether the store is there; spool: the journal for when it is not
    wire/       [pure] bytes -> events -> response; the exchange
    dialects/   [pure] what clients speak
    engines/    [pure] what engines speak
    trajectory/ [pure] steps, their tree, their sequences
    export/     [pure] one file per format
    simulator/  a small engine to try things with

A call comes in at `calls`, is decided by `wire.plan`, sent by `upstream`, understood by `wire.exchange`, stored by
`recorder`, and only then ended by `relay`. Nothing pure ever awaits.
"""

# The `tokentape` command looks for this line before it imports the package; see tokentape/__main__.py.
DISTRIBUTION = "tokentape"
