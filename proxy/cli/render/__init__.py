"""Renders rollouts, groups and steps as text for a terminal."""
