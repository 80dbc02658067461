"""An account without a writable home directory serves like any other."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from swell.cluster.cli.start import private_home
from swell.cluster.cli.start.private_home import (
    check_temporary_files,
    home_problem,
    use_private_files,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    kept = {"PATH": os.environ["PATH"], "USER": "somebody"}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def no_home(folder: Path) -> str:
    """Returns a path below a regular file, where even root cannot write."""
    (folder / "file").write_text("")
    return str(folder / "file" / "home")


def test_a_writable_home_is_used(environment: dict[str, str], tmp_path: Path) -> None:
    environment["HOME"] = str(tmp_path)
    before, lines = dict(environment), list[str]()
    use_private_files(tmp_path, lines.append)
    assert environment == before and lines == [] and home_problem() is None


def test_without_a_home_everything_is_in_the_start_folder(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["HOME"] = no_home(tmp_path)
    folder, lines = tmp_path / "start", list[str]()
    folder.mkdir(mode=0o700)
    use_private_files(folder, lines.append)
    (line,) = lines
    assert "cannot be written" in line and "SWELL_CACHE" in line
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert token.parent == folder and token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    paths = [environment[name] for name in (*private_home._CACHES, "HOME")]
    assert all(Path(path).parent == folder for path in paths)


def test_settings_of_the_user_are_kept(environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"HOME": no_home(tmp_path), "SWELL_CACHE": "/kept", "RAY_AUTH_MODE": "disabled"}
    lines = list[str]()
    use_private_files(tmp_path, lines.append)
    assert environment["SWELL_CACHE"] == "/kept" and "RAY_AUTH_TOKEN_PATH" not in environment
    assert "compiled kernels" not in lines[0]


def test_a_system_without_writable_folders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_home, "write_problem", lambda folder: f"{folder} is full")
    with pytest.raises(OSError, match="/tmp is full; Ray keeps its sockets there"):
        check_temporary_files()


def test_a_user_with_a_name_keeps_that_name(environment: dict[str, str], tmp_path: Path) -> None:
    environment["HOME"] = no_home(tmp_path)
    use_private_files(tmp_path, list[str]().append)
    assert getpass.getuser() == "somebody"
