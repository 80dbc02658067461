"""Settings with which `swell serve` starts Ray."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swell.cluster.cli import launch
from swell.cluster.cli.start import ray_settings


def test_a_value_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch):
    environment = {"RAY_event_stats": "1"}
    monkeypatch.setattr(os, "environ", environment)
    ray_settings.set_defaults(60.0)
    assert environment["RAY_event_stats"] == "1"
    assert environment["RAY_enable_metrics_collection"] == "0"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_token_exists_before_ray_starts_and_only_its_owner_may_read_it(home: Path) -> None:
    """Ray uses an existing token. It would create one that every account can read."""
    before = os.umask(0)
    try:
        ray_settings.set_defaults(60.0)
    finally:
        os.umask(before)
    token = home / ".ray" / "auth_token"
    assert len(token.read_text()) >= 32 and mode_of(token) == 0o600
    assert mode_of(token.parent) == 0o700
    text = token.read_text()
    token.chmod(0o644)
    ray_settings.set_defaults(60.0)
    assert token.read_text() == text and mode_of(token) == 0o600
    assert os.listdir(token.parent) == ["auth_token"]


def test_without_authentication_no_token_is_created(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "0" * 64)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            ray_settings.set_defaults(60.0)
    named = home / "token"
    named.touch(mode=0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    ray_settings.set_defaults(60.0)
    assert mode_of(named) == 0o600
    assert not (home / ".ray").exists()


def test_the_ray_folder_is_inside_a_private_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray makes its own folder accessible to every account."""
    found: list[Path] = []

    @contextlib.contextmanager
    def local_ray(folder: Path, *_others: Any) -> Iterator[Any]:
        folder.mkdir()
        folder.chmod(0o777)
        found.append(folder)
        assert mode_of(folder.parent) == 0o700, "another account enters"
        assert (
            len(f"{folder}/session_2026-11-29_00-28-12_123456_1234567/sockets/plasma_store") < 107
        )
        yield SimpleNamespace(has_lost_one=lambda: False)

    monkeypatch.setattr(launch, "local_ray", local_ray)
    screen: Any = SimpleNamespace(line=lambda _: None)
    with (
        launch._files() as folder,
        launch._ray(None, folder, screen, threading.Event(), 60.0, lambda: None),
    ):
        assert found
    assert not folder.exists()
