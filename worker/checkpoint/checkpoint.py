"""The tensors of a checkpoint, for any format of its files.

A checkpoint has names, and a `StoredTensor` for each name. Only the requested part of a tensor is
read; a tensor that is quantized is dequantized while it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from swell.kernels.weights.quantized import INTEGERS, Numbers, QuantizedTensor

Index = tuple[slice | int, ...]
"""A part of a tensor: one entry, a number or a slice of step 1, for each dimension."""

CHUNK_BYTES = 64 * 1024 * 1024
"""The largest part of a tensor that is read at a time: the memory that loading needs in addition to
the parameters."""


CUT_GROUP = "a part begins or ends within a group"
"""A reason of `HasIntegers.read_quantized`."""


class DamagedCheckpoint(ValueError):
    """Files that do not make a checkpoint. The text is one line that names the tensor or the file,
    and the fix."""


class StoredTensor(Protocol):
    """One parameter of a model in a checkpoint, which may store it as several tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter. Raises `ValueError` if its file cannot be read."""

    @property
    def file(self) -> Path:
        """The file that holds the parameter, or most of it. Reading file by file is fastest."""

    @property
    def description(self) -> str:
        """The parameter and its file, as the subject of an error."""

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """Returns a part for a parameter of type `dtype`, on the CPU: of this type, or of the type
        in which it is stored, so that a copy into the parameter converts it once. Raises
        `ValueError` if the values cannot be represented in `dtype`, or if this part cannot be read
        separately."""


@runtime_checkable
class HasIntegers(Protocol):
    """A `StoredTensor` whose integers, or small floats, may be used for products without
    dequantizing them."""

    def read_quantized(
        self, index: Index, computed: Collection[Numbers] = INTEGERS
    ) -> QuantizedTensor | str:
        """Returns a part with the values of `read`, up to the last bit of float32; or why products
        cannot use its integers or floats, in a few words. `computed`: the numbers with which
        products can be computed. Floats that are not among them may become integers."""


class Checkpoint(Protocol):
    """The parameters of one model folder or file."""

    @property
    def names(self) -> Collection[str]:
        """The names of all parameters."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines about the checkpoint for the log."""

    def tensor(self, name: str) -> StoredTensor:
        """Returns one of `names`, without opening its file."""

    def close(self) -> None:
        """Closes the files. Tensors cannot be read afterwards."""


class RenamedCheckpoint:
    """Some parameters of a checkpoint under other names."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        """`names`: new name -> name in `checkpoint`."""
        self._checkpoint, self._names = checkpoint, names

    @property
    def names(self) -> Collection[str]:
        return self._names.keys()

    @property
    def notes(self) -> Sequence[str]:
        return self._checkpoint.notes

    def tensor(self, name: str) -> StoredTensor:
        return self._checkpoint.tensor(self._names[name])

    def close(self) -> None:
        self._checkpoint.close()


class NoCheckpoint:
    """The checkpoint of a model with random weights."""

    names: Collection[str] = ()
    notes: Sequence[str] = ()

    def tensor(self, name: str) -> StoredTensor:
        raise KeyError(name)

    def close(self) -> None:
        pass
