"""Another account of this host: a process that becomes it, and tries what a test asks.

The process starts as root, and gives up all rights before the first attempt. An attempt is a
function of `ATTEMPTS`. Its answer is the value that it returned, or the error that it met.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT
from tests.support.untrusted.untrusted_peers import Door, knock_with_keys, visit

UID = 54_321
"""A user id without a name and a home."""
_CONNECT_S = 1
"""How long a socket may take to accept a connection; one that drops all packets never does."""
_CALL_S = 30
"""How long a server may take to answer."""
_STORE_S = 10
"""The same of a store of torch."""
_MAX_BYTES = 1 << 16
_NODE = "ab" * 28
"""The id of a node. Ray's GCS and raylet end at a call of `RaySyncer` without one, before they ask
for the token: docs/operate/security.md names that among what is not protected."""


class Refused(Exception):
    """An attempt that met an error: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class UntrustedAccount:
    """Use as a context manager. Needs root."""

    def __init__(self, uid: int = UID) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.untrusted.untrusted_account", str(uid)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._lines.get(timeout=HANG_S):
            raise RuntimeError("the process did not become another account: see its output")

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def attempt(self, name: str, *arguments: Any) -> Any:
        """The value of an attempt. Raises Refused."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        kind, value = json.loads(self._lines.get(timeout=HANG_S) or '["Gone", "it has ended"]')
        if kind:
            raise Refused(kind, value)
        return value

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


# -------------------------------------------------------------------------------- attempts


def _list(path: str) -> list[str]:
    return os.listdir(path)


def _enter(path: str) -> None:
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path)
        os.fchdir(before)
    finally:
        os.close(before)


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(file.read(_MAX_BYTES)).decode()


def _write(path: str) -> None:
    """Opens a file for writing, and leaves it as it is."""
    os.close(os.open(path, os.O_WRONLY))


def _create(folder: str) -> None:
    path = Path(folder, "untrusted")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    path.unlink()


def _rename(path: str) -> None:
    """Takes a file away, and brings it back."""
    os.rename(path, f"{path}.untrusted")
    os.rename(f"{path}.untrusted", path)


def _signal(pid: int) -> None:
    """Whether a signal would reach the process: none is sent."""
    os.kill(pid, 0)


def _connect(family: str, address: str, port: int) -> None:
    Door(family, address, port).connect(_CONNECT_S).close()


def _listen(family: str, address: str, port: int) -> None:
    """Listens where another process does, as processes of one account can."""
    version = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(socket.AF_UNIX if family == "unix" else version) as place:
        if family == "unix":
            place.bind(address.replace("@", "\0", 1))
        else:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            place.bind((address, port))
        place.listen()


def _send(family: str, address: str, port: int, knock: str) -> str:
    answer = visit(Door(family, address, port), base64.b64decode(knock))
    return base64.b64encode(answer).decode()


def _join(family: str, address: str, port: int, server: str) -> bool:
    """Connects as a peer of a channel with keys of its own; whether something came back."""
    import zmq

    public, secret = zmq.curve_keypair()
    door = Door(family, address, port)
    return knock_with_keys(door, public, secret, server.encode(), b"untrusted")


def _fill_store(host: str, port: int) -> list[str]:
    """Writes over all that a store of torch has, and returns what it had."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore(host, port, None, False, timedelta(seconds=_STORE_S), False)
    found = []
    for key in store.list_keys():
        found += [key, repr(store.get(key))]
        store.set(key, "untrusted")
    return found


def _call(address: str, methods: list[str], token: str) -> dict[str, str]:
    """Calls methods of a gRPC server with an empty message: the status of each answer."""
    import grpc

    metadata = [("node_id", _NODE)]
    if token:
        metadata.append(("authorization", f"Bearer {token}"))
    found = {}
    with grpc.insecure_channel(address) as channel:
        for method in methods:
            try:
                channel.unary_unary(method)(b"", timeout=_CALL_S, metadata=metadata)
                found[method] = "OK"
            except grpc.RpcError as error:
                found[method] = error.code().name
    return found


def _request(method: str, url: str, headers: dict[str, str], body: str) -> int:
    """The status of an answer of HTTP."""
    import httpx

    with httpx.Client(trust_env=False, timeout=_CALL_S, verify=False) as client:
        return client.request(method, url, headers=headers, content=body).status_code


ATTEMPTS: dict[str, Callable[..., Any]] = {
    "list": _list,
    "enter": _enter,
    "read": _read,
    "write": _write,
    "create": _create,
    "rename": _rename,
    "signal": _signal,
    "connect": _connect,
    "listen": _listen,
    "send": _send,
    "join": _join,
    "fill store": _fill_store,
    "call": _call,
    "request": _request,
}


def become(uid: int) -> None:
    """Gives up root for good. Modules can still be imported. Raises OSError."""
    _open_modules()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    status = Path("/proc/self/status").read_text().splitlines()
    assert int(next(line for line in status if line.startswith("CapEff")).split()[1], 16) == 0


def _open_modules() -> None:
    """Reach the folders of modules through descriptors: the account may not be able to enter one
    of their parents, such as root's home."""
    packages = [module.__dict__.get("__path__") for module in list(sys.modules.values())]
    paths = [sys.path, *(path for path in packages if isinstance(path, list))]
    for path in paths:
        for number, folder in enumerate(path):
            if isinstance(folder, str) and os.path.isdir(folder or "."):
                opened = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
                path[number] = f"/proc/self/fd/{opened}"
    sys.path_importer_cache.clear()


def _main(uid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become(uid)
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = ("", ATTEMPTS[name](*arguments))
        except Exception as error:
            answer = (type(error).__name__, str(error))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
