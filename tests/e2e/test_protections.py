"""The attempts of `protections.py` find what is open, and report nothing if all is closed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.protections import Place, Site, complaints, not_denied, open_processes
from tests.support.untrusted.untrusted_account import UntrustedAccount
from tests.support.untrusted.untrusted_peers import Door

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account"),
]

PRIVATE, TOKEN = "only its owner may enter the folder", "Ray's token"
CLOSED = "tokens of the group; closed once it is formed"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with UntrustedAccount() as account:
        yield Site(account, "", "token", "", "", (), ("a secret of the test",))


@pytest.fixture
def session() -> Iterator[Path]:
    """A session folder as Ray creates it, open to all accounts, inside a private folder."""
    private = Path(tempfile.mkdtemp(prefix="protections-", dir="/tmp"))
    for name in ("sockets", "logs"):
        (private / "ray" / "session" / name).mkdir(parents=True)
    (private / "ray" / "session" / "logs" / "raylet.out").touch()
    for path in [*private.rglob("*")]:
        path.chmod(0o777)
    yield private / "ray" / "session"
    shutil.rmtree(private)


def test_a_folder_that_others_enter_is_found(site: Site, session: Path) -> None:
    path = session / "sockets" / "raylet"
    place = Place("raylet", "Ray, its own protocol", Door("unix", str(path)))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        assert not complaints(site, place, PRIVATE)
        session.parents[1].chmod(0o755)
        found = "\n".join(complaints(site, place, PRIVATE))
    for attempt in ("'connect', 'unix'", "'list'", "'enter'", "'create'", "'read'", "'rename'"):
        assert attempt in found


def test_a_socket_that_accepts_connections_is_found(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = Place("worker", "gloo", Door("tcp", *server.getsockname()))
        (line,) = complaints(site, place, CLOSED)
        assert "it accepts connections" in line
    (line,) = complaints(site, place, CLOSED)
    assert "another account listens at 127.0.0.1" in line
    assert "no attempt is known for the protection 'new'" in complaints(site, place, "new")[0]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_server_that_accepts_calls_without_the_token_is_found(site: Site, is_open: bool) -> None:
    def check(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if not is_open:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return b""

    handler = grpc.unary_unary_rpc_method_handler(check)
    name, methods = "ray.rpc.NodeInfoGcsService", {"GetAllNodeInfo": handler}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        place = Place("gcs_server", "Ray: gRPC", Door("tcp", "127.0.0.1", port))
        found = complaints(site, place, TOKEN)
        server.stop(None).wait()
    assert any("are taken without a token" in line for line in found) == is_open
    assert bool(found) == is_open


def test_a_process_and_a_file_of_another_account_are_closed(site: Site, tmp_path: Path) -> None:
    assert not [*open_processes(site, [os.getpid()])]
    assert [*open_processes(site, [site.account.pid])]
    public = Path(tempfile.mkdtemp(prefix="protections-", dir="/tmp"))
    try:
        public.chmod(0o755)
        (public / "key").touch(0o600)
        assert not [*not_denied(site.account, ("read", str(public / "key")))]
        (public / "key").chmod(0o644)
        assert len([*not_denied(site.account, ("read", str(public / "key")))]) == 1
    finally:
        shutil.rmtree(public)
