"""A running cluster changes its weights while answers stream: none fails, and each is bit for bit
the answer of one version, the one that the response names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.faults.load import SHORT_DECODE, Answer, Load, difference, make_requests, reference
from tests.support.deadlines import HANG_S
from tests.support.weights.changed_weights import add_noise, copy_of, lose_a_tensor

pytestmark = pytest.mark.slow

MODEL = "nano"
STREAMS = 8
SETTINGS = ("model.name=nano", "model.dtype=float32", "cluster.drain_timeout_s=1")


def upgrade(
    url: str, model: Path, *settings: str, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """Runs `swell upgrade` until it exits."""
    sets = [part for each in ("model.dtype=float32", *settings) for part in ("--set", each)]
    arguments = ("upgrade", str(model), "--url", url, *sets)
    return _run(*prefix, sys.executable, "-m", "swell.cluster", *arguments)


def update_weights(url: str, model: Path) -> subprocess.CompletedProcess:
    """Runs `swell update-weights` until it exits."""
    return _run(sys.executable, "-m", "swell.cluster", "update-weights", str(model), "--url", url)


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


async def answers_while(
    urls: Sequence[str], streams: int, change: Callable[[], None]
) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Returns the reference answers before and after a change, and the answers of streams that ran
    during it."""
    requests = make_requests(MODEL, streams, SHORT_DECODE, seed=5)
    before = await reference(urls[0], requests)
    load = Load(urls, requests, streams)
    load.start()
    while load.streaming < streams // 3:
        await asyncio.sleep(0.02)
    await asyncio.to_thread(change)
    await asyncio.sleep(1.0)
    answers = await load.finish()
    return before, await reference(urls[0], requests), answers


def assert_pure(before: list[Answer], after: list[Answer], answers: list[Answer]) -> None:
    """Asserts that each answer is that of the version it names, and that both versions computed
    some."""
    expected = {before[0].version: before, after[0].version: after}
    assert len(expected) == 2 and "" not in expected
    for each in (before, after):
        assert len({answer.version for answer in each}) == 1
    assert sum(a.text != b.text for a, b in zip(before, after, strict=True)) > len(before) // 2
    assert [answer.error for answer in answers if answer.error] == []
    assert {answer.version for answer in answers} == set(expected)
    wrong = [difference(expected[a.version][a.request_index], a) for a in answers]
    assert [line for line in wrong if line is not None] == []


@pytest.fixture
def running() -> Iterator[Cluster]:
    """Two engines. The cluster ends as a service of systemd, which by default sends SIGTERM to
    every process: Ray's GCS is gone before the command has stopped anything."""
    with Cluster(NANO, *SETTINGS, "parallel.data=2") as started:
        deadline = time.monotonic() + HANG_S
        while started.get("/admin/cluster").json()["state"] != "serving":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield started
        for pid in (*started.named("gcs_server"), started.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert started.process.wait(HANG_S) == 0, started.lines


def test_engines_get_other_weights_while_answers_stream_and_bad_ones_are_rolled_back(
    running: Cluster, tmp_path: Path
) -> None:
    other = copy_of(tmp_path / "other", lambda tensors: add_noise(tensors, 1))
    pids = {engine["pid"] for engine in running.get("/admin/cluster").json()["engines"]}
    same = upgrade(running.url, NANO)
    assert same.returncode == 1 and "already has this configuration" in same.stderr

    def change() -> None:
        done = upgrade(running.url, other, "cluster.drain_timeout_s=5")
        assert done.returncode == 0, done.stderr
        assert "cluster.drain_timeout_s" in done.stdout.splitlines()[0], (
            "it stays, and that is said"
        )

    kept = asyncio.run(answers_while([running.url], STREAMS, change))
    assert_pure(*kept)
    state = running.get("/admin/cluster").json()
    assert state["upgrade"]["phase"] == "idle" and state["upgrade"]["model"] == str(other)
    engines = {engine["pid"]: engine["version"] for engine in state["engines"]}
    assert len(engines) == 2 and not pids & set(engines)
    assert set(engines.values()) == {state["upgrade"]["version"]} == {kept[1][0].version}
    answer = running.post("/v1/completions", {"prompt": "sort: b a", "max_tokens": 4, "n": 3})
    assert answer.json()["system_fingerprint"] == state["upgrade"]["version"]

    broken = copy_of(tmp_path / "broken", lose_a_tensor)
    failed = upgrade(running.url, broken)
    assert failed.returncode != 0 and "did not become ready" in failed.stderr
    after = running.get("/admin/cluster").json()
    assert after["upgrade"]["phase"] == "failed" and "norm.weight" in after["upgrade"]["error"]
    assert {engine["pid"]: engine["version"] for engine in after["engines"]} == engines
    assert after["state"] == "serving"

    _check_weights_in_place(running, tmp_path, engines)

    strange = copy_of(tmp_path / "strange")
    path = strange / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    refused = upgrade(running.url, strange)
    assert refused.returncode != 0 and "tokenizer_config.json" in refused.stderr
    refused = update_weights(running.url, strange)
    assert refused.returncode != 0 and "tokenizer_config.json" in refused.stderr


def _check_weights_in_place(running: Cluster, tmp_path: Path, engines: dict[int, str]) -> None:
    """Updates weights in place, first with good ones and then with damaged ones, which are refused.
    The processes stay both times. `engines`: pid -> version."""
    third = copy_of(tmp_path / "third", lambda tensors: add_noise(tensors, 2))

    def change() -> None:
        done = update_weights(running.url, third)
        assert done.returncode == 0, done.stderr

    kept = asyncio.run(answers_while([running.url], STREAMS, change))
    assert_pure(*kept)
    state = running.get("/admin/cluster").json()
    assert state["upgrade"]["phase"] == "idle" and state["upgrade"]["model"] == str(third)
    assert {engine["pid"] for engine in state["engines"]} == set(engines)
    versions = {engine["version"] for engine in state["engines"]}
    assert versions == {state["upgrade"]["version"]} == {kept[1][0].version}

    failed = update_weights(running.url, tmp_path / "broken")
    assert failed.returncode != 0 and "norm.weight" in failed.stderr
    after = running.get("/admin/cluster").json()
    assert {engine["pid"] for engine in after["engines"]} == set(engines)
    assert {engine["version"] for engine in after["engines"]} == versions
    assert after["state"] == "serving"
