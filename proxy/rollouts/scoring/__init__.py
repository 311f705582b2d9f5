"""Logprobs of recorded token ids from an engine now, for audits and for exports with `rescore`."""
