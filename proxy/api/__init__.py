"""proxy.api."""
