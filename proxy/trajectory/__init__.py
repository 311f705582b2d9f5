"""Steps and the token sequences that they form. All modules are pure.

step               the recorded call, as frozen values
arrays             ids, logprobs, masks and experts as arrays and bytes
fidelity           the problems that keep a step from being exact
blocks             content-addressed blocks, shared by the steps of a rollout
codec              a step as bytes
tree               steps -> tree of token ids
sequence           tree -> rows with a loss mask
conversations      which recorded reply a list of messages continues
drift              messages that continue while token ids do not
threads            the conversations of a rollout
facts              the facts of a rollout that its rows contain
"""
