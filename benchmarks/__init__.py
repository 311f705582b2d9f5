"""What the proxy costs, as ratios to the smallest possible one in the same run: `make bench`.

upstream    an engine that answers at once, with fixed bytes
bare        the smallest aiohttp reverse proxy: bytes passed through, nothing parsed, nothing stored
load        clients that cost little themselves
servers     each of them in a process of its own
rows        one function per line of the table of targets
curves      one function per quantity that may grow: `make bench-growth`
stages      what a call costs by stage, without sockets
results     the files that figures are kept in; plots draws them
"""
