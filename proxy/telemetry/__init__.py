"""proxy.telemetry."""
