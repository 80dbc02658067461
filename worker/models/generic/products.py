"""Modules of transformers whose products and lookups our kernels compute, with packed weights.

A module keeps its parameters, its hooks and the forward of its class. Its weight is packed after it
is loaded, unless the model reads the weight elsewhere, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from swell.kernels.linear import Weight, embedding, linear
from swell.worker.layers.packed_weight import HEAD_BITS, PackedWeight, Packing
from swell.worker.layers.weight_shard import WeightShard, replicated_shard


class _ObservedWeight(Tensor):
    """A weight that calls `on_read` if any operation reads it; its type and its device may be
    read."""

    on_read: Callable[[], None]

    @classmethod
    def of(cls, weight: Tensor, on_read: Callable[[], None]) -> _ObservedWeight:
        observed = weight.detach().as_subclass(cls)
        observed.__dict__["on_read"] = on_read
        return observed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MAY_BE_READ:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _ObservedWeight):
                    leaf.on_read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_MAY_BE_READ = (Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
"""Attributes that packed weights have, too."""


class _Watched(PackedWeight):
    """Knows whether its weight is read otherwise than by its own product or lookup."""

    _is_watched = False
    _is_read = False

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Returns `module` with this class, which takes its place."""
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        return made

    def watch(self, *, begins: bool) -> None:
        self._is_watched = begins

    @property
    def is_read(self) -> bool:
        return self._is_read

    def keep_plain(self) -> None:
        """Never packs the weight."""
        self._is_read = True

    @property
    def may_be_quantized(self) -> bool:
        return not self._is_read

    def pack(self, packing: Packing) -> None:
        if not self._is_read:
            super().pack(packing)

    def __getattr__(self, name: str) -> Any:  # for parameters
        found: Any = super().__getattr__(name)
        if name != "weight" or not self._is_watched:
            return found
        return _ObservedWeight.of(found, self.keep_plain)

    @property
    def own_weight(self) -> Weight:
        """The weight, for the module's own product or lookup."""
        weight: Weight | None = self._parameters.get("weight")
        return self.__dict__["weight"] if weight is None else weight


class PackedLinear(_Watched, nn.Linear):
    _is_head = False

    def become_head(self) -> None:
        self._is_head = True

    def quantized_bits(self, packing: Packing) -> int | None:
        return HEAD_BITS if self._is_head and packing.bits else packing.bits

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.own_weight, self.bias)


class TransposedLinear(PackedLinear):
    """A `Conv1D` of GPT-2: a product whose weight is [in, out] in checkpoints."""

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        weight = module.get_parameter("weight").detach().T
        outputs, inputs = weight.shape
        made = cls(inputs, outputs, device="meta")
        made.register_parameter("weight", nn.Parameter(weight.contiguous(), requires_grad=False))
        made.register_parameter("bias", module.get_parameter("bias"))
        return made

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated_shard(f"{name}.weight", self.weight.detach().T)
        yield replicated_shard(f"{name}.bias", self.bias)


class _Embedding(_Watched, nn.Embedding):
    def quantized_bits(self, packing: Packing) -> int | None:
        return HEAD_BITS if packing.bits else None

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.own_weight
        if isinstance(weight, Tensor):
            return functional.embedding(ids, weight)
        return embedding(ids, weight)


def use_kernels(model: nn.Module) -> None:
    """Lets kernels compute every plain `nn.Linear` and `Conv1D` of a model, and look up the
    embeddings that share a weight with one."""
    from transformers.pytorch_utils import Conv1D

    linears = [module for module in model.modules() if type(module) is nn.Linear]
    weights = {id(module.weight) for module in linears}
    replacements: dict[nn.Module, nn.Module] = {each: PackedLinear.of(each) for each in linears}
    for module in model.modules():
        if type(module) is Conv1D:
            replacements[module] = TransposedLinear.of(module)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in weights:
            replacements[module] = _embedding_class(type(module)).of(module)
    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else replacements.get(find_head())
    if isinstance(head, PackedLinear):
        head.become_head()
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def _embedding_class(own: type[nn.Embedding]) -> type[_Embedding]:
    """Returns the class that replaces `own`, whose forward may scale the result of that of
    `nn.Embedding`."""
    return _Embedding if own is nn.Embedding else type(own.__name__, (own, _Embedding), {})


@contextmanager
def packing_unless_read(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context the model runs. Afterwards the modules do not pack weights that the model has
    read."""
    by_weight: dict[int, list[_Watched]] = defaultdict(list)
    for module in modules:
        if isinstance(module, _Watched):
            by_weight[id(module._parameters["weight"])].append(module)
            module.watch(begins=True)
    yield
    for sharing in by_weight.values():
        for module in sharing:
            module.watch(begins=False)
            if any(each.is_read for each in sharing):
                module.keep_plain()
