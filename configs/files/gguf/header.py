"""Reads the header of a GGUF file: its metadata, and where its tensors are.

    "GGUF", version, number of tensors, number of metadata entries
    metadata entries          name, type, value
    descriptions of tensors   name, dimensions, type, offset
    padding, then the tensors' bytes

A large model is split into files `NAME-00001-of-00003.gguf`; the first one has the metadata. The
file may come from anywhere: every count, length and offset is checked against a limit and against
the size of the file before it is used.
"""

from __future__ import annotations

import os
import re
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swell.configs.files.bounded_files import open_regular
from swell.configs.files.gguf.block_types import BLOCK_TYPES, UNREAD, BlockType
from swell.configs.section import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 * 2**20
"""The header of a vocabulary of 262 144 tokens has 15 MB."""
MAX_ENTRIES = 2**16
"""Limit for the metadata entries of one file, and for the tensors of all parts."""
MAX_ITEMS = 2**22
"""Limit for the items of all arrays of a file. The largest vocabularies have some 1 300 000: the
tokens, their types and scores, and the merges."""
MAX_DEPTH = 2
"""Limit for arrays in arrays."""
MAX_DIMENSIONS = 4
MAX_PARTS = 1000
MAX_ALIGNMENT = 2**16
_READ_BYTES = 2**24

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_FORMATS |= {10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> its format in `struct`, for numbers."""
_STRING, _ARRAY = 8, 9

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufError(ConfigError):
    """A GGUF file that cannot be served. One line: the file, the cause, what to do."""


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80


_SHORT_REPR = _ShortRepr()


def shown(value: Any) -> str:
    """Returns a value of a file for a message, as one short line."""
    return _SHORT_REPR.repr(value)


class Tensor(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]
    """The number of rows before the length of a row: the reverse of the order in the file."""
    offset_bytes: int
    """From the beginning of the file."""


class GgufFile(NamedTuple):
    """The header of a file, or of all files of a split model."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    paths: tuple[Path, ...]


def read_header(path: Path) -> GgufFile:
    """Reads the header of a file, and those of the other files of a split model. Raises
    GgufError."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    paths = _checked_parts(path, count, first.metadata.get("split.no"))
    tensors = dict(first.tensors)
    for part_path in paths[1:]:
        part = _read_part(part_path)
        if repeated := tensors.keys() & part.tensors.keys():
            raise GgufError(
                f"{part_path} and an earlier part both have the tensor {shown(min(repeated))}; "
                "copy the parts of one model there again"
            )
        tensors.update(part.tensors)
        if len(tensors) > MAX_ENTRIES:
            raise GgufError(
                f"{path} is damaged: its parts have more than {MAX_ENTRIES} tensors, the limit; "
                "copy the parts of one model there again"
            )
    expected = first.metadata.get("split.tensors.count")
    if isinstance(expected, int) and expected != len(tensors):
        raise GgufError(
            f"{path}: the {count} parts have {len(tensors)} tensors, and the first one says "
            f"{expected}; copy the parts of one model there again"
        )
    return first._replace(tensors=tensors, paths=tuple(paths))


def part_paths(path: Path) -> list[Path]:
    """Returns the files of a model by the name of its first one, whether they exist or not."""
    name = _PART.search(path.name)
    if name is None or not 0 < int(name[2]) <= MAX_PARTS:
        return [path]
    stem = path.name[: name.start()]
    return [path.with_name(f"{stem}-{k:05}-of-{name[2]}.gguf") for k in range(1, int(name[2]) + 1)]


def existing_parts(path: Path) -> list[Path]:
    """Returns the files of a model by the name of its first one. Raises GgufError if some are
    missing."""
    paths = part_paths(path)
    if missing := [part for part in paths if not part.is_file()]:
        raise GgufError(
            f"{path} is one of {len(paths)} parts, and {len(missing)} are missing, first "
            f"{missing[0].name!r}; copy them into the same folder"
        )
    return paths


def identity_of(path: Path) -> tuple[str, ...]:
    """Returns a text for each file of a model, which differs when the file has changed: its path,
    inode, size and the time of its last change. Raises GgufError."""
    found = ((part, part.stat()) for part in existing_parts(path))
    return tuple(
        f"{part.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}" for part, stat in found
    )


def _checked_parts(path: Path, count: int, number: Any) -> list[Path]:
    paths = part_paths(path)
    if len(paths) != count:
        raise GgufError(
            f"{path} is one of {count} parts, and its name does not end with "
            f"-00001-of-{count:05}.gguf (at most {MAX_PARTS} parts); restore the original names"
        )
    if number != 0 or path != paths[0]:
        raise GgufError(f"{path} is a part of a model; specify the first of the parts, {paths[0]}")
    return existing_parts(path)


def _read_part(path: Path) -> GgufFile:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return _Reader(path, descriptor).read()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror or error}") from None
    finally:
        os.close(descriptor)


class _Reader:
    """Reads one file from its beginning."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self.buffer = bytearray()
        self.items = 0
        """The items of all arrays so far."""
        self.at = 0
        """The next byte to read: an index of `buffer`, which begins with the file."""

    def read(self) -> GgufFile:
        if self.size_bytes < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise GgufError(
                f"{self.path} does not begin with {MAGIC.decode()!r}: it is not a GGUF file, or "
                "the download is incomplete; copy it there again"
            )
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = " in big-endian byte order" if swapped in VERSIONS else ""
            raise GgufError(
                f"{self.path} has version {swapped if order else version}{order} of the format; "
                "supported are versions 2 and 3, little-endian: convert the model again"
            )
        tensors = self._count("tensors", MAX_ENTRIES)
        entries = self._count("metadata entries", MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._string("names")
            if name in metadata:
                raise self._damaged(f"it has the metadata entry {shown(name)} twice")
            metadata[name] = self._value(self._number("I"), name, 0)
        return GgufFile(self.path, metadata, self._tensors(tensors, metadata), (self.path,))

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        described: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._string("names")
            if name in described:
                raise self._damaged(f"it has the tensor {shown(name)} twice")
            dimensions = self._number("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._damaged(f"tensor {shown(name)} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            kind = self._type(name, self._number("I"))
            described[name] = kind, shape, self._number("Q")
        alignment = metadata.get("general.alignment", 32)
        powers = {2**power for power in range(MAX_ALIGNMENT.bit_length())}
        if type(alignment) is not int or alignment not in powers:
            raise self._damaged(f"general.alignment={shown(alignment)} is not a power of two")
        start = -(-self.at // alignment) * alignment
        return {name: self._tensor(name, start, *found) for name, found in described.items()}

    def _type(self, name: str, number: int) -> BlockType:
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise GgufError(
                f"{self.path}: tensor {shown(name)} has the type {UNREAD.get(number, number)}, "
                f"which is not supported (supported are {known}); specify a file in another "
                "quantization, such as Q4_K_M or Q8_0"
            )
        return kind

    def _tensor(
        self, name: str, start: int, kind: BlockType, shape: tuple[int, ...], offset: int
    ) -> Tensor:
        numbers = 1
        for length in shape:
            numbers *= length
        if numbers < 1 or shape[-1] % kind.numbers:
            raise self._damaged(
                f"tensor {shown(name)} has the shape {list(shape)}, whose rows are not whole "
                f"blocks of {kind.numbers} numbers ({kind.name})"
            )
        end = start + offset + numbers // kind.numbers * kind.nbytes
        if end > self.size_bytes:
            raise self._damaged(
                f"tensor {shown(name)} ends at byte {end}, and the file has {self.size_bytes} bytes"
            )
        return Tensor(self.path, kind, shape, start + offset)

    def _value(self, kind: int, name: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(name)
        if kind == _ARRAY:
            return self._array(name, depth)
        if kind not in _FORMATS:
            raise self._damaged(f"metadata entry {shown(name)} has the unknown type {kind}")
        return self._number(_FORMATS[kind])

    def _array(self, name: str, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise self._damaged(
                f"metadata entry {shown(name)} is nested deeper than {MAX_DEPTH} arrays"
            )
        kind = self._number("I")
        count = self._count(f"items in {shown(name)}", MAX_ITEMS)
        self.items += count
        if self.items > MAX_ITEMS:
            raise self._damaged(
                f"it has more than {MAX_ITEMS} items in its arrays, up to {shown(name)}"
            )
        if kind in _FORMATS:
            form = struct.Struct(f"<{count}{_FORMATS[kind]}")
            return list(form.unpack(self._take(form.size)))
        if kind == _STRING:
            return self._strings(name, count)
        return [self._value(kind, name, depth + 1) for _ in range(count)]

    def _strings(self, name: str, count: int) -> list[str]:
        """Reads many strings, in one loop: a vocabulary has some 500 000 of them."""
        buffer, at, found = self.buffer, self.at, []
        try:
            for _ in range(count):
                start = at + 8
                if start > len(buffer):
                    self._fill(start)
                end = start + int.from_bytes(buffer[at:start], "little")
                if end > len(buffer):
                    self._fill(end)
                found.append(buffer[start:end].decode())
                at = end
        except UnicodeDecodeError:
            raise self._damaged(f"the text of {shown(name)} is not valid UTF-8") from None
        self.at = at
        return found

    def _string(self, name: str) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the text of {shown(name)} is not valid UTF-8") from None

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("Q")
        if count > limit:
            raise self._damaged(f"it states {count} {what}; the limit is {limit}")
        return count

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.buffer):
            self._fill(end)
        taken = bytes(self.buffer[self.at : end])
        self.at = end
        return taken

    def _fill(self, end: int) -> None:
        """Reads the file up to byte `end`, and some more."""
        if end > min(self.size_bytes, MAX_HEADER_BYTES):
            limit = f"{MAX_HEADER_BYTES} bytes, the limit"
            have = f"{self.size_bytes} bytes, its size" if end > self.size_bytes else limit
            raise self._damaged(f"its header needs more than {have}")
        while end > len(self.buffer):
            more = os.pread(self.descriptor, _READ_BYTES, len(self.buffer))
            if not more:
                raise self._damaged("it became shorter while it was read")
            self.buffer += more

    def _damaged(self, why: str) -> GgufError:
        return GgufError(
            f"{self.path} is damaged: {why}; the download may be incomplete: copy it there again"
        )
