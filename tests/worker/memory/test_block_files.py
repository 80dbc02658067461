"""Block files are complete or absent, readable by one reader only, and limited in total size."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swell.configs.schema import CacheConfig, load
from swell.engine.kv.handover_files import make_claim
from swell.worker.memory import block_files
from swell.worker.memory.block_files import MAX_AGE_S, BlockFiles
from swell.worker.wire import CLAIMED, HANDOVER_FOLDER, BlockFile

NAME, BLOCKS = "ab" * 16, 10


def caches(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns the caches of layers whose blocks have several shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BLOCKS, 4, 2, 8), (BLOCKS, 4, 2, 8), (BLOCKS, 3)]
    return [torch.rand(shape, generator=generator).to(dtype) for shape in shapes]


def files(cache: list[torch.Tensor], folder: Path, rank: int = 0, limit: int = 10**6) -> BlockFiles:
    config = CacheConfig(handover_folder=str(folder), handover_bytes=limit)
    return BlockFiles(cache, config, rank)


def claim(folder: Path, rank: int = 0) -> None:
    path = folder / HANDOVER_FOLDER / f"{NAME}.{rank}"
    path.rename(path.with_name(path.name + CLAIMED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    source, target = caches(1, dtype), caches(2, dtype)
    before = [each.clone() for each in target]
    files(source, tmp_path).write(BlockFile(NAME, [0, 1, 2, 3], [7, 2, 9, 0]))
    claim(tmp_path)
    files(target, tmp_path).read(BlockFile(NAME, [3, 1], [4, 8]))
    for of, to, old in zip(source, target, before, strict=True):
        assert torch.equal(to[4], of[0]) and torch.equal(to[8], of[2])
        others = [0, 1, 2, 3, 5, 6, 7, 9]
        assert torch.equal(to[others], old[others])
    assert not os.listdir(tmp_path / HANDOVER_FOLDER)


def test_a_claimed_file_that_is_not_needed_is_removed(tmp_path: Path) -> None:
    files(caches(1), tmp_path).write(BlockFile(NAME, [0], [7]))
    claim(tmp_path)
    files(caches(2), tmp_path).read(BlockFile(NAME, [], []))
    assert not os.listdir(tmp_path / HANDOVER_FOLDER)


def test_a_stage_without_a_cache_has_an_empty_file(tmp_path: Path) -> None:
    files([], tmp_path).write(BlockFile(NAME, [0], [7]))
    claim(tmp_path)
    files([], tmp_path).read(BlockFile(NAME, [0], [3]))
    assert not os.listdir(tmp_path / HANDOVER_FOLDER)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    files(caches(1), tmp_path).write(BlockFile(NAME, [0, 1], [7, 8]))
    claim(tmp_path)
    path = tmp_path / HANDOVER_FOLDER / f"{NAME}.0{CLAIMED}"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(OSError, match="expected at least 2 blocks"):
        files(caches(2), tmp_path).read(BlockFile(NAME, [0, 1], [1, 2]))


def test_other_users_may_not_read_block_files(tmp_path: Path) -> None:
    files(caches(1), tmp_path).write(BlockFile(NAME, [0], [7]))
    folder = tmp_path / HANDOVER_FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{NAME}.0").stat().st_mode & 0o777 == 0o600


def test_block_files_never_exceed_the_size_limit(tmp_path: Path) -> None:
    """The files never exceed the byte limit; each file has 524 bytes: 2 x 64 numbers and 3."""
    writer = files(caches(1), tmp_path, limit=2 * 524)
    for number in range(4):
        writer.write(BlockFile(f"{number:032x}", [0], [7]))
    files(caches(1), tmp_path, rank=1, limit=2 * 524).write(BlockFile(NAME, [0], [7]))
    found = sorted(os.listdir(tmp_path / HANDOVER_FOLDER))
    assert found == [f"{0:032x}.0", f"{1:032x}.0", f"{NAME}.1"]


def test_unread_files_are_removed(tmp_path: Path) -> None:
    writer = files(caches(1), tmp_path)
    writer.write(BlockFile(NAME, [0], [7]))
    claim(tmp_path)
    old_s = time.time() - MAX_AGE_S - 1
    (tmp_path / HANDOVER_FOLDER / f".{NAME}.0.123").write_bytes(b"half")
    for name in os.listdir(tmp_path / HANDOVER_FOLDER):
        os.utime(tmp_path / HANDOVER_FOLDER / name, (old_s, old_s))
    writer.write(BlockFile("cd" * 16, [0], [7]))
    assert os.listdir(tmp_path / HANDOVER_FOLDER) == ["cd" * 16 + ".0"]


def test_a_write_error_is_ignored(tmp_path: Path) -> None:
    (tmp_path / HANDOVER_FOLDER).write_text("no folder")
    files(caches(1), tmp_path).write(BlockFile(NAME, [0], [7]))


def test_files_of_others_are_never_removed(tmp_path: Path) -> None:
    """No other file or folder is removed, however old it is."""
    others = [
        tmp_path / "model.safetensors",
        tmp_path / f"{NAME}.0",
        tmp_path / HANDOVER_FOLDER / "notes.txt",
        tmp_path / HANDOVER_FOLDER / "lost+found",
    ]
    (tmp_path / HANDOVER_FOLDER / "lost+found").mkdir(parents=True)
    for other in others[:3]:
        other.write_text("a")
    for other in others:
        os.utime(other, (0, 0))
    files(caches(1), tmp_path).write(BlockFile(NAME, [0], [7]))
    assert all(other.exists() for other in others)
    assert (tmp_path / HANDOVER_FOLDER / f"{NAME}.0").exists()


@pytest.mark.parametrize("room", [0, 3 * 4, 500, 524 * 3 - 4])
def test_a_full_disk_leaves_no_file(tmp_path: Path, room: int) -> None:
    """A full disk leaves no file, also if it is full only for a moment: the next cache would be
    written after a gap."""
    writer = files(caches(1), tmp_path)
    left = [room]

    def write(out: Any, data: memoryview) -> None:
        if len(data) > left[0]:
            out.write(data[: left[0]])
            left[0] = 10**6  # the disk has room again
            raise OSError(28, "No space left on device")
        left[0] -= len(data)
        out.write(data)

    with patch.object(block_files, "_write_all", write):
        writer.write(BlockFile(NAME, [0, 1, 2], [7, 8, 9]))
    assert not os.listdir(tmp_path / HANDOVER_FOLDER)


def test_a_real_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as out, pytest.raises(OSError, match="No space"):
        block_files._write_all(out, memoryview(b"abc"))


def test_more_blocks_than_the_staging_buffer_are_copied(tmp_path: Path) -> None:
    with patch.object(block_files, "_STAGED_BLOCKS", 3):
        source, target = caches(1), caches(2)
        files(source, tmp_path).write(BlockFile(NAME, [*range(8)], [*range(8)]))
        claim(tmp_path)
        files(target, tmp_path).read(BlockFile(NAME, [7, 6, 5, 4, 3, 2, 1, 0], [*range(1, 9)]))
        for of, to in zip(source, target, strict=True):
            assert torch.equal(to[1:9], of[:8].flip(0))


def handed_over(tmp_path: Path) -> bool:
    """Whether one engine continues with a file that another one has written."""
    config = load(
        {"model": {"path": "m"}},
        {"cache.handover_folder": str(tmp_path), "parallel.data": 1},
    )
    source, target = caches(1), caches(2)
    files(source, tmp_path).write(BlockFile(NAME, [0], [7]))
    if not make_claim(config)(NAME):
        return False
    files(target, tmp_path).read(BlockFile(NAME, [0], [4]))
    return bool(torch.equal(target[0][4], source[0][7]))


def test_folders_writable_by_others_are_not_used(tmp_path: Path) -> None:
    assert handed_over(tmp_path)
    folder = tmp_path / HANDOVER_FOLDER
    folder.chmod(0o777)
    assert not handed_over(tmp_path)
    assert not os.listdir(folder)
    folder.rmdir()
    (tmp_path / "other").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "other")
    assert not handed_over(tmp_path)
    assert not os.listdir(tmp_path / "other")


def test_links_in_place_of_files_are_neither_written_nor_claimed(tmp_path: Path) -> None:
    """Links in the place of files are neither written nor claimed. Another account that owned the
    folder before could have created them."""
    folder = tmp_path / HANDOVER_FOLDER
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_bytes(b"a")
    (folder / f".{NAME}.0.{os.getpid()}").symlink_to(victim)
    assert not handed_over(tmp_path)
    assert victim.read_bytes() == b"a"
    (folder / f"{NAME}.0").symlink_to(victim)
    assert not handed_over(tmp_path)
    (folder / f"{NAME}.0").unlink()
    (folder / f"{NAME}.0{CLAIMED}").symlink_to(victim)
    with pytest.raises(OSError):
        files(caches(2), tmp_path).read(BlockFile(NAME, [0], [4]))
