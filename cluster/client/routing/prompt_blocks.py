"""Hashes of the blocks of a prompt, with which an ingress finds prefixes shared with earlier
prompts. Pure.

Like the block hashes of engines (`engine/kv/block_hash.py`), each covers the salt and every token
up to the end of its block. They are compared only within one process, and only routing depends on
them. So they are Python's own hashes, which take less than half the time of chained digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from swell.engine.kv.block_hash import pack_tokens, root_of

_DIGEST_BYTES = 16


class PromptBlocks:
    """The blocks of one prompt."""

    def __init__(self, token_ids: Sequence[int], block_tokens: int, salt: str | None) -> None:
        """`salt` separates tenants."""
        packed = pack_tokens(token_ids)
        self.num_tokens = len(packed)
        self._size = block_tokens * packed.itemsize
        self._salt, self._tokens = salt, packed.tobytes()
        self.names: list[int] = []
        """The hash of each full block, valid only in this process."""
        name, tokens, size = hash(salt), self._tokens, self._size
        for start in range(0, len(tokens) - size + 1, size):
            name = hash((name, tokens[start : start + size]))
            self.names.append(name)

    def digest(self, num_blocks: int) -> bytes:
        """Returns a digest of the first `num_blocks` blocks: 16 bytes, equal in all ingresses."""
        text = root_of(self._salt) + self._tokens[: num_blocks * self._size]
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
