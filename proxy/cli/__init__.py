"""What the commands print, for people and for programs; nothing here decides what is true.

exits       [pure] what an exit code means
escaping    [pure] text that others wrote, made harmless for a terminal
consoles    where things are printed: standard output for what was asked, standard error for notes
options     the options that several commands share
given       the settings, with what the command line said on top
running     a command's work, run to its end; failures told by a sentence
asking      JSON from a running proxy's control API
tables      rollouts and groups, a line each
tokens      sampled tokens: ids, texts, colours of logprobs
step        one step: what stands around its tokens
rollout     a rollout: its header, and each branch of its tree
looking     what `list` and `show` do
tail        steps, a line each, as they are stored
exporting   what `export` says, and its report
checking    findings, as they are found
progress    how far an export or an audit has come
completion  ids of rollouts, for a shell that completes
serving     what `serve` and `simulate` say of themselves
"""
