"""Exact continuation: prompts that begin with recorded token ids, without a tokenizer. Pure: ids in, ids or a reason out.

`turns` indexes recorded steps by their messages, `matching` finds the turn that a call continues, and `bridge` computes the
prompt from renderings and texts that the caller requests from the engine.
"""
