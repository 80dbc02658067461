"""The draft model of a worker, which proposes the next tokens of rows: a small model, or a head of
the target model (`docs/tune/speculative-decoding.md`).

The output rank of the engine holds the whole draft model, regardless of how the target model is
split. It uses the same block numbers as the target model for its own KV, so everything that is
known about a block of one (its owner, its hash, its copies in other tiers) also holds for the
other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swell.worker.drafting.draft_runner import NoDraftRunner
from swell.worker.memory import kv_cache
from swell.worker.model_interfaces import HasKVCache
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.request_states import RequestStates

MakeRunner = Callable[[RequestStates, BlockTables, int], NoDraftRunner]
"""(states, blocks, most tokens of a step) -> the runner that computes the model."""


class NoDraftModel:
    """The draft model of a worker without one."""

    nbytes = 0
    """Bytes of its weights."""
    mapped_bytes = 0
    """The same as `LoadedWeights.mapped_bytes`."""
    modules: tuple[HasKVCache, ...] = ()

    def __init__(self, reads_hidden: bool = False) -> None:
        """`reads_hidden`: the engine's draft model reads the target model's hidden states, so every
        worker of the last stage computes those of all tokens."""
        self.reads_hidden = reads_hidden

    def block_bytes(self, block_tokens: int) -> int:
        """Returns the bytes of one block in all its layers."""
        return 0

    def allocate(self, num_blocks: int, block_tokens: int, device: torch.device) -> list[Tensor]:
        """Binds a zeroed cache to every layer; returns all caches, each [blocks, ...]."""
        return []

    def unbind_cache(self) -> None:
        """Drops the caches, so that their memory can be freed."""

    def make_runner(
        self, states: RequestStates, blocks: BlockTables, max_tokens: int
    ) -> NoDraftRunner:
        """Returns the runner that computes it; `max_tokens`: the most tokens of one step."""
        return NoDraftRunner()


NO_DRAFT_MODEL = NoDraftModel()


class DraftModel(NoDraftModel):
    """A draft model whose weights are loaded."""

    def __init__(
        self,
        model: HasKVCache,
        cache_dtype: torch.dtype,
        nbytes: int,
        mapped_bytes: int,
        make_runner: MakeRunner,
        reads_hidden: bool = False,
    ) -> None:
        super().__init__(reads_hidden)
        self._model, self._cache_dtype, self._make_runner = model, cache_dtype, make_runner
        self.nbytes, self.mapped_bytes = nbytes, mapped_bytes
        self.modules = (model,)

    def block_bytes(self, block_tokens: int) -> int:
        layers = self._model.attention_layers()
        return kv_cache.bytes_per_block(layers, block_tokens, self._cache_dtype)

    def allocate(self, num_blocks: int, block_tokens: int, device: torch.device) -> list[Tensor]:
        layers = self._model.attention_layers()
        kv_cache.allocate(layers, num_blocks, block_tokens, self._cache_dtype, device)
        return [cache for layer in layers for cache in layer.caches]

    def unbind_cache(self) -> None:
        for layer in self._model.attention_layers():
            layer.unbind_cache()

    def make_runner(
        self, states: RequestStates, blocks: BlockTables, max_tokens: int
    ) -> NoDraftRunner:
        return self._make_runner(states, blocks, max_tokens)
