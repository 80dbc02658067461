"""The tensors of a GGUF file under the names of transformers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from swell.configs.files.bounded_files import open_regular
from swell.configs.files.gguf.header import read_header
from swell.configs.files.gguf.tensor_names import Source, sources
from swell.worker.checkpoint.checkpoint import Index
from swell.worker.checkpoint.gguf.blocks import dequantize

PIECE_NUMBERS = 2**20
"""The most numbers that are dequantized at a time: in float32 they stay in a cache of the
processor."""


class GgufCheckpoint:
    """The tensors of one GGUF file, or of all parts of a split one."""

    def __init__(self, path: Path) -> None:
        """Raises `ValueError` for a file that cannot be served."""
        self._sources = sources(read_header(path))
        self._open: dict[Path, int] = {}

    @property
    def names(self) -> Collection[str]:
        return self._sources.keys()

    @property
    def notes(self) -> Sequence[str]:
        kinds = Counter(source.tensor.type.name for source in self._sources.values())
        read = ", ".join(f"{count} of type {kind}" for kind, count in kinds.most_common())
        return [f"tensors of a GGUF file are dequantized while they are read: {read}"]

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
        heads = self._source.rotated_heads
        unit = self.shape[0] // heads if heads else 1
        length = self.shape[1] if columns else 1
        step = max(1, PIECE_NUMBERS // (length * unit)) * unit
        first = rows.start - rows.start % unit
        for row in range(first, rows.stop, step):
            end = min(row + step, rows.stop + -rows.stop % unit)
            piece = self._rows(row, end, width)
            low, high = max(row, rows.start), min(end, rows.stop)
            out[low - rows.start : high - rows.start] = piece[low - row : high - row]
        return out.view(
            [
                part.stop - part.start
                for part, own in zip((rows, *columns), index or (rows, *columns), strict=True)
                if not isinstance(own, int)
            ]
        )

    def _rows(self, start: int, stop: int, columns: slice) -> torch.Tensor:
        """Returns columns of whole rows as float32, in the order of transformers. With heads that
        are rotated, the rows are those of whole heads."""
        tensor, kind = self._source.tensor, self._source.tensor.type
        length = self.shape[1] if len(self.shape) > 1 else 1
        row_bytes = length // kind.numbers * kind.nbytes
        skipped = start + (self._source.expert or 0) * self.shape[0]
        data = self._checkpoint.read_bytes(
            tensor.path, tensor.offset_bytes + skipped * row_bytes, (stop - start) * row_bytes
        )
        first, last = columns.start // kind.numbers, math.ceil(columns.stop / kind.numbers)
        blocks = data.view(stop - start, -1, kind.nbytes)[:, first:last]
        numbers = dequantize(blocks.reshape(-1, kind.nbytes), kind).view(stop - start, -1)
        skipped_columns = first * kind.numbers
        found = numbers[:, columns.start - skipped_columns : columns.stop - skipped_columns]
        if self._source.rotated_heads:
            half = self.shape[0] // self._source.rotated_heads // 2
            found = found.reshape(-1, half, 2, found.shape[1]).transpose(1, 2).flatten(0, 2)
        return found - self._source.added if self._source.added else found


def _slices(index: Index, shape: tuple[int, ...]) -> list[slice]:
    """Returns the part as slices with a start and a stop."""
    whole = index or tuple(slice(None) for _ in shape)
    return [
        slice(own, own + 1) if isinstance(own, int) else slice(*own.indices(length)[:2])
        for own, length in zip(whole, shape, strict=True)
    ]
