"""Modules of transformers whose products and lookups our kernels compute, with packed weights.

A module keeps its parameters, its hooks and the forward of its class. Its weight is packed after it
is loaded, unless the model reads the weight elsewhere, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import functional

from swell.kernels.linear import PackedTensor, Weight, embedding, linear
from swell.worker.layers.packed_weight import PackedWeight


class _Watched(PackedWeight):
    """Knows whether its weight was read otherwise than by its own product or lookup."""

    _is_read = False
    _is_plain = False

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Returns `module` with this class, which takes its place."""
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        return made

    def watch(self) -> None:
        self._is_read = False

    def was_read(self) -> bool:
        """Whether the weight was read since the last call of `watch`."""
        return self._is_read

    def keep_plain(self) -> None:
        """Never packs the weight."""
        self._is_plain = True

    def pack(self, exact: bool) -> None:
        if not self._is_plain:
            super().pack(exact)

    def __getattr__(self, name: str) -> Any:  # for parameters
        if name == "weight":
            self.__dict__["_is_read"] = True
        return super().__getattr__(name)

    def _own_weight(self) -> Weight:
        weight: Weight | None = self._parameters.get("weight")
        return self.__dict__["weight"] if weight is None else weight


class _Linear(_Watched, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._own_weight(), self.bias)


class _Embedding(_Watched, nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        weight = self._own_weight()
        if isinstance(weight, PackedTensor):
            return embedding(ids, weight)
        return functional.embedding(ids, weight)


def use_kernels(model: nn.Module) -> None:
    """Lets kernels compute every plain `nn.Linear` of a model, and look up the embeddings that
    share a weight with one."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    weights = {id(module.weight) for module in linears}
    replacements: dict[nn.Module, nn.Module] = {each: _Linear.of(each) for each in linears}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in weights:
            own = type(module)
            # The forward of a subclass may call that of `nn.Embedding` and scale its result.
            kind: type[_Embedding] = type(own.__name__, (own, _Embedding), {})
            replacements[module] = kind.of(module)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


@contextmanager
def packing_unless_read(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context the model runs. Afterwards the modules do not pack weights that the model has
    read."""
    by_weight: dict[int, list[_Watched]] = defaultdict(list)
    for module in modules:
        if isinstance(module, _Watched):
            by_weight[id(module._parameters["weight"])].append(module)
            module.watch()
    yield
    for sharing in by_weight.values():
        if any(module.was_read() for module in sharing):
            for module in sharing:
                module.keep_plain()
