"""Attention over packed sequences in plain torch, in place of the flash attention kernel, which needs a GPU.

Contains what AsyncGRPO (trl 1.16.0) calls of the kernel, and a constant for the GPU's speed. Queries are aligned with
the end of their keys, as in the kernel.
"""

from types import SimpleNamespace

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def attend(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
    """Attend within each segment: query (tokens, heads, size), key and value (tokens, fewer heads, size)."""
    assert causal
    assert window_size == (-1, -1)
    shared = query.shape[1] // key.shape[1]
    pieces = []
    for segment in range(len(cu_q) - 1):
        q = query[cu_q[segment] : cu_q[segment + 1]].transpose(0, 1)
        k, v = (
            tensor[cu_k[segment] : cu_k[segment + 1]].repeat_interleave(shared, dim=1).transpose(0, 1)
            for tensor in (key, value)
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        pieces.append(made.transpose(0, 1))
    return torch.cat(pieces)


def install():
    """Register this with TRL in place of the kernel, and a constant for the GPU's speed, which it reports."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
