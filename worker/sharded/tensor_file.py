"""One worker's file of tensors: safetensors with additional notes.

    8 bytes    length of the header
    header     JSON: name -> type, shape, place; `__metadata__` -> `swell`: `FileNotes` as JSON;
               filled with blanks, so that the tensors begin at a page
    tensors    one after the other, the large ones at multiples of `ALIGNMENT`

A reader maps the file: a tensor is a view of the page cache, which all processes of a host share.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from swell.configs.files.bounded_files import parse_json
from swell.configs.files.sharded_index import AGAIN, ShardFile, digest_of, refuse_other_length
from swell.kernels.linear import FloatWeight, PackedTensor

AddBytes = Callable[[int], None]
"""Called with the number of bytes that were read or written since the last call."""

ALIGNMENT = 64
"""Alignment in bytes: a cache line, the same as torch's."""
CHUNK_BYTES = 64 * 2**20
"""The most bytes of a tensor that are written or summed at a time."""
MAX_HEADER_BYTES = 64 * 2**20
"""The most bytes of a header: enough for a worker with some hundred thousand tensors."""

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a type in safetensors -> the torch type."""
NAMES = {dtype: name for name, dtype in TYPES.items()}
_NOTES = "swell"
_MASK = 2**64 - 1


class FileNotes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties of a file's tensors other than their types and shapes."""

    sums: dict[str, int]
    """The `word_sum` of each tensor."""
    packed: dict[str, tuple[int, int]]
    """(out, in) of each packed tensor."""


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[int, int]

    def fits(self, size_bytes: int) -> bool:
        """Whether this describes a tensor that fits into this many bytes."""
        (start, end), dtype = self.data_offsets, TYPES.get(self.dtype)
        return (
            dtype is not None
            and 0 <= start <= end <= size_bytes
            and start % dtype.itemsize == 0
            and end - start == math.prod(self.shape) * dtype.itemsize
        )


def word_sum(tensor: torch.Tensor, add: AddBytes = lambda nbytes: None) -> int:
    """Returns the sum of the 64-bit words of a contiguous tensor, and of the bytes after them. It
    differs if bits are wrong or parts are missing, and is as fast as reading memory."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    total = 0
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        words = len(part) // 8 * 8
        total += int(part[:words].view(torch.int64).sum())
        total += int(part[words:].sum(dtype=torch.int64))
        add(len(part))
    return total & _MASK


def data_of(weight: FloatWeight) -> torch.Tensor:
    """Returns the memory of a weight, whether it is packed or not."""
    return weight.data if isinstance(weight, PackedTensor) else weight.detach()


def write_tensors(path: Path, weights: Mapping[str, FloatWeight], add: AddBytes) -> ShardFile:
    """Writes a new file and waits until it is on disk."""
    tensors = {name: data_of(weight).contiguous() for name, weight in weights.items()}
    # Tensors of whole cache lines come first, in module order, then the others by the size of an
    # element: so each one begins at a multiple of its alignment.
    names = sorted(
        tensors,
        key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, -tensors[name].element_size()),
    )
    notes = FileNotes(
        sums={name: word_sum(tensors[name]) for name in names},
        packed={
            name: (weight.out_features, weight.in_features)
            for name, weight in weights.items()
            if isinstance(weight, PackedTensor)
        },
    )
    header = _header({name: tensors[name] for name in names}, notes)
    with path.open("xb") as file:
        file.write(header)
        for name in names:
            data = tensors[name].reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(data), CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                file.write(part.data)
                add(len(part))
        file.flush()
        os.fsync(file.fileno())
        return ShardFile(size_bytes=file.tell(), header_digest=digest_of(header))


def _header(tensors: Mapping[str, torch.Tensor], notes: FileNotes) -> bytes:
    places: dict[str, Any] = {"__metadata__": {_NOTES: msgspec.json.encode(notes).decode()}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        places[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % mmap.PAGESIZE)
    assert len(text) <= MAX_HEADER_BYTES, f"{len(tensors)} tensors"
    return struct.pack("<Q", len(text)) + text


class TensorFile:
    """A mapped file that `write_tensors` has written. Its tensors are views, valid as long as any
    of them is used. Writing to them does not change the file."""

    def __init__(self, path: Path, known: ShardFile) -> None:
        """`known`: the file's entry in the index. Raises `ValueError` for any other file."""
        self.path = path
        refuse_other_length(path, known)
        try:
            with path.open("rb") as file:
                header = file.read(8)
                length = min(int.from_bytes(header, "little"), MAX_HEADER_BYTES)
                header += file.read(length)
                if digest_of(header) != known.header_digest:
                    raise ValueError(
                        f"{str(path)!r} is not the file that was saved with its index: it is "
                        f"damaged, or from another save; copy all files again, or {AGAIN}"
                    )
                mapping = mmap.mmap(file.fileno(), known.size_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
        self._data = torch.frombuffer(mapping, dtype=torch.uint8)[len(header) :]
        try:
            places = parse_json(header[8:])
            self.notes = msgspec.json.decode(places.pop("__metadata__")[_NOTES], type=FileNotes)
            self._places = msgspec.convert(places, dict[str, _Place])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} has an invalid header ({error!r}); {AGAIN}") from None
        for name, place in self._places.items():
            if name not in self.notes.sums or not place.fits(len(self._data)):
                raise ValueError(f"{str(path)!r} has an invalid header for {name!r}; {AGAIN}")

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the file."""
        place = self._places[name]
        start, end = place.data_offsets
        return self._data[start:end].view(TYPES[place.dtype]).view(place.shape)

    def check(self, name: str, add: AddBytes) -> None:
        """Reads a tensor and compares its sum. Raises `ValueError` if it is damaged."""
        if word_sum(self.tensor(name), add) != self.notes.sums[name]:
            raise ValueError(
                f"tensor {name!r} in {str(self.path)!r} is damaged: its checksum is not the saved "
                f"one; copy the file again, or {AGAIN}"
            )
