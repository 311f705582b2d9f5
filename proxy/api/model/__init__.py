"""The model API: calls of agents, recorded and relayed."""
