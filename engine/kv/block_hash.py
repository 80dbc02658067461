"""Hashes of KV blocks: each block's hash is chained to that of the block before it.

The hash of a block covers all tokens up to its end, so equal hashes mean equal KV contents. Engines
find cached blocks by their hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_DIGEST_BYTES = 16


def root_of(salt: str | None) -> bytes:
    """Returns the parent of the first block. It is itself a hash, marked as a root, so that no salt
    can imitate the hash of a block."""
    text = b"" if salt is None else b"salt" + salt.encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"swell-root").digest()


def pack_tokens(token_ids: Iterable[int]) -> array[int]:
    """Packs tokens into four bytes each, as they are hashed."""
    return array("I", token_ids)


def extend_block_hashes(
    hashes: list[bytes], token_ids: array[int], block_tokens: int, salt: str | None = None
) -> None:
    """Appends to `hashes` the missing hashes of full blocks of `token_ids` (packed).

    `salt` separates tenants: it enters the first block's hash, and so it changes all following
    ones.
    """
    parent, known = hashes[-1] if hashes else root_of(salt), len(hashes) * block_tokens
    size, tokens = block_tokens * token_ids.itemsize, token_ids[known:].tobytes()
    for start in range(0, len(tokens) - size + 1, size):
        text = parent + tokens[start : start + size]
        parent = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
