"""Servers as contenders: ours with the whole cluster path, ours in one process, and peers."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from swell.coordinator.transport.ports import free_port
from tests.benchmarks.case import CONTENDERS, Setup
from tests.benchmarks.children import START_S, Child, ContenderFailed, cpu_time_s
from tests.benchmarks.interleaved import OURS, Contender, log

_HOST = "127.0.0.1"
_POLL_S = 0.05
_SETTLE_S = 0.5
"""The time in which a server that was stopped catches up."""
_COMPLETIONS = "/v1/completions"
_ONE_TOKEN = b'{"model": "m", "prompt": "a", "max_tokens": 1}'


class Target(Contender, Protocol):
    """A server under load."""

    url: str


class Server:
    """A server that runs until `close`. `start_s`: the time from its start until it reports that it
    is ready.

    `ready` is the path that is polled; a server without such a path gets a request for one token.
    """

    def __init__(
        self, name: str, command: Sequence[str], port: int, ready: str, logs: Path
    ) -> None:
        self.name = name
        self.url = f"http://{_HOST}:{port}"
        self.start_s = 0.0
        self._port, self._ready = port, ready
        self._child = Child(name, command, logs, has_stdin=False)

    def start(self) -> None:
        started = time.perf_counter()
        self._child.start()
        while not self._answers():
            if not self._child.alive:
                raise self._child.failure("ended before it was ready")
            if time.perf_counter() - started > START_S:
                raise self._child.failure(f"was not ready after {START_S:g} s")
            time.sleep(_POLL_S)
        self.start_s = time.perf_counter() - started
        log(f"{self.name} is ready after {self.start_s:.1f} s")

    def cpu_time_s(self) -> float:
        """Returns the processor time of all its processes since their start."""
        return cpu_time_s(self._child.pids)

    def cpu_share(self, seconds: float) -> float:
        """Returns the share of one core that it uses during this time."""
        before = self.cpu_time_s()
        time.sleep(seconds)
        return (self.cpu_time_s() - before) / seconds

    def pause(self) -> None:
        """Stops the processes, because an idle server computes too: Ray's daemons use some percent
        of a core."""
        self._child.pause()

    def resume(self) -> None:
        self._child.resume()
        time.sleep(_SETTLE_S)

    def close(self) -> None:
        self._child.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=30)
        try:
            if self._ready == _COMPLETIONS:
                kind = {"content-type": "application/json"}
                connection.request("POST", self._ready, _ONE_TOKEN, kind)
            else:
                connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class CoRunningServers:
    """A server under load while another one idles. Both are contenders themselves, and were started
    before."""

    def __init__(self, server: Server, idle: Server) -> None:
        self.name = f"{server.name}, {idle.name} idle"
        self.url = server.url
        self._servers = (server, idle)

    def start(self) -> None:
        return

    def pause(self) -> None:
        for server in self._servers:
            server.pause()

    def resume(self) -> None:
        for server in self._servers:
            server.resume()

    def close(self) -> None:
        return


class Client:
    """The load client, in a process of its own."""

    def __init__(self, logs: Path) -> None:
        command = [sys.executable, str(CONTENDERS / "load_client.py")]
        self._child = Child("load client", command, logs, has_stdin=True)
        self._seed = 0

    def __enter__(self) -> Client:
        self._child.start()
        self._child.receive(START_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self._child.close()

    def load(
        self, server: Target, streams: int, requests: int, vocab_size: int, sizes: tuple[int, int]
    ) -> dict[str, float]:
        """Returns rates and latencies of this many requests. Raises ContenderFailed if one
        failed."""
        self._seed += 1
        numbers = self._child.call(
            url=server.url,
            streams=streams,
            requests=requests,
            inputs=sizes[0],
            outputs=sizes[1],
            vocab_size=vocab_size,
            seed=self._seed,
        )
        if "error" in numbers:
            raise ContenderFailed(f"{server.name}: {numbers['error']}")
        return numbers


def _swell(command: Sequence[str], settings: Sequence[str]) -> list[str]:
    sets = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", *command, *sets]


def swell(source: Path, setup: Setup, *settings: str) -> Server:
    """Returns `swell serve`: Ray, Serve's ingress, an engine actor."""
    port = free_port(_HOST)
    command = ["swell.cluster", "serve", str(source), "--port", str(port)]
    return Server(OURS, _swell(command, settings), port, "/ready", setup.logs)


def bare(source: Path, setup: Setup, *settings: str) -> Server:
    """Returns the same engine and routes in one process."""
    port = free_port(_HOST)
    command = ["tests.benchmarks.bare", str(source), "--port", str(port)]
    return Server("bare", _swell(command, settings), port, "/ready", setup.logs)


def vllm(model: Path, setup: Setup) -> Server:
    """Returns vLLM's own API server."""
    port = free_port(_HOST)
    command = [
        *(setup.peers["vllm"], "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "m", "--dtype", "float32"),
        *("--max-model-len", "2048", "--no-enable-prefix-caching"),
        *("--host", _HOST, "--port", str(port)),
    ]
    return Server("vllm", command, port, "/health", setup.logs)


def ray_serve_llm(model: Path, setup: Setup) -> Server:
    """Returns Ray Serve LLM, which uses vLLM's engine."""
    port = free_port(_HOST)
    script = str(CONTENDERS / "ray_serve_llm.py")
    command = [setup.peers["ray-serve-llm"], script, str(model), str(port), str(setup.logs / "ray")]
    return Server("ray-serve-llm", command, port, _COMPLETIONS, setup.logs)


PEER_SERVERS = {"vllm": vllm, "ray-serve-llm": ray_serve_llm}


def peers(model: Path, setup: Setup) -> list[Server]:
    """Returns servers of the peers that are installed."""
    return [make(model, setup) for name, make in PEER_SERVERS.items() if name in setup.peers]
