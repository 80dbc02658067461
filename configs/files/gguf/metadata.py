"""Typed access to the metadata of one architecture."""

from __future__ import annotations

import os
import struct
from typing import Any

from swell.configs.files.bounded_files import open_regular
from swell.configs.files.gguf.header import GgufError, GgufFile, shown

MAX_FLOATS = 2**16
"""Limit for a tensor of rope factors: one for each pair of a head's dimensions."""
MAX_NUMBER = 1e38
"""Limit for a number, below the largest float of 32 bits."""


class Metadata:
    """The entries `ARCHITECTURE.KEY` of a file."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        """Whether the file states the entry."""
        return f"{self.architecture}.{key}" in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer. An array with one value for each layer must repeat one value.
        Raises GgufError."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            if len(set(value)) > 1:
                raise GgufError(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers, which "
                    "is not supported; serve a model whose layers are alike"
                )
            value = value[0]
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number. Raises GgufError, also for one that a 32-bit float does not
        hold."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self._wrong(key, value, "a positive number")
        return _shortest(float(value))

    def refuse_unless(self, key: str, neutral: float | bool) -> None:
        """Raises GgufError if the file states another value than `neutral`: it would change the
        answers, and is not supported."""
        value = self._get(key, neutral)
        if value != neutral:
            raise GgufError(
                f"{self.file.path}: {self.architecture}.{key}={shown(value)} is not supported "
                f"(supported is {neutral}); serve the folder from which the file was made"
            )

    def text(self, key: str, default: str) -> str:
        """Returns a string. Raises GgufError."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def floats(self, name: str) -> list[float]:
        """Returns the positive numbers of a small tensor of type F32. Raises GgufError."""
        tensor = self.file.tensors[name]
        (count,) = tensor.shape if len(tensor.shape) == 1 else (0,)
        if tensor.type.name != "F32" or not 0 < count <= MAX_FLOATS:
            raise GgufError(
                f"{self.file.path} is damaged: tensor {name!r} has the type {tensor.type.name} and "
                f"the shape {list(tensor.shape)}, not a list of at most {MAX_FLOATS} F32 numbers"
            )
        try:
            descriptor = open_regular(tensor.path)
            try:
                data = os.pread(descriptor, 4 * count, tensor.offset_bytes)
            finally:
                os.close(descriptor)
            numbers = struct.unpack(f"<{count}f", data)
        except (OSError, struct.error) as error:
            raise GgufError(f"{tensor.path} cannot be read: {error}") from None
        for number in numbers:
            if not 0 < number < MAX_NUMBER:
                raise GgufError(
                    f"{tensor.path} is damaged: tensor {name!r} has the number {number}, which is "
                    "not a positive one; copy it there again"
                )
        return [_shortest(number) for number in numbers]

    def _get(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise GgufError(
                f"{self.file.path} lacks the metadata entry {self.architecture}.{key}; convert "
                "the model again with a recent version of llama.cpp"
            )
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> GgufError:
        return GgufError(
            f"{self.file.path} is damaged: {self.architecture}.{key}={shown(value)} is not "
            f"{expected}"
        )


def _shortest(number: float) -> float:
    """Returns the number with the fewest digits among those that a 32-bit float rounds to `number`:
    the file has 9.999999974752427e-07 for 1e-06."""
    for digits in range(1, 10):
        rounded = float(f"{number:.{digits}g}")
        if struct.pack("<f", rounded) == struct.pack("<f", number):
            return rounded
    return number
