"""An account without a writable home directory serves like any other."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swell.cluster.cli.start import private_home
from swell.cluster.cli.start.private_home import (
    check_temporary_files,
    home_problem,
    use_private_files,
)

NOBODY = 54_321
"""A user id without a name or a home directory."""
PROGRAM = """
import getpass, os, sys
from pathlib import Path
from swell.cluster.cli.start.private_home import use_private_files
lines = []
use_private_files(Path(sys.argv[1]), lines.append)
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
os.environ["RAY_AUTH_MODE"] = "token"
ensure_token_if_auth_enabled()
print(getpass.getuser(), Path.home(), os.environ["RAY_AUTH_TOKEN_PATH"], os.environ["SWELL_CACHE"])
print(*lines, sep="\\n")
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    kept = {"PATH": os.environ["PATH"], "USER": "somebody"}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def no_home(folder: Path) -> str:
    """Returns a path below a regular file, where even root cannot write."""
    (folder / "file").write_text("")
    return str(folder / "file" / "home")


def test_a_home_that_can_be_written_is_used(environment: dict[str, str], tmp_path: Path) -> None:
    environment["HOME"] = str(tmp_path)
    before, lines = dict(environment), list[str]()
    use_private_files(tmp_path, lines.append)
    assert environment == before and lines == [] and home_problem() is None


def test_without_a_home_everything_is_in_the_folder_of_the_start(
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


def test_what_the_user_has_set_stays(environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"HOME": no_home(tmp_path), "SWELL_CACHE": "/kept", "RAY_AUTH_MODE": "disabled"}
    lines = list[str]()
    use_private_files(tmp_path, lines.append)
    assert environment["SWELL_CACHE"] == "/kept" and "RAY_AUTH_TOKEN_PATH" not in environment
    assert "compiled kernels" not in lines[0]


def test_nothing_can_be_written_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_home, "write_problem", lambda folder: f"{folder} is full")
    with pytest.raises(OSError, match="/tmp is full; Ray keeps its sockets there"):
        check_temporary_files()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_id_without_a_name(tmp_path: Path) -> None:
    """OpenShift assigns such a user id to each project. Ray still finds its token."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed")
    folder = Path("/tmp", f"swell-test-{os.getpid()}")  # NOBODY cannot enter pytest's own
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    become = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    command = [*become, sys.executable, "-c", PROGRAM, str(folder)]
    try:
        done = subprocess.run(
            command,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        shutil.rmtree(folder)
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("this checkout cannot be read by other users")
    assert done.returncode == 0, done.stderr
    first, line = done.stdout.splitlines()
    user, *paths = first.split()
    assert user == f"uid-{NOBODY}" and all(path.startswith(str(folder)) for path in paths)
    assert "this account has no home" in line


def test_a_user_with_a_name_keeps_it(environment: dict[str, str], tmp_path: Path) -> None:
    environment["HOME"] = no_home(tmp_path)
    use_private_files(tmp_path, list[str]().append)
    assert getpass.getuser() == "somebody"
