"""Third-party clients against our server. They run in a virtual environment of their own, without
our package; the server runs in the repository's environment, as users start it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / ".venv" / "bin"
NANO = ROOT / "configs" / "models" / "nano"

# No downloads: the model is here, and the prices of models are not used.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Yields the URL of a server of nano; SWELL_URL names one that already runs."""
    if "SWELL_URL" in os.environ:
        yield os.environ["SWELL_URL"]
        return
    with serve(NANO) as url:
        yield url


@contextmanager
def serve(model: Path, *settings: str) -> Iterator[str]:
    """Yields the URL of a server of a model folder; `settings` are those of `--set`."""
    command = [BIN / "swell", "serve", model, "--port", "0"]
    for setting in ("model.dtype=float32", *settings):
        command += ["--set", setting]
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
def pooled_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an embedder and a ranker; SWELL_POOLED names an existing one, with the
    URLs of servers of both."""
    if "SWELL_POOLED" in os.environ:
        return Path(os.environ["SWELL_POOLED"])
    folder = tmp_path_factory.mktemp("pooled")
    command = [BIN / "python", "-m", "tests.support.weights.pooled_models", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
    return folder


@pytest.fixture(scope="session")
def embedder(pooled_models: Path) -> Iterator[tuple[Path, str]]:
    """Yields the model's folder and the URL of its server."""
    yield from _served(pooled_models / "embedder")


@pytest.fixture(scope="session")
def ranker(pooled_models: Path) -> Iterator[tuple[Path, str]]:
    yield from _served(pooled_models / "ranker")


def _served(folder: Path) -> Iterator[tuple[Path, str]]:
    known = folder / "url"
    if known.is_file():
        yield folder, known.read_text()
        return
    with serve(folder) as url:
        yield folder, url


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """Yields a single event loop, for clients that are bound to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def python() -> Path:
    """Returns the interpreter of the server's virtual environment, which has torch."""
    return BIN / "python"


@pytest.fixture(scope="session")
def prefer(url: str) -> Callable[[str], dict[str, int]]:
    """Returns a function to make a `logit_bias` with which nano writes a character wherever its
    grammar allows it. nano was not trained to call tools; if a test needs one of several answers,
    this selects it."""

    def bias(character: str) -> dict[str, int]:
        asked = {"model": "nano", "prompt": character}
        answer = httpx.post(f"{url}/tokenize", json=asked, timeout=HANG_S)
        return {str(answer.raise_for_status().json()["tokens"][-1]): 100}

    return bias
