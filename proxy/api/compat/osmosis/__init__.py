"""Osmosis' protocol of remote rollouts."""
