"""A GGUF file is read as it was written, and a damaged one is refused with one line that names the
file and the cause."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.configs.files.gguf.header import MAX_ENTRIES, MAX_ITEMS, GgufError, read_header
from tests.support.gguf.files import write_gguf

METADATA = {
    "general.architecture": "llama",
    "an.integer": 7,
    "a.negative": -3,
    "a.float": 0.5,
    "a.flag": True,
    "tokens": ["a", "", "▁é"],
    "numbers": [1, 2, 3],
    "scores": [0.5, -1.0],
}
TENSORS = {
    "token_embd.weight": ("F32", (3, 2), bytes(24)),
    "output.weight": ("Q8_0", (2, 64), bytes(136)),
    "norm": ("F16", (5,), bytes(10)),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", METADATA, TENSORS)


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as found:
        read_header(path)
    text = str(found.value)
    assert str(path.parent) in text and "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read_as_it_was_written(tmp_path: Path, version: int) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, version))
    assert header.metadata == METADATA
    assert header.tensors.keys() == TENSORS.keys()
    for name, (kind, shape, data) in TENSORS.items():
        tensor = header.tensors[name]
        assert (tensor.type.name, tensor.shape) == (kind, shape)
        content = tensor.path.read_bytes()
        assert content[tensor.offset_bytes :][: len(data)] == data
        assert tensor.offset_bytes % 32 == 0


def test_the_parts_of_a_split_model_are_read_by_the_first_one(tmp_path: Path) -> None:
    split = {"split.count": 3, "split.tensors.count": 3}
    paths = [tmp_path / f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for part, (path, (name, tensor)) in enumerate(zip(paths, TENSORS.items(), strict=True)):
        own = METADATA if part == 0 else {}
        write_gguf(path, {**own, **split, "split.no": part}, {name: tensor})
    header = read_header(paths[0])
    assert header.paths == tuple(paths)
    assert [tensor.path for tensor in header.tensors.values()] == paths
    assert header.metadata["tokens"] == METADATA["tokens"]
    assert f"specify the first of the parts, {paths[0]}" in refusal(paths[1])
    paths[2].unlink()
    assert f"1 are missing, first '{paths[2].name}'" in refusal(paths[0])
    renamed = paths[0].rename(tmp_path / "m.gguf")
    assert "restore the original names" in refusal(renamed)


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-{part:05}-of-00002.gguf" for part in (1, 2)]
    for part, path in enumerate(paths):
        write_gguf(path, {"split.count": 2, "split.no": part}, TENSORS)
    assert "both have the tensor 'norm'" in refusal(paths[0])
    write_gguf(paths[1], {"split.count": 2, "split.no": 1}, {"x": ("F32", (1,), bytes(4))})
    write_gguf(paths[0], {"split.count": 2, "split.no": 0, "split.tensors.count": 9}, TENSORS)
    assert "the 2 parts have 4 tensors, and the first one says 9" in refusal(paths[0])


def changed(path: Path, at: int, value: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def test_files_of_other_kinds_are_refused(tmp_path: Path, file: Path) -> None:
    assert "it is not a GGUF file" in refusal(changed(file, 0, b"GGML"))
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "it is not a GGUF file" in refusal(empty)
    assert "cannot be read" in refusal(tmp_path / "missing.gguf")
    assert "not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (1, "has version 1 of the format"),
        (9, "has version 9 of the format"),
        (0x03000000, "has version 3 in big-endian byte order"),
    ],
)
def test_other_versions_are_refused(file: Path, version: int, text: str) -> None:
    assert text in refusal(changed(file, 4, struct.pack("<I", version)))


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (8, 2**63, "tensors; the limit is"),
        (16, 2**40, "metadata entries; the limit is"),
        (24, 2**62, "header needs more than"),
        (24, 2**20, "header needs more than"),
    ],
)
def test_hostile_counts_and_lengths_are_refused(file: Path, at: int, value: int, text: str) -> None:
    assert text in refusal(changed(file, at, struct.pack("<Q", value)))


def test_hostile_arrays_are_refused(tmp_path: Path) -> None:
    """An array states its length before its items: nothing is allocated for it."""

    def file_with(value: bytes) -> Path:
        path = tmp_path / "m.gguf"
        start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
        path.write_bytes(start + value + bytes(64))
        return path

    def array(kind: int, count: int) -> bytes:
        return struct.pack("<IQ", kind, count)

    nine = struct.pack("<I", 9)
    assert "the limit is" in refusal(file_with(nine + array(4, 2**60)))
    assert "header needs more than" in refusal(file_with(nine + array(10, MAX_ITEMS)))
    assert "header needs more than" in refusal(file_with(nine + array(8, MAX_ITEMS)))
    assert "nested deeper than" in refusal(file_with(nine + array(9, 1) * 50))
    assert "unknown type 77" in refusal(file_with(struct.pack("<I", 77)))
    assert "unknown type 77" in refusal(file_with(nine + array(77, 1)))
    assert "not valid UTF-8" in refusal(
        file_with(nine + array(8, 1) + struct.pack("<Q", 2) + b"\xff\xfe")
    )
    assert "header needs more than" in refusal(
        file_with(nine + array(8, 2) + struct.pack("<Q", 2**63))
    )
    text = struct.pack("<IQ", 8, 2) + b"\xff\xfe"
    assert "not valid UTF-8" in refusal(file_with(text))


def test_the_items_of_all_arrays_have_a_common_limit(tmp_path: Path) -> None:
    """An item of one byte in a file needs some 36 bytes in memory."""
    half = struct.pack("<IIQ", 9, 1, MAX_ITEMS // 2) + bytes(MAX_ITEMS // 2)
    path = write_gguf(tmp_path / "m.gguf", {"a": half, "b": half}, {})
    assert len(read_header(path).metadata["b"]) == MAX_ITEMS // 2
    write_gguf(path, {"a": half, "b": half, "c": [1]}, {})
    assert f"more than {MAX_ITEMS} items in its arrays, up to 'c'" in refusal(path)
    empty = struct.pack("<IIQ", 9, 9, MAX_ITEMS // 2) + struct.pack("<IQ", 4, 0) * 10
    assert f"more than {MAX_ITEMS} items" in refusal(
        write_gguf(path, {"a": half, "b": [1], "c": empty}, {})
    )


def test_the_tensors_of_all_parts_have_a_common_limit(tmp_path: Path) -> None:
    count = MAX_ENTRIES // 2 + 1
    paths = [tmp_path / f"m-{part:05}-of-00002.gguf" for part in (1, 2)]
    for part, path in enumerate(paths):
        tensors = {f"{part} {number}": ("F32", (1,), b"") for number in range(count)}
        write_gguf(path, {"split.count": 2, "split.no": part}, tensors)
        with path.open("ab") as file:
            file.write(bytes(64))
    assert f"more than {MAX_ENTRIES} tensors" in refusal(paths[0])


def test_long_names_are_refused_in_a_short_line(tmp_path: Path) -> None:
    long = "x\n" * 10**5
    path = write_gguf(tmp_path / "m.gguf", {long: struct.pack("<IQ", 8, 2) + b"\xff\xfe"}, {})
    assert "is not valid UTF-8" in refusal(path)
    write_gguf(path, {}, {long: ("F32", (64, 64), b"")})
    assert "ends at byte" in refusal(path)


def test_a_repeated_name_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a": 1, "b": 2}, {})
    assert "'a' twice" in refusal(changed(path, path.read_bytes().index(b"b"), b"a"))
    tensors = {name: ("F32", (1,), bytes(4)) for name in ("p", "q")}
    write_gguf(path, {}, tensors)
    assert "tensor 'p' twice" in refusal(changed(path, path.read_bytes().index(b"q"), b"p"))


@pytest.mark.parametrize(
    ("kind", "shape", "text"),
    [
        ("F32", (2, 2, 2, 2, 2), "has 5 dimensions"),
        ("Q8_0", (2, 33), "not whole blocks of 32 numbers (Q8_0)"),
        ("F32", (0, 2), "has the shape [0, 2]"),
        ("F32", (2**40, 2**40), "ends at byte"),
        ("F32", (64, 64), "ends at byte"),
    ],
)
def test_tensors_outside_the_file_are_refused(
    tmp_path: Path, kind: str, shape: tuple[int, ...], text: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"x": (kind, shape, bytes(16))})
    assert text in refusal(path) and "'x'" in refusal(path)


def test_an_offset_outside_the_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"x": ("F32", (1,), bytes(4))})
    at = path.read_bytes().index(b"x") + 1 + 4 + 8 + 4
    assert "ends at byte" in refusal(changed(path, at, struct.pack("<Q", 2**63)))


@pytest.mark.parametrize(
    ("number", "name"), [(16, "IQ2_XXS"), (23, "IQ4_XS"), (39, "MXFP4"), (34, "TQ1_0"), (99, "99")]
)
def test_types_that_are_not_read_are_refused_by_name(
    tmp_path: Path, number: int, name: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"x": ("F32", (1,), bytes(4))})
    at = path.read_bytes().index(b"x") + 1 + 4 + 8
    text = refusal(changed(path, at, struct.pack("<I", number)))
    assert f"tensor 'x' has the type {name}" in text and "Q4_K" in text


@pytest.mark.parametrize("value", [0, 3, 2**20, "x"])
def test_a_wrong_alignment_is_refused(tmp_path: Path, value: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": value}, {})
    assert "general.alignment" in refusal(path)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    data = file.read_bytes().rstrip(b"\0")
    file.write_bytes(data[: int(len(data) * share)])
    refusal(file)


@given(st.data())
def test_a_changed_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write_gguf(tmp_path_factory.mktemp("file") / "m.gguf", METADATA, TENSORS)
    size = len(path.read_bytes())
    at = data.draw(st.integers(0, size - 1))
    changed(path, at, bytes([data.draw(st.integers(0, 255))]))
    try:
        header = read_header(path)
    except GgufError:
        return
    for tensor in header.tensors.values():
        numbers = 1
        for length in tensor.shape:
            numbers *= length
        assert tensor.offset_bytes + numbers // tensor.type.numbers * tensor.type.nbytes <= size


def test_a_large_vocabulary_is_read_within_seconds(tmp_path: Path) -> None:
    """In CPU time, with a limit that is some ten times what it takes."""
    tokens = [f"token {number}" for number in range(262_144)]
    path = write_gguf(tmp_path / "m.gguf", {"tokens": tokens}, {})
    start_s = time.process_time()
    assert read_header(path).metadata["tokens"] == tokens
    assert time.process_time() - start_s < 5
