"""The metrics of all workers together."""
