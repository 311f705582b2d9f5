"""The settings; see `proxy.config.settings`."""
