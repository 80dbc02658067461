"""Invariants of the block pool that hold at any time, checked in its own tables."""

from __future__ import annotations

from collections.abc import Sequence

from swell.engine.kv.block_pool import BlockPool


def cached_run(pool: BlockPool, names: Sequence[bytes]) -> list[int]:
    """Returns the longest run of cached blocks for a chain of block hashes, from its start."""
    blocks: list[int] = []
    for name in names:
        if (block := pool.get_cached_block(name)) is None:
            break
        blocks.append(block)
    return blocks


def check_blocks(pool: BlockPool) -> None:
    """Raises AssertionError unless every block is either held or free and its hashes are
    consistent."""
    for block, count in enumerate(pool._references):
        assert (count == 0) == (block in pool._free), f"block {block} is held {count} times"
    for block_hash, block in pool._cached.items():
        assert pool._block_hashes[block] == block_hash, f"block {block} has lost its hash"
