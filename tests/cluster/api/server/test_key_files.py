"""A key file that other accounts can write is refused. One that they can read is accepted with a
warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster.api.server.access import Access
from swell.cluster.api.server.api_keys import key_file_warnings
from swell.configs.schema import ConfigError, ServeConfig

FILES = ("api_keys_file", "admin_keys_file")


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Yields the log messages about key files."""
    found: list[str] = []
    logger, handler = logging.getLogger("swell.cluster.api_keys"), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def config(path: Path, name: str) -> ServeConfig:
    return ServeConfig(**{name: str(path)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o602, 0o666, 0o777])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("abc\n")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"serve\.{name}=.*{mode:o}.*chmod 600"):
        Access(config(path, name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o644, 0o604, 0o600, 0o440])
def test_a_file_that_others_may_read_causes_a_warning(
    tmp_path: Path, name: str, mode: int, messages: list[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("abc\n")
    path.chmod(mode)
    Access(config(path, name))
    warnings = key_file_warnings(config(path, name))
    assert bool(warnings) == bool(mode & 0o004)
    assert messages == warnings
    for text in warnings:
        assert f"serve.{name}" in text and f"{mode:o}" in text and "chmod 600" in text
        assert "abc" not in text


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_or_a_device_is_refused_and_not_read(tmp_path: Path, name: str) -> None:
    """An ingress that opened one would wait for a writer."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=rf"serve\.{name}='{path}' .*not a regular file"):
            Access(config(path, name))


def test_a_file_that_is_not_on_this_host_has_no_warning(tmp_path: Path) -> None:
    assert key_file_warnings(config(tmp_path / "none", "api_keys_file")) == []
    assert key_file_warnings(ServeConfig()) == []
