"""Clients of others against a server of ours. They run in a virtual environment of their own,
without our package; the server runs from the repository's, as users start it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / ".venv" / "bin"
NANO = ROOT / "configs" / "models" / "nano"

# Nothing is fetched: the model is here, and prices of models matter to nobody.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    command = [BIN / "swell", "serve", NANO, "--port", "0", "--set", "model.dtype=float32"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if line.startswith("ready: "):
                break
        else:
            pytest.fail("the server ended before it was ready")
        yield line.removeprefix("ready: ").strip()
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def python() -> Path:
    """That of the server's virtual environment, which has torch."""
    return BIN / "python"
