"""Rollouts, groups, steps, policy versions and the audit, as kept in the store."""
