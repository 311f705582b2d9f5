"""proxy.api.compat.osmosis."""
