"""Maps the parameters of a transformers model to checkpoint tensors.

Names have changed over the years, and expert matrices that a checkpoint stores one by one are now
one parameter. transformers has tables of these changes; this module turns them into `WeightShard`s.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from swell.worker.layers.weight_shard import ALL, WeightShard


@dataclass(frozen=True)
class _StoredTensor:
    """One checkpoint tensor that is read into a parameter."""

    name: str
    converter: Any = None
    """The transformers `WeightConverter`, if the parameter is made from several tensors."""
    pattern: str | None = None
    """The converter's source pattern that the name matched."""
    targets: tuple[str, ...] = ()
    """The parameters that the converter makes."""


class WeightsMapper:
    """The names of one model's parameters in checkpoints."""

    def __init__(self, model: Any) -> None:
        """`model` is complete, on the meta device, and not split yet."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        changes = get_model_conversion_mapping(model)
        self.converters = [c for c in changes if isinstance(c, WeightConverter)]
        self.renamings = [c for c in changes if not isinstance(c, WeightConverter)]
        self.architecture, self.prefix = type(model).__name__, model.base_model_prefix
        self.own: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self._embedding = model.get_input_embeddings().weight
        self._vocab_size: int = model.config.get_text_config().vocab_size

    def in_checkpoint(
        self, weight_shards: Iterable[WeightShard], stored: Collection[str]
    ) -> Iterator[WeightShard]:
        """Yields the shards under the checkpoint's names; `stored`: all names in the checkpoint.

        A shard without a stored tensor keeps its name, so that the loader reports it as missing.
        Raises `ValueError` for a conversion that is not supported.
        """
        sources = self._sources(stored)
        for shard in weight_shards:
            name = shard.name
            if name not in sources:
                name = next((n for n in self._shared_with(name) if n in sources), name)
            found = sources.get(name, [_StoredTensor(name)])
            if found[0].converter is None:
                yield WeightShard(found[0].name, shard.target, shard.index, shard.shape)
            else:
                yield from self._converted(shard, found)

    def tied_pairs(self, stored: Collection[str]) -> list[tuple[str, str]]:
        """Returns pairs of stored tensors that are one parameter in the model."""
        sources = self._sources(stored)
        return [
            (sources[target][0].name, sources[source][0].name)
            for target, source in self.tied.items()
            if target in sources and source in sources
        ]

    def _shared_with(self, name: str) -> list[str]:
        """Returns other names of the same parameter: its source's, and the names that have the same
        source."""
        source = self.tied.get(name, name)
        return [source, *(target for target, other in self.tied.items() if other == source)]

    def _sources(self, stored: Collection[str]) -> dict[str, list[_StoredTensor]]:
        """Returns parameter name -> the checkpoint tensors from which it is made."""
        from transformers.core_model_loading import rename_source_key

        sources: dict[str, list[_StoredTensor]] = defaultdict(list)
        for name in sorted(stored, key=_natural):
            target, pattern = rename_source_key(
                name, self.renamings, self.converters, self.prefix, self.own
            )
            made_by = next((c for c in self.converters if pattern in c.source_patterns), None)
            first, *others = made_by.target_patterns if made_by else [target]
            targets = (target, *(target.replace(first, other) for other in others))
            for each in targets:
                sources[each].append(_StoredTensor(name, made_by, pattern, targets))
        return sources

    def _converted(self, shard: WeightShard, found: list[_StoredTensor]) -> Iterator[WeightShard]:
        """Yields the shards of a parameter that is stored in another form."""
        converter, targets = found[0].converter, found[0].targets
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
        match steps:
            case [("Transpose", _)]:
                first = converter.operations[0]
                yield replace(shard, name=found[0].name, swaps=(first.dim0, first.dim1))
            case [("Chunk" | "Split", int(dim))]:
                sizes = [self.own[target].shape[dim] for target in targets]
                start = sum(sizes[: targets.index(shard.name)])
                yield _slice_of(shard, found[0].name, dim, start, sum(sizes))
            case [("Concatenate", int(dim))] if shard.index[dim] == ALL:
                size = shard.shape[dim]
                parts = [size // len(found)] * len(found)
                if self.own[shard.name] is self._embedding:  # further tokens have their own table
                    parts = [self._vocab_size, size - self._vocab_size]
                yield from _concatenated(shard, found, dim, parts)
            case (
                [("MergeModulelist", 0)]
                | [("MergeModulelist", 0), ("Concatenate", 1)]
                | [("ErnieFuseAndSplitTextVisionExperts", _)]
            ):
                yield from _stacked(shard, found)
            case _:
                raise ValueError(
                    f"architecture {self.architecture!r}: its checkpoint's "
                    f"{converter.source_patterns} must be converted, which is not supported; save "
                    "the model with the parameter names of transformers 5"
                )


def _slice_of(shard: WeightShard, name: str, dim: int, start: int, size: int) -> WeightShard:
    """Returns the shard of a parameter that is stored along `dim` from `start` in a tensor of
    `size`, which holds other parameters, too."""
    index, shape = list(shard.index), list(shard.shape)
    own = index[dim]
    assert isinstance(own, slice)
    first, last, _ = own.indices(shape[dim])
    index[dim], shape[dim] = slice(start + first, start + last), size
    return replace(shard, name=name, index=tuple(index), shape=tuple(shape))


def _concatenated(
    shard: WeightShard, found: list[_StoredTensor], dim: int, sizes: list[int]
) -> Iterator[WeightShard]:
    """Yields the shards of a parameter that is stored as several tensors, which follow each other
    along `dim` with these sizes."""
    names = {stored.pattern: stored.name for stored in found}
    patterns = found[0].converter.source_patterns
    for pattern, part in zip(patterns, shard.target.split(sizes, dim), strict=True):
        shape = (*shard.shape[:dim], part.shape[dim], *shard.shape[dim + 1 :])
        yield replace(shard, name=names.get(pattern, pattern), target=part, shape=shape)


def _stacked(shard: WeightShard, found: list[_StoredTensor]) -> Iterator[WeightShard]:
    """Yields the shards of experts that are stored as one matrix each: a parameter [E, rows, in] is
    made from E matrices per pattern. If the matrices make several parameters, each has as many.

    parameter[e] = [ matrix e of pattern 0 | matrix e of pattern 1 | ... ]   along dimension 0
    """
    patterns, targets = list(found[0].converter.source_patterns), found[0].targets
    rows, of_experts = shard.target.shape[1] // len(patterns), shard.index[0]
    assert isinstance(of_experts, slice)
    first_expert = of_experts.start or 0
    for order, pattern in enumerate(patterns):
        names = [s.name for s in found if s.pattern == pattern]
        if len(names) != shard.shape[0] * len(targets):
            raise ValueError(
                f"the weights have {len(names)} tensors {pattern!r} for {shard.name!r}, but "
                f"config.json has {shard.shape[0] * len(targets)} experts"
            )
        before = targets.index(shard.name) * shard.shape[0]
        for expert, matrix in enumerate(shard.target, before + first_expert):
            part = matrix[order * rows : (order + 1) * rows]
            yield WeightShard(names[expert], part, (ALL,) * part.dim(), tuple(part.shape))


def _natural(name: str) -> list[Any]:
    """Returns a sort key that orders expert 2 before expert 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
