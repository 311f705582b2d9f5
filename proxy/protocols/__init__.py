"""The protocols of clients and engines: dialects, engines, and one call as an `Exchange`; without sockets, clock and store."""
