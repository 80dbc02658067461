"""The next `swell serve` removes the folders that a killed one left in `/tmp`, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster.cli import launch
from swell.cluster.cli.session_folder import remove_abandoned, session_folder
from tests.support.deadlines import HANG_S

OWNER = """
import sys
from pathlib import Path
from swell.cluster.cli.session_folder import session_folder
with session_folder(parent=Path(sys.argv[1])) as folder:
    Path(folder, "session_1").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yields a process that owns a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_killed_process_is_removed_and_no_other(
    tmp_path: Path, owner: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = owner
    others = [tmp_path / name for name in ("swell-being-made", "swell", "other-1")]
    for other in others:
        other.mkdir()
    (tmp_path / "swell-link").symlink_to(folder)
    with session_folder(parent=tmp_path) as own:
        assert remove_abandoned(tmp_path) == [] and folder.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
        assert remove_abandoned(tmp_path) == [folder]
        assert Path(own).exists()
    assert not folder.exists() and not Path(own).exists()
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("how", ["argument", "open file"])
def test_a_folder_in_use_is_not_removed(
    tmp_path: Path, owner: tuple[subprocess.Popen[str], Path], how: str
) -> None:
    """Ray's processes use the folder until they notice that its owner is gone."""
    process, folder = owner
    process.send_signal(signal.SIGKILL)
    process.wait(HANG_S)
    (folder / "log").touch()
    script = "import sys; print(flush=True); sys.stdin.read()"
    if how == "open file":
        script = f"kept = open({str(folder / 'log')!r}); {script}"
        arguments = ["-c", f"exec(bytes.fromhex({script.encode().hex()!r}))"]
    else:
        arguments = ["-c", script, f"--temp-dir={folder}/session_1,x"]
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        assert remove_abandoned(tmp_path) == []
        user.kill()
        user.wait(HANG_S)
    assert remove_abandoned(tmp_path) == [folder]


def test_a_folder_kept_for_its_logs_is_not_removed(tmp_path: Path) -> None:
    with session_folder(keep=True, parent=tmp_path) as folder:
        pass
    assert remove_abandoned(tmp_path) == [] and os.path.isdir(folder)


def test_a_start_removes_leftover_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    monkeypatch.setattr(launch, "remove_abandoned", lambda: calls.append("removed"))
    monkeypatch.setattr(
        launch, "session_folder", lambda *, keep: session_folder(keep=keep, parent=tmp_path)
    )
    with launch._files() as folder:
        assert folder.parent == tmp_path and calls == ["removed"]
    assert not folder.exists()
