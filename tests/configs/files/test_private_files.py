"""A folder that others could have created or filled is not used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swell.configs.files.private_files import enter_folder, open_file

ANOTHER = 65_534


def test_created_files_are_private_to_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with enter_folder(path, make=True) as folder:
        assert path.stat().st_mode & 0o777 == 0o700
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=folder))
        with open_file(folder, "file") as file:
            assert file.read() == b""
    assert os.listdir(path) == ["file"]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_in_which_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"{mode & 0o777:o}.*chmod 700"), enter_folder(path):
        pass


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for make in (False, True):
        with pytest.raises(OSError), enter_folder(tmp_path / "link", make=make):
            pass


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    tmp_path.chmod(0o700)
    with enter_folder(tmp_path) as folder:
        for name in ("link", "fifo", "folder", "none"):
            with pytest.raises(OSError), open_file(folder, name):
                pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_another_account_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir(mode=0o700)
    (path / "forged").write_text("a")
    os.chown(path / "forged", ANOTHER, ANOTHER)
    with (
        enter_folder(path) as folder,
        pytest.raises(PermissionError, match=str(ANOTHER)),
        open_file(folder, "forged"),
    ):
        pass
    os.chown(path, ANOTHER, ANOTHER)
    with pytest.raises(PermissionError, match=str(ANOTHER)), enter_folder(path, make=True):
        pass
    assert os.listdir(path) == ["forged"]
