"""Benchmarks of the proxy, as ratios to a minimal proxy in the same run: `make bench` and `make bench-growth`.

upstream    an engine that responds immediately with fixed bytes
turns       the same for conversations
load        clients with little overhead, and stored rollouts to export
fill        fills a store with finished rollouts and groups in the queue
servers     runs each server in its own process, also bare: an aiohttp reverse proxy that parses and stores nothing
rows        the rows of the table of targets
curves      costs as functions of prompt length, concurrency and stored data
storing     memory of the store per token
stored      what grows with stored rollouts
streams     thousands of open streams
profile     where the CPU time of a call goes
results     files and pages with the results
plots       plots of the results
"""
