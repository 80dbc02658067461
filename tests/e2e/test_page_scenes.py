"""The web page in a browser, on a real cluster: a visit, a chat, a rescale, a killed engine, an
upgrade. Each scene is asserted by what the page shows. `SWELL_PICTURES=FOLDER` saves a screenshot
of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.faults.cluster_monitor import CONTROLLER, MANAGER
from tests.faults.process import HTTP
from tests.support.web.axe import AXE, violations
from tests.support.web.browser import Browser, needs_browser, start_browser
from tests.support.weights.changed_weights import add_noise, copy_of

pytestmark = [pytest.mark.slow, needs_browser]

SETTINGS = (
    "model.name=nano",
    "model.dtype=float32",
    "parallel.executor=ray",  # workers have processes of their own
    "cluster.drain_timeout_s=1",
)
STREAMS = 6
LOG = "#log"
GCS = "gcs_server"
"""Part of the title of the process of Ray that restarts actors."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(NANO, *SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def page(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(f"{cluster.url}/")
        yield browser


class Streams:
    """Long answers that stream while a scene plays."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = cluster.url
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self.failures: list[str] = []
        self.moved: list[str] = []
        """Ids of the answers that had to wait for another engine."""
        self.texts: set[str] = set()
        """The texts of the complete answers: a single one, because none is sampled."""
        self._num_finished = 0
        self._begun_after = [0] * STREAMS
        """The number of answers that had finished when the newest answer of each thread began."""
        self._threads = [threading.Thread(target=self._run, args=[i]) for i in range(STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def one_waits(self) -> bool:
        """Returns whether one answer has made no progress while all others began
        repeatedly."""
        return self._num_finished - min(self._begun_after) >= 4 * STREAMS

    def _run(self, thread: int) -> None:
        while not self._stopping.is_set():
            self._begun_after[thread] = self._num_finished
            self._answer()
            with self._lock:
                self._num_finished += 1

    def _answer(self) -> None:
        body = {"model": "nano", "prompt": "upper: abc", "max_tokens": 900, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0, "include_timings": True}
        id, last, text = "", "", ""
        with HTTP.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    id = chunk.get("id", id)
                    text += "".join(choice["text"] for choice in chunk.get("choices", []))
                    if '"event":"resubmitted"' in line:
                        self.moved.append(id)
                last = line or last
        if last == "data: [DONE]":
            self.texts.add(text)
        else:
            self.failures.append(last)


def save(page: Browser, name: str, height: int = 860) -> None:
    if folder := os.environ.get("SWELL_PICTURES"):
        page.resize(1280, height)
        page.save_picture(Path(folder) / f"{name}.png")


def active_engines(page: Browser, number: int) -> None:
    """Waits until the table shows this number of active engines, and no other."""
    script = """
        const states = [...document.querySelectorAll("tr[data-rank] .state")].map(e => e.innerText);
        return states.length === arguments[0] && states.every((state) => state === "active");
    """
    page.until(script, number)


def until_both_compute(page: Browser) -> None:
    """Waits until the table shows requests that run on every engine."""
    page.until(
        "return [...document.querySelectorAll('tr[data-rank] td:nth-child(4)')]"
        ".every((cell) => Number(cell.innerText) > 0)"
    )


@contextlib.contextmanager
def suspended(cluster: Cluster, part: str) -> Iterator[None]:
    """Suspends the processes whose title contains `part`, so that they replace nothing."""
    found = cluster.named(part)
    assert found, f"no process is called {part!r}"
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)


def confirm(page: Browser, effect: str) -> None:
    page.until_text("#confirm", effect)
    page.click("#confirm-yes")
    page.until("return !document.querySelector('#confirm')")


def test_a_first_visit_shows_a_playground_and_a_cluster(page: Browser) -> None:
    page.until_text("#health", "1 engine ready")
    page.until("return document.querySelector('#model').value === 'nano'")
    page.click("#tab-cluster")
    active_engines(page, 1)
    page.until_text(".summary", "serving")
    save(page, "first-visit")


def test_a_chat_shows_its_timeline(page: Browser) -> None:
    page.click("#tab-playground")
    page.type("[name=temperature]", "0")
    page.type("#prompt", "upper: hello\n")
    page.until_text(".answer .meta", "complete")
    assert page.text(".answer-text") == "HELLO"
    save(page, "playground")
    page.click(".answer .meta a")
    page.until_text(".timeline", "prefill")
    assert "finished: stop" in page.text(".timeline")


def test_the_page_adds_an_engine(page: Browser) -> None:
    active_engines(page, 1)
    page.type("#scale-to", "2")
    page.click(".controls form button")
    confirm(page, "1 engine will start")
    page.until_text(LOG, "the target is 2 engines, before 1")
    page.until_text(LOG, "engine 1 joined")
    active_engines(page, 2)
    save(page, "rescale", 1000)


def test_the_page_shows_a_killed_engine_and_its_replacement(
    page: Browser, cluster: Cluster
) -> None:
    with Streams(cluster) as streams:
        until_both_compute(page)
        (victim,) = (e for e in cluster.get("/admin/cluster").json()["engines"] if e["rank"] == 1)
        # The engine is suspended until it holds an answer, so that its death moves one. After the
        # stall timeout, the cluster itself ends it and moves them.
        os.kill(victim["pid"], signal.SIGSTOP)
        while not streams.one_waits() and "moved to another engine" not in page.text(LOG):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGKILL)
        page.until_text(LOG, "engine 1 was lost")
        page.until_text(LOG, "moved to another engine")
        page.until("return document.querySelectorAll('#log [data-kind=joined]').length >= 2")
        active_engines(page, 2)
        page.run("document.querySelector('main').scrollTop = 0")
        save(page, "cluster", 1000)
    assert streams.failures == []
    assert len(streams.texts) == 1
    assert streams.moved
    page.type(".find input", f"{streams.moved[0]}\n")
    page.until_text(".timeline", "waits for another engine")


def test_the_page_shows_a_killed_worker_and_its_replacement(
    page: Browser, cluster: Cluster
) -> None:
    workers = "tr[data-rank='1'] .workers"
    with Streams(cluster) as streams:
        until_both_compute(page)
        engines = cluster.get("/admin/cluster").json()["engines"]
        (victim,) = next(engine["workers"] for engine in engines if engine["rank"] == 1)
        page.until_text(workers, f"0 ready · process {victim['pid']}")
        os.kill(victim["pid"], signal.SIGKILL)
        page.until_text(LOG, "worker 0 of engine 1 was lost")
        page.until_text(LOG, "worker 0 of engine 1 was replaced by process")
        shown = page.until_text(workers, "replaced once")
        assert str(victim["pid"]) not in shown and "0 ready" in shown
        active_engines(page, 2)
        save(page, "worker")
    assert streams.failures == []
    assert len(streams.texts) == 1


def test_the_page_shows_a_killed_coordinator_and_its_successor(
    page: Browser, cluster: Cluster
) -> None:
    with Streams(cluster) as streams:
        until_both_compute(page)
        with suspended(cluster, GCS):
            os.kill(cluster.get("/admin/cluster").json()["coordinator"]["pid"], signal.SIGKILL)
            page.until_text("#problems", "The coordinator does not answer")
            page.until_text(".summary", "Coordinator\ndoes not answer")
            page.until_text(".summary", "Manager\nanswers")
            page.until_text(LOG, "the coordinator does not answer")
            save(page, "coordinator")
        page.until_text(LOG, "another coordinator runs")
        page.until("return document.querySelector('#problems').innerText === ''")
        page.until_text(".summary", "Coordinator\nanswers")
        active_engines(page, 2)
    assert streams.failures == []
    assert len(streams.texts) == 1


def test_the_page_shows_a_killed_manager_and_why_operations_wait(
    page: Browser, cluster: Cluster
) -> None:
    is_disabled = "return document.querySelector('#confirm-yes').disabled === arguments[0]"
    with Streams(cluster) as streams:
        until_both_compute(page)
        with suspended(cluster, CONTROLLER):
            (manager,) = cluster.named(MANAGER)
            os.kill(manager, signal.SIGKILL)
            page.until_text("#problems", "The manager does not answer")
            page.until_text(".summary", "Manager\ndoes not answer")
            page.click("#resume")
            page.until_text("#confirm", "This cannot be done now: the manager does not answer")
            page.until(is_disabled, True)
            until_both_compute(page)
            save(page, "manager")
        page.until(is_disabled, False)
        assert "cannot be done" not in page.text("#confirm")
        confirm(page, "Paused requests continue")
        page.until_text(LOG, "the manager answers again")
        page.until("return document.querySelector('#problems').innerText === ''")
        active_engines(page, 2)
    assert streams.failures == []
    assert len(streams.texts) == 1


def test_the_playground_shows_that_the_engines_are_paused(page: Browser) -> None:
    page.click("#pause")
    confirm(page, "until you resume")
    page.click("#tab-playground")
    page.until_text("#waiting", "paused by an operator")
    page.type("#prompt", "upper: hello\n")
    page.click("#tab-cluster")
    page.until_text(LOG, "the cluster is paused")
    page.click("#resume")
    confirm(page, "Paused requests continue")
    page.click("#tab-playground")
    page.until_text(".turn:last-child .answer .meta", "complete")
    page.until("return document.querySelector('#waiting').innerText === ''")
    page.click("#tab-cluster")
    page.log()  # the browser logs each answer of `/ready` that is not 2xx


def test_the_page_upgrades_the_weights(page: Browser, tmp_path: Path) -> None:
    other = tmp_path / "other"
    copy_of(other, lambda tensors: add_noise(tensors, 1))
    page.click(".controls summary")
    page.type(".controls details input", str(other))
    page.click(".controls details form button")
    confirm(page, "load the weights of")
    page.until_text(LOG, "in progress")
    page.until("return document.querySelectorAll('#log [data-kind=upgraded]').length >= 2")
    active_engines(page, 2)
    page.click(".controls summary")
    page.run("document.querySelector('main').scrollTop = 0")
    save(page, "upgrade", 1000)


def test_the_cluster_is_accessible(page: Browser) -> None:
    if not AXE.is_file():
        pytest.skip(f"{AXE} is missing")
    for scheme in ("light", "dark"):
        page.set_media("prefers-color-scheme", scheme)
        assert violations(page) == []


def test_the_console_of_the_browser_shows_no_error(page: Browser) -> None:
    assert page.log() == []
