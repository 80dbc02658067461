"""A checkpoint in safetensors files: `model.safetensors`, or several files and their index."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from swell.configs.files.bounded_files import MAX_INDEX_BYTES, open_regular, parse_json, read_file
from swell.worker.checkpoint.checkpoint import DamagedCheckpoint, Index

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of values that are not quantized."""
NotesOf = Callable[[Collection[str]], Sequence[str]]
MAX_OPEN_FILES = 4
"""Files that are mapped at the same time: pages of a mapped file count as memory of the process."""


class SafetensorsCheckpoint:
    """The tensors of the safetensors files of one folder."""

    def __init__(self, folder: Path, notes_of: NotesOf = lambda _: ()) -> None:
        """`notes_of`: returns `notes` for the names of the tensors. Raises `ValueError` for a
        folder without such files."""
        self._folder = folder
        self._open: dict[Path, Any] = {}
        self._files = self._read_names()
        """Name of a tensor -> name of its file."""
        self.notes = notes_of(self.names)

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def tensor(self, name: str) -> SafetensorsTensor:
        return SafetensorsTensor(self, name, self._folder / self._files[name])

    def header(self, tensor: SafetensorsTensor) -> tuple[tuple[int, ...], str]:
        """Returns the shape of a tensor, and the type of its values as safetensors writes it."""
        with _explained(tensor.file):
            source = self._file(tensor.file).get_slice(tensor.name)
            return tuple(source.get_shape()), source.get_dtype()

    def read(self, tensor: SafetensorsTensor, index: Index) -> torch.Tensor:
        """Returns a part of a tensor, of the type in which it is stored."""
        with _explained(tensor.file):
            file = self._file(tensor.file)
            part: torch.Tensor
            part = file.get_slice(tensor.name)[index] if index else file.get_tensor(tensor.name)
            return part

    def close(self) -> None:
        while self._open:
            self._close_first()

    def _close_first(self) -> None:
        first = next(iter(self._open))
        self._open.pop(first).__exit__(None, None, None)

    def _file(self, path: Path) -> Any:
        """Returns the open file. Closes the file that was used the longest time ago if too many are
        open."""
        opened = self._open.pop(path, None)
        if opened is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._close_first()
            opened = _opened(path).__enter__()
        self._open[path] = opened
        return opened

    def _read_names(self) -> dict[str, str]:
        folder = self._folder
        index, single = folder / INDEX_NAME, folder / SINGLE_NAME
        if index.is_file():
            try:
                weight_map = parse_json(read_file(index, MAX_INDEX_BYTES))["weight_map"]
                return {str(name): str(file) for name, file in weight_map.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"the index {str(index)!r} cannot be read ({error!r}); copy or download it "
                    "again"
                ) from None
        if single.is_file():
            return dict.fromkeys(self._file(single).keys(), single.name)
        others = sorted(p.name for p in folder.glob("*.bin"))
        found = f" (found only {others[0]}: convert it to safetensors)" if others else ""
        raise ValueError(
            f"model {str(folder)!r} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}{found}; "
            "add them, or set model.load_format=dummy"
        )


class SafetensorsTensor:
    """One tensor of a safetensors file."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, name: str, file: Path) -> None:
        self._checkpoint, self.name, self.file = checkpoint, name, file

    @cached_property
    def _header(self) -> tuple[tuple[int, ...], str]:
        return self._checkpoint.header(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._header[0]

    @property
    def description(self) -> str:
        return f"tensor {self.name!r} in {str(self.file)!r}"

    @property
    def stored_type(self) -> str:
        """The type of the values as safetensors writes it, for example BF16."""
        return self._header[1]

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point and self.stored_type not in FLOATS:
            raise ValueError(
                f"{self.description} has the type {self.stored_type}, but the model's parameter is "
                f"a float ({', '.join(sorted(FLOATS))}): it is quantized, and the checkpoint does "
                "not have its scales in a form that is supported; serve the checkpoint from which "
                "it was made, in bfloat16, float16 or float32"
            )
        return self.read_stored(index)

    def read_stored(self, index: Index) -> torch.Tensor:
        """Returns a part, of the type in which it is stored."""
        return self._checkpoint.read(self, index)

    def read_whole(self) -> torch.Tensor:
        """Returns all values, of the type in which they are stored."""
        return self._checkpoint.read(self, ())


def _opened(path: Path) -> Any:
    try:
        os.close(open_regular(path))
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"the weights' file {str(path)!r} is missing, but the index lists it; copy or "
            "download it again"
        ) from None
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(
            f"the weights' file {str(path)!r} cannot be read ({error}); it is incomplete or not a "
            "safetensors file; copy or download it again"
        ) from None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise DamagedCheckpoint(
            f"the weights' file {str(path)!r} does not have a tensor that the index lists "
            f"({error}); copy or download both again"
        ) from None
