"""Names of KV blocks: chained hashes of the tokens that they hold.

The name of a block covers every token before it, so equal names mean equal KV contents. Engines
find cached blocks by it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_DIGEST_BYTES = 16


def root_of(salt: str | None) -> bytes:
    """What the first block is chained to. It is itself a hash, marked as a root, so that no salt
    can pose as the name of a block."""
    text = b"" if salt is None else b"salt" + salt.encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"swell-root").digest()


def pack_tokens(token_ids: Iterable[int]) -> array[int]:
    """Tokens side by side, four bytes each, as they are hashed."""
    return array("I", token_ids)


def extend_block_hashes(
    hashes: list[bytes], token_ids: array[int], block_tokens: int, salt: str | None = None
) -> None:
    """Append to `hashes` the names of those full blocks of `token_ids` (packed) that it lacks.

    `salt` separates tenants: it enters the first block, and chaining spreads it.
    """
    parent, known = hashes[-1] if hashes else root_of(salt), len(hashes) * block_tokens
    size, tokens = block_tokens * token_ids.itemsize, token_ids[known:].tobytes()
    for start in range(0, len(tokens) - size + 1, size):
        text = parent + tokens[start : start + size]
        parent = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
