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
                yield from _converted(self.architecture, shard, found)

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
            sources[target].append(_StoredTensor(name, made_by, pattern))
        return sources


def _converted(
    architecture: str, shard: WeightShard, found: list[_StoredTensor]
) -> Iterator[WeightShard]:
    """Yields the shards of experts that are stored in another form: with two dimensions swapped, or
    as one matrix each; then a parameter [E, rows, in] is made from E matrices per pattern.

    parameter[e] = [ matrix e of pattern 0 | matrix e of pattern 1 | ... ]   along dimension 0
    """
    converter = found[0].converter
    first = converter.operations[0]
    if len(converter.operations) == 1 and type(first).__name__ == "Transpose":
        yield replace(shard, name=found[0].name, swaps=(first.dim0, first.dim1))
        return
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        raise ValueError(
            f"architecture {architecture!r}: its checkpoint's {converter.source_patterns} must be "
            "converted, which is not supported; save the model with the parameter names of "
            "transformers 5"
        )
    target, patterns = shard.target, list(converter.source_patterns)
    rows, of_experts = target.shape[1] // len(patterns), shard.index[0]
    assert isinstance(of_experts, slice)
    first_expert = of_experts.start or 0
    for order, pattern in enumerate(patterns):
        names = [s.name for s in found if s.pattern == pattern]
        if len(names) != shard.shape[0]:
            raise ValueError(
                f"the weights have {len(names)} tensors {pattern!r} for {shard.name!r}, but "
                f"config.json has {shard.shape[0]} experts"
            )
        for expert, matrix in enumerate(target, first_expert):
            part = matrix[order * rows : (order + 1) * rows]
            yield WeightShard(names[expert], part, (ALL,) * part.dim(), tuple(part.shape))


def _natural(name: str) -> list[Any]:
    """Returns a sort key that orders expert 2 before expert 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
