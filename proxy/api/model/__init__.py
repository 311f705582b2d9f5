"""proxy.api.model."""
