"""The folder with the small files of a GGUF file is written again if it is not complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swell.configs.files.gguf.unpacked import COMPLETE, remove_unused, unpacked
from swell.configs.section import ConfigError
from tests.support.deadlines import HANG_S
from tests.support.gguf.files import write_gguf
from tests.support.gguf.small import small_model


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


def unpack_elsewhere(file: Path, command: str) -> subprocess.Popen[str]:
    """Starts a process that unpacks a file, prints the folder, and runs `command`."""
    source = f"""
import sys, tempfile
import subprocess
import sys
from pathlib import Path
from swell.configs.files.gguf.unpacked import remove_unused, unpacked
tempfile.tempdir = {str(file.parent)!r}
print(unpacked(Path({str(file)!r})), flush=True)
{command}
"""
    return subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=HANG_S)
    assert not process.returncode


def test_a_folder_stays_while_a_process_uses_it(file: Path) -> None:
    processes = [unpack_elsewhere(file, "sys.stdin.readline()") for _ in range(2)]
    folders = {Path(process.stdout.readline().strip()) for process in processes if process.stdout}
    (folder,) = folders
    other = write_gguf(file.parent / "other.gguf", *small_model("qwen2"))
    for process in processes:
        end(unpack_elsewhere(other, "remove_unused()"))
        assert (folder / COMPLETE).exists()
        end(process)
    end(unpack_elsewhere(other, "remove_unused()"))
    assert not [*folder.parent.glob(f"{folder.name}*")]


def test_folders_of_killed_processes_are_removed(file: Path) -> None:
    process = unpack_elsewhere(file, "sys.stdin.readline()")
    assert process.stdout
    folder = Path(process.stdout.readline().strip())
    process.kill()
    process.communicate(timeout=HANG_S)
    assert folder.exists()
    end(unpack_elsewhere(write_gguf(file.parent / "n.gguf", *small_model("qwen2")), ""))
    assert not folder.exists()


def test_the_last_user_removes_its_folder(file: Path) -> None:
    end(unpack_elsewhere(file, "remove_unused()"))
    assert sorted(path.name for path in file.parent.glob("swell-gguf-*/*")) == ["gate"]


def test_other_folders_are_not_touched(file: Path) -> None:
    """Such as a folder that a version of Swell without this rule has made."""
    folder = unpacked(file)
    other = folder.parent / ("0" * 24)
    other.mkdir()
    remove_unused()
    assert other.exists() and not folder.exists()
    assert unpacked(file) == folder and (folder / COMPLETE).exists()
