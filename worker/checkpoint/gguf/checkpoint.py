"""The tensors of a GGUF file under the names of transformers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from swell.configs.files.bounded_files import open_regular
from swell.configs.files.gguf.header import identity_of, read_header
from swell.configs.files.gguf.tensor_names import Source, sources
from swell.kernels.weights.quantized import INTEGERS, Numbers, QuantizedTensor
from swell.worker.checkpoint.checkpoint import CUT_GROUP, DamagedCheckpoint, Index
from swell.worker.checkpoint.gguf.blocks import GROUPS, KEPT, dequantize, keep

PIECE_NUMBERS = 2**20
"""The most numbers that are dequantized at a time: in float32 they stay in a cache of the
processor."""


class GgufCheckpoint:
    """The tensors of one GGUF file, or of all parts of a split one."""

    def __init__(self, path: Path) -> None:
        """Raises `ValueError` for a file that cannot be served."""
        self._sources = _read_sources(path, identity_of(path))
        self._open: dict[Path, int] = {}

    @property
    def names(self) -> Collection[str]:
        return self._sources.keys()

    @property
    def notes(self) -> Sequence[str]:
        kinds = Counter(source.tensor.type.name for source in self._sources.values())
        read = ", ".join(f"{count} of type {kind}" for kind, count in kinds.most_common())
        return [f"tensors of a GGUF file: {read}"]

    def tensor(self, name: str) -> GgufTensor:
        return GgufTensor(self, name, self._sources[name])

    def read_bytes(self, path: Path, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Returns bytes of one of the files. Raises `ValueError`."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        try:
            if path not in self._open:
                self._open[path] = open_regular(path)
            while done < nbytes:
                count = os.preadv(self._open[path], [view[done:]], offset_bytes + done)
                if not count:
                    raise OSError("it became shorter after its header was read")
                done += count
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read: {error.strerror or error}; copy it there again"
            ) from None
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


@lru_cache(maxsize=2)
def _read_sources(path: Path, identity: tuple[str, ...]) -> Mapping[str, Source]:
    """Returns the tensors of a file. A worker opens the files of its model and of its draft model
    several times, and large vocabularies make headers slow to read."""
    return sources(read_header(path))


class GgufTensor:
    """One parameter of a model in a GGUF file."""

    def __init__(self, checkpoint: GgufCheckpoint, name: str, source: Source) -> None:
        self._checkpoint, self.name, self._source = checkpoint, name, source

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape

    @property
    def file(self) -> Path:
        return self._source.tensor.path

    @property
    def description(self) -> str:
        return f"tensor {self.name!r} in {str(self.file)!r} ({self._source.tensor.type.name})"

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        rows, *columns = _slices(index, self.shape)
        width = columns[0] if columns else slice(0, 1)
        out = torch.empty(rows.stop - rows.start, width.stop - width.start, dtype=dtype)
        kind = self._source.tensor.type
        first = width.start // kind.numbers * kind.numbers
        for piece in self._pieces(rows, width):
            numbers = dequantize(piece.blocks.flatten(0, 1), kind).view(len(piece.blocks), -1)
            if kind.name in GROUPS:
                self._refuse_unless_finite(numbers)
            numbers = self._in_order(numbers[:, width.start - first : width.stop - first])
            out[piece.to] = (numbers - self._source.added if self._source.added else numbers)[
                piece.own
            ]
        return out.view(
            [
                part.stop - part.start
                for part, own in zip((rows, *columns), index or (rows, *columns), strict=True)
                if not isinstance(own, int)
            ]
        )

    def read_quantized(
        self, index: Index, computed: Collection[Numbers] = INTEGERS
    ) -> QuantizedTensor | str:
        kind = self._source.tensor.type
        if kind.name not in KEPT or len(self.shape) != 2 or self._source.added:
            return f"stored as {kind.name}"
        bits, _, group = KEPT[kind.name]
        rows, width = _slices(index, self.shape)
        if width.start % group or width.stop % group:
            return CUT_GROUP
        first = width.start // kind.numbers * kind.numbers
        columns = slice(width.start - first, width.stop - first)
        groups = slice(columns.start // group, columns.stop // group)
        integers, scales, mins = [], [], []
        for piece in self._pieces(rows, width):

            def own(numbers: torch.Tensor, part: slice, piece: _Piece = piece) -> torch.Tensor:
                return self._in_order(numbers.view(len(piece.blocks), -1)[:, part])[piece.own]

            kept = keep(piece.blocks.flatten(0, 1), kind)
            integers.append(own(kept.integers, columns))
            scales.append(own(kept.scales, groups))
            if kept.mins is not None:
                mins.append(own(kept.mins, groups))
        for numbers in (*scales, *mins):
            self._refuse_unless_finite(numbers)
        return QuantizedTensor(
            torch.cat(integers), torch.cat(scales), torch.cat(mins) if mins else None, bits
        )

    def _refuse_unless_finite(self, numbers: torch.Tensor) -> None:
        """Raises `DamagedCheckpoint` for numbers of blocks whose scales are not finite."""
        if not bool(numbers.isfinite().all()):
            raise DamagedCheckpoint(
                f"{self.description} has a scale that is infinite or not a number; copy or "
                "download the file again"
            )

    def _pieces(self, rows: slice, columns: slice) -> Iterator[_Piece]:
        """Yields the blocks that have these columns of some rows at a time. With heads that are
        rotated, the rows are those of whole heads."""
        heads, kind = self._source.rotated_heads, self._source.tensor.type
        unit = self.shape[0] // heads if heads else 1
        length = self.shape[1] if len(self.shape) > 1 else 1
        row_bytes = length // kind.numbers * kind.nbytes
        used = slice(columns.start // kind.numbers, math.ceil(columns.stop / kind.numbers))
        step = max(1, PIECE_NUMBERS // (length * unit)) * unit
        for start in range(rows.start - rows.start % unit, rows.stop, step):
            stop = min(start + step, rows.stop + -rows.stop % unit)
            skipped = start + (self._source.expert or 0) * self.shape[0]
            data = self._checkpoint.read_bytes(
                self.file,
                self._source.tensor.offset_bytes + skipped * row_bytes,
                (stop - start) * row_bytes,
            )
            low, high = max(start, rows.start), min(stop, rows.stop)
            yield _Piece(
                data.view(stop - start, -1, kind.nbytes)[:, used],
                slice(low - start, high - start),
                slice(low - rows.start, high - rows.start),
            )

    def _in_order(self, found: torch.Tensor) -> torch.Tensor:
        """Returns the rows of whole heads in the order of transformers."""
        if not self._source.rotated_heads:
            return found
        half = self.shape[0] // self._source.rotated_heads // 2
        return found.reshape(-1, half, 2, found.shape[1]).transpose(1, 2).flatten(0, 2)


class _Piece(NamedTuple):
    """Some rows of a tensor."""

    blocks: torch.Tensor
    """[rows, blocks, bytes of a block] uint8"""
    own: slice
    """The rows that are read; the others complete their heads."""
    to: slice
    """The place of these rows in the result."""


def _slices(index: Index, shape: tuple[int, ...]) -> list[slice]:
    """Returns the part as slices with a start and a stop."""
    whole = index or tuple(slice(None) for _ in shape)
    return [
        slice(own, own + 1) if isinstance(own, int) else slice(*own.indices(length)[:2])
        for own, length in zip(whole, shape, strict=True)
    ]
