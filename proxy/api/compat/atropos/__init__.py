"""proxy.api.compat.atropos."""
