"""K and V in the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.triton.attention.cache import write_kv
from tests.kernels.triton.oracle import TYPES

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernel in sizes of models."""
    for head_dim in (64, 96, 256):
        k, cache = torch.empty(3, 4, head_dim, dtype=dtype), torch.empty(9, 4, 16, head_dim)
        caches = (cache.to(dtype), cache.to(dtype))
        yield write_kv(k, k, *caches, torch.empty(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "block_tokens"), [(1, 16), (5, 16), (0, 4), (4, 1)])
def test_each_token_is_written_to_its_slot(dtype, tokens, block_tokens):
    blocks, kv_heads, head_dim = 9, 3, 20
    memory = torch.randn(2, 1 + blocks, kv_heads, block_tokens, head_dim).to(dtype)
    expected = memory.clone()
    caches, wanted = memory[:, 1:], expected[:, 1:]
    wide = torch.randn(tokens, 2 * kv_heads * head_dim).to(dtype)
    k, v = (x.unflatten(1, (kv_heads, head_dim)) for x in wide.chunk(2, dim=1))
    slots = torch.randperm(blocks * block_tokens)[:tokens]
    slots[2:3] = -1  # padding
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        wanted[0, slot // block_tokens, :, slot % block_tokens] = k[t]
        wanted[1, slot // block_tokens, :, slot % block_tokens] = v[t]
    write_kv(k, v, caches[0], caches[1], slots)
    assert torch.equal(memory, expected), "also before the first block"


def test_blocks_may_lie_beyond_2_to_the_31_elements():
    """Only the pages that are written take memory."""
    block = 1 << 20
    cache = torch.empty((1 << 31) // block + 2, 1, block // 8, 8, dtype=torch.float16)
    k, slot = torch.randn(1, 1, 8).half(), cache.shape[0] * block // 8 - 1
    write_kv(k, k, cache, cache, torch.tensor([slot]))
    assert torch.equal(cache[-1, 0, -1], k[0, 0])
