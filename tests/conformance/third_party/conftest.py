"""Third-party clients against a server of ours. They run in a virtual environment of their own,
without our package; the server runs from the repository's, as users start it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / ".venv" / "bin"
NANO = ROOT / "configs" / "models" / "nano"

# Nothing is fetched: the model is here, and the prices of models are not used.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """SWELL_URL names a server of nano that runs already."""
    if "SWELL_URL" in os.environ:
        yield os.environ["SWELL_URL"]
        return
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
def loop() -> Iterator[asyncio.Runner]:
    """The one event loop of clients that belong to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def python() -> Path:
    """That of the server's virtual environment, which has torch."""
    return BIN / "python"


@pytest.fixture(scope="session")
def prefer(url: str) -> Callable[[str], dict[str, int]]:
    """A `logit_bias` that makes nano write this character wherever its grammar allows it. nano
    never learned to call tools: where a test needs one of several answers, this chooses it."""

    def bias(character: str) -> dict[str, int]:
        answer = httpx.post(f"{url}/tokenize", json={"model": "nano", "prompt": character})
        return {str(answer.raise_for_status().json()["tokens"][-1]): 100}

    return bias
