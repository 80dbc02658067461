"""Runs the nginx settings of `docs/operate/proxy.md` with a real nginx, in front of a server that
waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swell.coordinator.transport.ports import free_port
from tests.cluster.api.answers.waiting_client import REQUESTS, serving
from tests.cluster.fake_cluster import DEADLINE_S
from tests.test_layers import ROOT

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]

READ_TIMEOUT_S = 15
"""Longer than a test process of low priority can be without a processor."""
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {page}
}}
"""


def settings_of_the_page(port: int, ours: int) -> str:
    """The block of `docs/operate/proxy.md`, at another port and with a shorter time."""
    text = (ROOT / "docs" / "operate" / "proxy.md").read_text()
    (block,) = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    for said, here in (
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8000", f"127.0.0.1:{ours}"),
        ("proxy_read_timeout 60s", f"proxy_read_timeout {READ_TIMEOUT_S}s"),
    ):
        assert said in block
        block = block.replace(said, here)
    return block


@contextlib.asynccontextmanager
async def nginx(folder: Path, ours: int) -> AsyncIterator[int]:
    """Yields the port of a proxy that forwards to port `ours`."""
    folder.mkdir()
    port = free_port("127.0.0.1")
    path = folder / "nginx.conf"
    path.write_text(CONFIG.format(folder=folder, page=settings_of_the_page(port, ours)))
    assert NGINX is not None
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(folder), "-e", str(folder / "errors"), "-c", str(path)
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                assert process.returncode is None, (folder / "errors").read_text()
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                await asyncio.sleep(0.01)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def test_nginx_cuts_off_a_waiting_whole_answer_but_not_a_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.keep_alive_s": 0.05}
        async with serving(tmp_path, **settings) as world:
            engine = await world.cluster.join(0, 0)
            async with nginx(tmp_path / "nginx", world.cluster.edge.port) as world.port:
                streams = [await world.stream(path) for path in REQUESTS]
                early = await world.ask(
                    "/v1/completions", REQUESTS["/v1/completions"], x_swell_early_head="1"
                )
                for peer in (*streams, early):
                    await peer.more()  # the proxy passed the head on and did not buffer it
                whole = await world.ask("/v1/completions", REQUESTS["/v1/completions"])
                await whole.whole()
                assert whole.status == 504, "the proxy's own time is over"
                engine.allow()
                answers = [await peer.whole() for peer in streams]
                body = json.loads(await early.whole())
            assert all(peer.status == 200 for peer in (*streams, early))
            assert all(b": x-swell-engine 0" in answer for answer in answers)
            assert body["choices"]

    asyncio.run(scenario())
