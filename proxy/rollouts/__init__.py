"""proxy.rollouts.rollout."""
