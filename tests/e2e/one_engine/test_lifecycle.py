"""A cluster starts, fails to start, scales, loses processes, and stops."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from swell.cluster.cli.main import main
from swell.cluster.port_claim import PortClaims
from swell.configs.schema import ConfigError
from tests.e2e.cluster import NANO, ROOT, Cluster, enable_sigint
from tests.faults.process import HTTP
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

TOKENS, LONG_TOKENS = 600, 1900
_MANAGER, _STORE = "ServeReplica:swell:Manager", "ServeReplica:swell:Store"


def swell(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swell.cluster", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def broken(tmp_path: Path, change) -> str:
    folder = tmp_path / "model"
    shutil.copytree(NANO, folder)
    change(folder)
    return str(folder)


def edit(name: str, **keys: object):
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


def shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def unchanged(folder: Path) -> None:
    pass


unknown = edit("config.json", architectures=["WhatIsThisForCausalLM"], model_type="whatisthis")

# what is wrong -> (change of the model's folder, setting, a word of the error)
CASES = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "", "has no weights"),
    "a missing shard": (shards, "", "model-2.safetensors"),
    "a truncated file": (truncate, "", "damaged"),
    "no safetensors": (garble, "", "not a safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "", "config.json"),
    "a quantization that is not read": (
        edit("config.json", quantization_config={"quant_method": "hqq"}),
        "",
        "(quant_method 'hqq'): quantization_config=",
    ),
    "heads that do not divide": (unchanged, "parallel.tensor=3", "parallel.tensor=3"),
    "too many stages": (unchanged, "parallel.pipeline=64", "parallel.pipeline=64"),
    "too long for the model": (unchanged, "model.max_model_len=1000000", "1000000"),
    "an unknown key": (unchanged, "scheduler.max_row=3", "scheduler.max_row"),
    "a value out of range": (unchanged, "scheduler.max_rows=0", "scheduler.max_rows"),
}
# Errors that occur only when an engine loads. All cases run in this process, which is faster; one
# also runs in its own process, and one in a cluster.
CASES_IN_ENGINE = {
    "an unknown architecture": (unknown, "", "whatisthis"),
    "a cache that is too small": (unchanged, "cache.memory_bytes=1000", "cache.memory_bytes"),
    "a length that does not fit": (
        unchanged,
        "cache.memory_bytes=100000",
        "model.max_model_len=1000",
    ),
}


def assert_one_line(code: int, stderr: str, word: str) -> None:
    assert code in (1, 2), stderr
    errors = [line for line in stderr.splitlines() if line.startswith("swell: ")]
    assert len(errors) == 1, stderr
    assert word in errors[0]
    assert "Traceback" not in stderr


def sets(*settings: str) -> list[str]:
    return [part for setting in settings if setting for part in ("--set", setting)]


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_that_cannot_start_is_refused_in_one_line(case, tmp_path, capsys):
    """Runs in this process, which is faster: the command fails before it starts anything."""
    change, setting, word = CASES[case]
    code = main(["serve", broken(tmp_path, change), "--port", "0", *sets(setting)])
    printed = capsys.readouterr()
    assert_one_line(code, printed.err, word)
    assert "starting Ray" not in printed.out


@pytest.mark.parametrize("case", CASES_IN_ENGINE)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(case, tmp_path, capsys):
    arguments, word = generate(case, tmp_path)
    code = main(arguments)
    assert_one_line(code, capsys.readouterr().err, word)


def test_a_process_whose_engine_cannot_load_exits_with_one_line(tmp_path):
    arguments, word = generate("a cache that is too small", tmp_path)
    result = swell(*arguments)
    assert_one_line(result.returncode, result.stderr, word)


def generate(case: str, tmp_path: Path) -> tuple[list[str], str]:
    """Returns the arguments of `swell generate`, and a word of its error."""
    change, setting, word = CASES_IN_ENGINE[case]
    longest = "model.max_model_len=1000" if "length" in case else ""
    return ["generate", broken(tmp_path, change), "hello", *sets(setting, longest)], word


def test_an_engine_that_cannot_load_stops_the_cluster(tmp_path):
    path = broken(tmp_path, unknown)
    marked = Cluster(path)
    try:
        assert marked.process.wait(timeout=HANG_S) == 1
        marked.assert_gone()
    finally:
        marked.kill()
    errors = [line for line in marked.lines if line.startswith("swell: ")]
    assert len(errors) == 1, marked.lines
    assert "whatisthis" in errors[0]


def refused_start(capsys: pytest.CaptureFixture[str], *arguments: str, words: str) -> None:
    """Asserts that `swell serve` is refused with these words before it starts anything. Runs in
    this process, which is faster."""
    code = main(["serve", str(NANO), *arguments])
    printed = capsys.readouterr()
    assert_one_line(code, printed.err, words)
    assert "starting Ray" not in printed.out and "ready" not in printed.out


def test_a_port_in_use_is_named_before_anything_is_started(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused_start(capsys, "--port", str(port), words=f"serve.port={port}")


def test_a_port_that_another_start_has_claimed_is_refused_before_anything_is_started(capsys):
    """Claims a port on which nothing listens yet, so that the port itself is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    claim = PortClaims().claim("127.0.0.1", port, "another start", os.getpid())
    words = f"in use by another application (another start, process {os.getpid()})"
    try:
        refused_start(capsys, "--port", str(port), words=words)
    finally:
        claim.release(ends=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_second_start_on_the_port_of_a_running_cluster_is_refused(cluster, capsys, host):
    """Checks the claim of the application as well, which holds even while no ingress listens."""
    port = str(cluster.port)
    refused_start(capsys, "--host", host, "--port", port, words=f"serve.port={port} on {host}")
    with pytest.raises(ConfigError, match="in use by another application"):
        PortClaims().check(host, cluster.port, lambda owner: owner.startswith("swell serve"))
    assert cluster.get("/health").status_code == 200


def test_ctrl_c_while_starting_leaves_nothing():
    cluster = Cluster(NANO)
    cluster.wait_for("starting Ray")
    time.sleep(1)
    cluster.stop()


def test_a_signal_to_the_process_group_stops_everything_in_order():
    """Sends SIGTERM to the process group, as `timeout` and shells do. Ray's processes must not be
    in the group: otherwise the GCS would exit before the shutdown, which needs it."""
    cluster = Cluster(NANO)
    cluster.wait_for("starting Ray")
    time.sleep(1)
    os.killpg(cluster.process.pid, signal.SIGTERM)
    try:
        assert cluster.process.wait(timeout=HANG_S) == 0, cluster.lines
        cluster.assert_gone()
    finally:
        cluster.kill()


def test_processes_of_ray_are_in_other_groups(cluster):
    groups = {pid: os.getpgid(pid) for pid in cluster.members()}
    assert len(groups) > 5
    own = cluster.process.pid
    assert [pid for pid, group in groups.items() if group == own] == [own]


def test_only_lines_of_swell_are_shown(cluster):
    ours = re.compile(r"starting |ready: |\[ *\d+\.\d s\] \S")
    assert cluster.lines and not [line for line in cluster.lines if not ours.match(line)]


_salts = map(str, itertools.count())


def stream(
    cluster: Cluster,
    tokens: int,
    results: list,
    until: threading.Event | None = None,
    rank: int | None = None,
) -> threading.Thread:
    """Streams a greedy answer in a thread and appends its ids to `results`; repeats this until
    `until` is set, if given. `rank` chooses the engine."""

    def read() -> None:
        read_one()
        while until is not None and not until.is_set():
            read_one()

    def read_one() -> None:
        body = {
            "model": "nano",
            "prompt": "count from 1 to 20",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "data_parallel_rank": rank,
            "cache_salt": next(_salts),  # with a common prefix all would be routed to one engine
        }
        ids: list[int] = []
        results.append(ids)  # also for an answer that fails
        with httpx.stream(
            "POST", cluster.url + "/v1/completions", json=body, timeout=HANG_S
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0]["token_ids"]

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def wait_for_engines(cluster: Cluster, count: int) -> dict:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        state = cluster.get("/admin/cluster").json()
        active = [engine for engine in state["engines"] if engine["state"] == "active"]
        if len(active) == count and state["rescale"]["phase"] == "idle":
            return state
        time.sleep(0.1)
    raise AssertionError(f"never {count} engines: {state}")


def wait_for_answers(results: list[list[int]], count: int) -> None:
    """Waits until `count` answers have begun."""
    deadline = time.monotonic() + HANG_S
    while sum(1 for ids in list(results) if ids) < count:
        assert time.monotonic() < deadline, "an answer has not begun"
        time.sleep(0.01)


def wait_for_work(cluster: Cluster, rank: int) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        engines = cluster.get("/admin/cluster").json()["engines"]
        if any(engine["rank"] == rank and engine["running"] for engine in engines):
            return
        time.sleep(0.05)
    raise AssertionError(f"engine {rank} never had work: {engines}")


def resubmitted(cluster: Cluster) -> float:
    text = cluster.get("/metrics").text
    return float(re.search(r"^swell_resubmitted_requests_total (\S+)", text, re.M).group(1))


def wait_for_moves(cluster: Cluster, moved: float) -> None:
    """Waits until more than `moved` requests were moved to another engine."""
    deadline = time.monotonic() + HANG_S
    while resubmitted(cluster) <= moved:
        assert time.monotonic() < deadline, "no request was moved"
        time.sleep(0.02)


@contextlib.contextmanager
def suspended_in_an_answer(
    cluster: Cluster, engine: dict, answers: list[list[int]]
) -> Iterator[None]:
    """Suspends an engine while it generates a long answer, which is appended to `answers`."""
    try:
        for attempt in range(100):
            thread = stream(cluster, LONG_TOKENS, answers, rank=engine["rank"])
            wait_for_answers(answers, attempt + 1)
            os.kill(engine["pid"], signal.SIGSTOP)
            thread.join(timeout=1)  # an answer that ended before the signal arrives meanwhile
            if thread.is_alive():
                break
            os.kill(engine["pid"], signal.SIGCONT)
        else:
            raise AssertionError("every answer ended before the engine was suspended")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine["pid"], signal.SIGCONT)
    thread.join()


@pytest.fixture(scope="module")
def undisturbed(cluster) -> list[int]:
    """The first tokens of every answer of `stream`."""
    results: list[list[int]] = []
    stream(cluster, TOKENS, results).join()
    assert len(results[0]) == TOKENS
    return results[0]


def test_a_stopped_engine_is_replaced_and_its_answer_continues(cluster, undisturbed):
    """There is no other engine. The state of the engine is saved before its process is killed."""
    held: list[list[int]] = []
    moved = resubmitted(cluster)
    (engine,) = wait_for_engines(cluster, 1)["engines"]
    with suspended_in_an_answer(cluster, engine, held):
        wait_for_moves(cluster, moved)
    assert len(held[-1]) == LONG_TOKENS and held[-1][:TOKENS] == undisturbed
    after = wait_for_engines(cluster, 1)
    assert after["engines"][0]["pid"] != engine["pid"]
    report = Path(after["hang_reports"][-1].partition(":")[2]).read_text()
    assert f"== engine (pid {engine['pid']}), hangs" in report and "state T" in report
    assert re.search(r"plan \d+: 1 rows, 1 tokens, epoch \d+", report)


def test_a_stopped_coordinator_is_restarted(cluster, undisturbed):
    """Suspends the coordinator: no engine waits for it, and answers go on. The next test scales
    with its successor."""
    results: list[list[int]] = []
    before = wait_for_engines(cluster, 1)
    moved = resubmitted(cluster)
    replaced = threading.Event()
    streams = [stream(cluster, TOKENS, results, until=replaced) for _ in range(3)]
    try:
        wait_for_answers(results, 3)
        os.kill(before["coordinator"]["pid"], signal.SIGSTOP)
        streams += [stream(cluster, TOKENS, results) for _ in range(2)]
        deadline = time.monotonic() + HANG_S
        stopped = before["coordinator"]["pid"]
        while cluster.get("/admin/cluster").json()["coordinator"]["pid"] == stopped:
            assert time.monotonic() < deadline, "it was not replaced"
            time.sleep(0.1)
    finally:
        replaced.set()
    for thread in streams:
        thread.join()
    assert len(results) >= 5 and all(ids == undisturbed for ids in results)
    assert resubmitted(cluster) == moved, "no engine was in its way"
    after = wait_for_engines(cluster, 1)
    assert after["epoch"] > before["epoch"]
    assert after["engines"][0]["pid"] == before["engines"][0]["pid"]


def test_the_cluster_grows_and_shrinks_while_answers_stream(cluster, undisturbed):
    long, held, results = list[list[int]](), list[list[int]](), list[list[int]]()
    before = wait_for_engines(cluster, 1)
    moved = resubmitted(cluster)
    streams = [stream(cluster, LONG_TOKENS, long) for _ in range(4)]
    assert cluster.post("/admin/scale", {"engines": 2}).status_code == 202
    grown = wait_for_engines(cluster, 2)
    assert grown["epoch"] > before["epoch"]
    shrunk = threading.Event()
    streams += [stream(cluster, TOKENS, results, until=shrunk) for _ in range(16)]
    newest = max(grown["engines"], key=lambda engine: engine["rank"])
    try:
        wait_for_work(cluster, newest["rank"])
        with suspended_in_an_answer(cluster, newest, held):
            body = {"engines": 1, "drain_timeout_s": 0}
            assert cluster.post("/admin/scale", body).status_code == 202
            wait_for_moves(cluster, moved)
        wait_for_engines(cluster, 1)
    finally:
        shrunk.set()
    for thread in streams:
        thread.join()
    assert len(results) >= 16 and all(ids == undisturbed for ids in results)
    assert len(long) == 4 and all(len(ids) == LONG_TOKENS for ids in long)
    assert all(ids == long[0] for ids in long + held) and long[0][:TOKENS] == undisturbed


def test_stored_responses_survive_the_manager_and_their_store_is_replaced(cluster):
    """Kills the manager, through which responses do not pass, and then the store: its responses are
    lost, and the next store works."""

    def replaced(name: str) -> None:
        (old,) = cluster.named(name)
        os.kill(old, signal.SIGKILL)
        if name == _MANAGER:
            assert read(kept)["status"] == "completed", "the store does not need the manager"
        deadline = time.monotonic() + HANG_S
        while cluster.named(name) in ([], [old]):
            assert time.monotonic() < deadline, f"no other {name}"
            time.sleep(0.1)

    def read(id: str) -> dict:
        return cluster.get(f"/v1/responses/{id}").json()

    def create() -> str:
        made = cluster.post("/v1/responses", {"model": "nano", "input": "reverse: kitten"}).json()
        return made["id"] if made["store"] else ""

    kept = create()
    replaced(_MANAGER)
    assert read(kept)["status"] == "completed"
    replaced(_STORE)
    deadline = time.monotonic() + HANG_S
    while not (again := create()):
        assert time.monotonic() < deadline, "the new store keeps nothing"
        time.sleep(0.5)
    assert read(again)["status"] == "completed"
    assert read(kept)["error"]["code"] == "response_not_found"
    wait_for_engines(cluster, 1)


def test_serve_run_deploys_the_same_app():
    """Runs `serve run` on a separate Ray; both Serve's proxy and our own port must answer."""
    binaries = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="swell-", dir="/tmp") as folder:
        own = {"RAY_TMPDIR": folder, "TMPDIR": folder}  # Ray's dashboard leaves a socket in TMPDIR
        process = subprocess.Popen(
            [binaries / "serve", "run", "swell.cluster.app:build", "config=configs/demo.yaml"],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=enable_sigint,
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        try:
            request_until_ready("http://127.0.0.1:8000", process)
            deadline = time.monotonic() + HANG_S
            shown = "the ingresses listen on port "
            while not (found := [line for line in list(lines) if shown in line]):
                assert time.monotonic() < deadline, "".join(lines)
                time.sleep(0.1)
            request_until_ready("http://127.0.0.1:" + found[0].split()[-1], process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=HANG_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            reader.join()


def request_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if HTTP.get(f"{url}/ready", timeout=HANG_S).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    body = {"model": "nano", "prompt": "upper: abc", "max_tokens": 5}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
