"""The folder with the small files of a GGUF file is written again if it is not complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.configs.files.gguf.unpacked import COMPLETE, unpacked
from swell.configs.section import ConfigError
from tests.support.gguf_files import write_gguf
from tests.support.gguf_small import small_model


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return write_gguf(tmp_path / "m.gguf", *small_model("llama"))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "7", '{"config.json": 1}', '{"../m.gguf": 0}', "{", "\x00" * 80, "[" * 10**5],
    ids=lambda value: value[:20],
)
def test_a_damaged_list_of_files_means_an_incomplete_folder(content: str, file: Path) -> None:
    """Such as an empty one, after a loss of power."""
    folder = unpacked(file)
    complete = (folder / COMPLETE).read_text()
    (folder / COMPLETE).write_text(content)
    (folder / "config.json").write_text("")
    assert unpacked(file) == folder
    assert (folder / COMPLETE).read_text() == complete
    assert (folder / "config.json").read_text().startswith("{")


def test_a_list_of_files_that_is_not_text_means_an_incomplete_folder(file: Path) -> None:
    folder = unpacked(file)
    complete = (folder / COMPLETE).read_text()
    (folder / COMPLETE).write_bytes(b"\xff\xfe\x80")
    assert unpacked(file) == folder and (folder / COMPLETE).read_text() == complete


def test_a_missing_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    metadata, tensors = small_model("llama")
    path = tmp_path / "m-00001-of-00003.gguf"
    write_gguf(path, {**metadata, "split.count": 3, "split.no": 0}, tensors)
    with pytest.raises(ConfigError, match=r"one of 3 parts, and 2 are missing, first 'm-00002"):
        unpacked(path)
