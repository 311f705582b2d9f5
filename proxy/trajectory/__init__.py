"""Steps, and what they join to.

    step        the recorded call, as frozen values
    packing     ids and logprobs as arrays
    fidelity    what keeps a step from being exact
    blocks      what steps of a rollout share, stored once
    record      a step as bytes
    tree        steps -> tree of ids
    sequence    tree -> masked rows
    rollout     what rows say of their rollout

All of it is pure.
"""
