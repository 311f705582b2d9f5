"""proxy.server.listener."""
