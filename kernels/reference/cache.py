"""Writes K and V by index assignment."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.reference.padding import without_padding


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.cache.write_kv`."""
    if not len(slot_mapping):
        return
    block_tokens = k_cache.shape[2]
    source, slots, writes = without_padding(slot_mapping)
    block, offset = slots // block_tokens, slots % block_tokens
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[block, :, offset] = torch.where(
            writes[:, None, None], new[source], cache[block, :, offset]
        )
