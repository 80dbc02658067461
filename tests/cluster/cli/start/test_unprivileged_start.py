"""`swell serve` as an account without a name, whose home is missing or cannot be written: all that
the start does before Ray, whose own start is replaced here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import HANG_S
from tests.support.untrusted.untrusted_account import ROOT, UID

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")

NANO = ROOT / "configs" / "models" / "nano"
STARTS = """
import contextlib, json, os, stat, sys
from pathlib import Path
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from swell.cluster.cli import launch
from swell.cluster.cli.main import main
from swell.cluster.cli.start import private_home, ray_settings
from tests.support.untrusted.untrusted_account import become

found = {}

@contextlib.contextmanager
def local_ray(folder, *_arguments):
    ray_settings.set_defaults(60)
    os.environ["RAY_AUTH_MODE"] = "token"
    ensure_token_if_auth_enabled()
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    for name in private_home._CACHES:
        Path(os.environ[name], "part").mkdir(parents=True)
    found["folder"] = str(folder.parent)
    found["modes"] = [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, token)]
    found["paths"] = [str(token), *(os.environ[name] for name in private_home._CACHES)]
    found["home"], found["user"] = str(Path.home()), os.environ.get("USER")
    raise launch.StartupError("Ray is not started in this test")
    yield

uid, *command = sys.argv[1:]
launch.local_ray = local_ray
become(int(uid))
found["code"] = main(command)
print(json.dumps(found))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every account reads; the folders of pytest are for one account."""
    folder = Path(tempfile.mkdtemp(prefix="public-"))
    folder.chmod(0o755)
    shutil.copytree(NANO, folder / "nano")
    yield folder
    shutil.rmtree(folder)
    shutil.rmtree(f"/tmp/swell-ports-{UID}", ignore_errors=True)


def start(model: Path, home: str | None) -> tuple[dict[str, Any], list[str], list[str]]:
    """Runs the command: what it has found, its lines, and its errors."""
    kept = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STARTS, str(UID), "serve", str(model), "--port=0"],
        env=kept if home is None else {**kept, "HOME": home},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, found = done.stdout.splitlines()
    return json.loads(found), lines, done.stderr.splitlines()


@pytest.mark.parametrize("home", [None, "/nonexistent", "that of another account"])
def test_all_files_of_the_home_are_in_the_private_folder(public: Path, home: str | None) -> None:
    if home and not home.startswith("/"):
        home = str(public)
    found, lines, errors = start(public / "nano", home)
    folder = found["folder"]
    assert errors == ["swell: Ray is not started in this test"] and found["code"] == 1
    assert folder.startswith("/tmp/swell-") and found["modes"] == [0o700, 0o600]
    assert all(path.startswith(f"{folder}/") for path in found["paths"])
    assert found["home"] == (str(public) if home == str(public) else f"{folder}/home")
    assert found["user"] == f"uid-{UID}"
    (line,) = (line for line in lines if "Ray's token" in line)
    assert f"Ray's token and compiled kernels are in {folder}, which is removed" in line
    assert "set SWELL_CACHE" in line
    assert "this account has no home" in line or "cannot be written" in line
    assert not Path(folder).exists()


def test_a_model_that_the_account_cannot_read_is_named(public: Path) -> None:
    (public / "nano" / "config.json").chmod(0o600)
    found, _, errors = start(public / "nano", "/nonexistent")
    (error,) = errors
    assert found == {"code": 1}
    assert "config.json" in error and "ermission denied" in error
