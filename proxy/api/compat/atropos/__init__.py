"""Atropos' protocols: its token servers and the sessions of its proxy."""
