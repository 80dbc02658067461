"""The load generator counts what a scripted server sent, and its client reads any framing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from swell.cluster.cli import bench
from swell.cluster.cli.bench import Percentiles, Sample, percentiles_ms, random_prompts, summarize
from swell.cluster.cli.http_client import Client, ServerError, normal_url, read_events
from swell.cluster.cli.main import main
from tests.cluster.fake_server import FakeServer, running


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


def run(fake: FakeServer, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "report.json"
    sizes = ["--input-tokens", "9", "--output-tokens", "5", "--concurrency", "3"]
    code = main(
        ["bench", "--url", fake.url, *sizes, "--requests", "12", "--json", str(file), *more]
    )
    return code, json.loads(file.read_text())


def test_all_requests_and_tokens_are_counted(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.gap_s = 0.02
    code, report = run(fake, tmp_path, "--api-key", "secret")
    assert code == 0
    assert (report["ok"], report["failed"], report["first_error"]) == (12, 0, None)
    assert (report["prompt_tokens"], report["output_tokens"]) == (12 * 9, 12 * 5)
    assert report["output_tokens_per_s"] == pytest.approx(60 / report["duration_s"])
    assert report["total_tokens_per_s"] == pytest.approx(168 / report["duration_s"])
    assert report["ttft_ms"]["mean"] >= 1
    assert report["itl_ms"]["p50"] >= 0.5
    assert report["e2e_ms"]["p99"] >= report["e2e_ms"]["p50"] > report["ttft_ms"]["p50"]
    assert report["arguments"]["concurrency"] == 3
    assert "api_key" not in report["arguments"]
    assert fake.keys == ["Bearer secret"]
    assert "end to end" in (shown := capsys.readouterr().out)
    assert shown.isascii()


def test_requests_follow_the_configuration(fake: FakeServer, tmp_path: Path) -> None:
    fake.gap_s = 0.02
    run(fake, tmp_path)
    assert fake.most_in_flight == 3
    warm, *requests = fake.requests
    assert len(requests) == 12 and warm["max_tokens"] == 1
    assert len({tuple(request["prompt"]) for request in requests}) == 12
    known = set("".join(bench._TEXTS).encode())
    for request in requests:
        assert len(request["prompt"]) == 9 and set(request["prompt"]) <= known
        assert request["ignore_eos"] is True and request["temperature"] == 0
        assert request["stream_options"] == {"include_usage": True}


def test_failures_are_counted_and_shown(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_every = 4
    code, report = run(fake, tmp_path)
    assert code == 1
    assert (report["ok"], report["failed"]) == (9, 3)
    assert report["first_error"] == "503: no engine is ready yet"
    assert "first failure: 503" in capsys.readouterr().out


def test_a_cut_stream_is_a_failure(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.cut_short = True
    assert main(["bench", "--url", fake.url, "--requests", "2"]) == 1
    assert "the stream ended before its [DONE]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b'{"choices":[]}', "no usage"),
        (b'{"choices":[],"usage":null}', "no usage"),
        (
            b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":4}}',
            "received 4 tokens, requested 5",
        ),
    ],
)
def test_a_stream_without_the_right_usage_is_a_failure(end: bytes, error: str) -> None:
    async def read(client: Client) -> Sample:
        return await bench.measure(client, b"{}", 5)

    wire = b'data: {"choices":[{"text":"ab"}]}\n\ndata: ' + end + b"\n\ndata: [DONE]\n\n"
    sample = with_answer(wire, {}, 1000, read)
    assert error in (sample.error or "")


def test_a_request_that_does_not_fit_is_refused(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", fake.url, "--input-tokens", "500"]) == 1
    assert "exceed the 512" in capsys.readouterr().err
    assert not fake.requests


def test_offline_has_no_latencies() -> None:
    samples = [Sample(prompt_tokens=8, output_tokens=4) for _ in range(3)]
    report = summarize(samples, 2.0, {})
    assert (report.ttft_ms, report.itl_ms, report.e2e_ms) == (None, None, None)
    assert (report.output_tokens_per_s, report.requests_per_s) == (6, 1.5)
    bench.print_report(report)


def test_a_run_without_a_success_reports_the_first_error() -> None:
    report = summarize([Sample(error="no"), Sample(error="later")], 0.0, {})
    assert (report.ok, report.failed, report.first_error) == (0, 2, "no")


def test_percentiles_are_interpolated() -> None:
    values = [value / 1000 for value in range(1, 102)]
    random.Random(0).shuffle(values)
    known = percentiles_ms(values)
    assert known is not None
    assert msgspec.structs.astuple(known) == pytest.approx((51, 51, 91, 100))
    assert percentiles_ms([0.003]) == Percentiles(3, 3, 3, 3)
    assert percentiles_ms([0.002, 0.001]) == Percentiles(1.5, 1.5, pytest.approx(1.9), 1.99)
    assert percentiles_ms([]) is None


def test_prompts_repeat_with_their_seed() -> None:
    assert random_prompts(range(9), 5, 3, 1) == random_prompts(range(9), 5, 3, 1)
    assert random_prompts(range(9), 5, 3, 1) != random_prompts(range(9), 5, 3, 2)


T = TypeVar("T")


def with_answer(
    wire: bytes, headers: dict[str, str], step: int, use: Callable[[Client], Awaitable[T]]
) -> T:
    """Returns the result of `use` on a client whose server sends the body in pieces of `step`
    bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = ["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for start in range(0, len(wire), step):
            writer.write(wire[start : start + step])
            await asyncio.sleep(0)
        writer.close()

    async def run() -> T:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await use(Client(f"http://{host}:{port}"))

    return asyncio.run(run())


def events_of(wire: bytes, headers: dict[str, str], step: int) -> list[bytes]:
    async def read(client: Client) -> list[bytes]:
        async with client.open("GET", "/") as response:
            return [event async for event in read_events(response)]

    return with_answer(wire, headers, step, read)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


STREAM = b': note\n\ndata: {"a":1}\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'
CHUNKED = {"transfer-encoding": "chunked"}


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("wire", "headers"),
    [
        (chunked(STREAM), CHUNKED),
        (chunked(STREAM[:20], STREAM[20:21], STREAM[21:]), CHUNKED),
        (STREAM, {"content-length": str(len(STREAM))}),
        (STREAM, {}),
    ],
)
def test_events_survive_any_framing(wire: bytes, headers: dict[str, str], step: int) -> None:
    assert events_of(wire, headers, step) == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (chunked(b"data: 1\n\n"), "before its"),
        (b"9\r\ndata: 1\n\n\r\n", "closed the connection"),
        (b"zz\r\n", "not HTTP"),
        (chunked(b'data: {"error":{"message":"boom"}}\n\n'), "boom"),
    ],
)
def test_broken_streams_are_errors(wire: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        events_of(wire, CHUNKED, 1000)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:80", "http://localhost:80"),
        ("http://h:1/", "http://h:1"),
        ("https://h", "https://h"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_urls_are_normalized(given: str, url: str) -> None:
    assert normal_url(given) == url


@pytest.mark.parametrize("given", ["", ":8000", "ftp://h", "http://h:x", "http://h:99999", "a b"])
def test_invalid_urls_are_refused(given: str) -> None:
    with pytest.raises(ServerError, match="is not a URL"):
        normal_url(given)
