"""A model from the Hugging Face Hub is announced. A hub that does not answer is reported quickly,
in one line."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from swell.cluster.cli.start import hub_model
from swell.cluster.cli.start.hub_model import HubDownload, ask_hub
from swell.configs.schema import ConfigError, load

MODEL: dict[str, object] = {
    "id": "owner/name",
    "siblings": [
        {"rfilename": "model.safetensors", "size": 2_000_000_000},
        {"rfilename": "config.json", "size": 1000},
        {"rfilename": "picture.png", "size": 10**9},
    ],
}


class Hub(http.server.BaseHTTPRequestHandler):
    status, headers_sent, hangs = 200, {}, threading.Event()

    def do_GET(self) -> None:
        if self.status == 0:
            self.hangs.wait(60)
            return
        body = json.dumps(MODEL).encode()
        self.send_response(self.status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Own(Hub):
        hangs = threading.Event()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield Own
    Own.hangs.set()
    server.shutdown()
    thread.join()
    server.server_close()


def ask(lines: list[str], timeout_s: float = 30.0) -> hub_model.Download:
    return ask_hub(load("owner/name"), lines.append, timeout_s)


def test_a_model_of_the_hub_is_announced_and_its_bytes_are_counted(
    hub: type[Hub], tmp_path: Path
) -> None:
    lines: list[str] = []
    download = ask(lines)
    assert lines == [
        f"model.path='owner/name' is not a local folder: downloading it from {constants.ENDPOINT}"
    ]
    assert download.share() == ""
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "ab.incomplete").open("wb") as file:
        file.truncate(500_000_000)
    assert download.share() == " (downloaded 25% of 2.0 GB)"
    with (blobs / "ab.incomplete").open("wb") as file:
        file.truncate(2_000_001_000)
    assert download.share() == ""


def test_a_download_without_a_folder_shows_no_share(tmp_path: Path) -> None:
    assert HubDownload(tmp_path / "none", 10).share() == ""


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, "has no such model, or it is private"),
        (403, {"X-Error-Code": "GatedRepo"}, "accept its terms"),
        (400, {}, "refused the request: "),
        (0, {}, "did not answer within 0.5 s"),
    ],
)
def test_a_refusal_of_the_hub_is_reported_in_one_line(
    hub: type[Hub], status: int, headers: dict[str, str], reason: str
) -> None:
    hub.status, hub.headers_sent = status, headers
    with pytest.raises(ConfigError) as found:
        ask([], 0.5 if status == 0 else 30.0)
    text = str(found.value)
    assert reason in text and constants.ENDPOINT in text and "\n" not in text
    assert "model.path='owner/name'" in text


def test_an_unreachable_hub_is_reported(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"cannot be reached.*copy the model"):
        ask([])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        ask([])


HQQ = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
REFUSED = r"^model 'owner/name' is quantized \(quant_method 'hqq'\).* is not supported; serve the"


def test_a_quantization_that_the_hub_names_is_refused_before_the_download(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL, "config", HQQ)
    with pytest.raises(ConfigError, match=REFUSED):
        ask([])
    monkeypatch.setitem(MODEL, "config", {"quantization_config": {"quant_method": "gptq"}})
    ask([])


def test_a_quantization_of_a_cached_model_is_refused(hub: type[Hub], tmp_path: Path) -> None:
    folder, commit = tmp_path / "models--owner--name", "a" * 40
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    lines: list[str] = []
    ask(lines)
    assert lines == ["model.path='owner/name' is not a local folder: using the hub's cache"]
    (snapshot / "config.json").write_text(json.dumps(HQQ))
    with pytest.raises(ConfigError, match=REFUSED):
        ask([])


def test_a_local_folder_is_not_downloaded(tmp_path: Path) -> None:
    lines: list[str] = []
    assert ask_hub(load(str(tmp_path)), lines.append).share() == "" and not lines
