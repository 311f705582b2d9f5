"""proxy.cli.render."""
