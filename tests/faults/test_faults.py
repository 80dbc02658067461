"""The comparison of answers is strict and fair, tested with servers that fail in known ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swell.cluster.api.admin.protocol import ClusterState
from tests.cluster import fake_server
from tests.cluster.fake_server import FakeServer
from tests.faults import __main__ as command
from tests.faults import fault_types, load, moments, report
from tests.faults.cluster_monitor import NotReached
from tests.faults.fault_types import Fault, FaultEffect
from tests.faults.load import DECODE, PREFILL, Answer, Load, compare, make_requests, reference
from tests.faults.process import alive, listeners, title
from tests.faults.report import Result
from tests.faults.trial import Cell
from tests.support.deadlines import HANG_S

REQUESTS = make_requests("fake", 12, load.Shape((2, 5), (3, 9)), seed=3)


class WholeServer(FakeServer):
    """A server that also returns answers without streaming, with the text of its streams."""

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return await super()._complete(request)
        self.requests.append(body)
        text = "ab " * body["max_tokens"]
        prompt = len(body.get("prompt", [1]))
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        choice: dict[str, Any] = {"text": text}
        if "messages" in body:
            choice = {"message": {"content": text}}
        choice |= fake_server.logprobs_of(body, body["max_tokens"])
        return JSONResponse(
            {"choices": [choice], "usage": usage}, headers={"x-swell-engine": "0,1"}
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(fake_server, "FakeServer", WholeServer)
    with fake_server.running() as server:
        yield server


async def answers_of(url: str, streams: int, rounds: int) -> list[Answer]:
    running = Load([url], REQUESTS, streams)
    running.start(rounds)
    return await running.ended()


def right_answers(fake: FakeServer) -> list[Answer]:
    return asyncio.run(reference(fake.url, REQUESTS))


# ---------------------------------------------------------------- requests


def test_requests_are_the_same_for_a_seed_and_of_every_kind() -> None:
    requests = make_requests("m", 60, DECODE, seed=1)
    assert (
        requests == make_requests("m", 60, DECODE, seed=1) != make_requests("m", 60, DECODE, seed=2)
    )
    for request in requests:
        assert ("messages" in request.body) == request.path.endswith("chat/completions")
        if "seed" in request.body:
            assert 0.8 <= request.body["temperature"] <= 1
        else:
            assert request.body["temperature"] == 0
        if "logprobs" in request.body:
            assert ("top_logprobs" in request.body) == ("messages" in request.body)
    asked = {
        (request.path, bool(request.body.get("stream")), request.body["temperature"] == 0)
        for request in requests
        if "logprobs" in request.body
    }
    assert len(asked) == 8, "log probabilities, with each of the others"
    fields = ("messages", "seed", "stop", "stream")
    kinds = [tuple(field in request.body for field in fields) for request in requests]
    assert len(set(kinds)) == 16, "each with each"
    assert [sum(column) for column in zip(*kinds, strict=True)] == [30, 30, 12, 40]


def test_sizes_stay_in_their_ranges() -> None:
    for shape in (DECODE, PREFILL):
        low, high = shape.output_tokens
        requests = make_requests("m", 50, shape, seed=0)
        assert all(low <= request.body["max_tokens"] <= high for request in requests)
        assert max(len(json.dumps(request.body)) for request in requests) + high < 2048, (
            "nano's limit, in bytes"
        )


# ---------------------------------------------------------------- answers


def test_every_form_of_answer_is_read_whole(fake: FakeServer) -> None:
    right = right_answers(fake)
    for request, answer in zip(REQUESTS, right, strict=True):
        assert answer.text == "ab " * request.body["max_tokens"]
        assert answer.usage is not None and answer.usage[1] == request.body["max_tokens"]
        assert bool(answer.chunks_s) == bool(request.body.get("stream"))
        count = request.body["max_tokens"] if "logprobs" in request.body else 0
        assert answer.logprobs == [[-0.25, -0.125, -2.5]] * count
        assert answer.engines in ("0", "0,1")


def test_a_healthy_server_has_no_wrong_answers_and_all_streams_are_busy(
    fake: FakeServer,
) -> None:
    right = right_answers(fake)
    answers = asyncio.run(answers_of(fake.url, streams=6, rounds=4))
    result = compare(right, answers)
    assert (result.answers, result.failed, result.cut, result.wrong) == (
        24,
        0,
        0,
        0,
    )
    assert result.moved == sum("," in answer.engines for answer in answers) > 0
    assert result.pause_s > 0 and result.examples == []


def test_refused_requests_count_as_failed(fake: FakeServer) -> None:
    right = right_answers(fake)
    fake.requests.clear()
    fake.fail_every = 3
    streamed = [a for a in REQUESTS if a.body.get("stream")]
    running = Load([fake.url], streamed, 1)

    async def work() -> list[Answer]:
        running.start(9)
        return await running.ended()

    result = compare([right[REQUESTS.index(request)] for request in streamed], asyncio.run(work()))
    assert (result.answers, result.failed, result.cut) == (9, 3, 0)
    assert "503" in result.examples[0]


def test_a_stream_without_its_end_counts_as_failed(fake: FakeServer) -> None:
    right = right_answers(fake)
    fake.cut_short = True
    streamed = sum(bool(request.body.get("stream")) for request in REQUESTS)
    result = compare(right, asyncio.run(answers_of(fake.url, len(REQUESTS), 1)))
    assert (result.failed, result.cut, result.wrong) == (streamed, 0, 0)


def test_a_closed_loop_runs_until_finish(fake: FakeServer) -> None:
    async def work() -> tuple[int, int, int]:
        running = Load([fake.url], REQUESTS, 4)
        running.start()
        while len(running.answers) < 30:
            assert len(running.open) <= 4
            await asyncio.sleep(0.001)
        busy = len(running.open)
        assert running.busy
        answers = len(await running.finish())
        assert not running.busy
        return busy, answers, len(running.open)

    busy, answers, left = asyncio.run(work())
    assert busy > 0 and answers >= 30 + busy and left == 0


def test_every_stream_of_a_burst_waits_for_the_next_burst(fake: FakeServer) -> None:
    async def answers(burst_every_s: float, count: int) -> Load:
        running = Load([fake.url], REQUESTS, 4, burst_every_s)
        running.start()
        while len(running.answers) < count:
            await asyncio.sleep(0.001)
        return running

    async def first_burst() -> tuple[bool, int]:
        running = await answers(1e6, 4)
        return running.busy, len(running.open)

    async def several_bursts() -> int:
        return len(await (await answers(0.05, 12)).finish())

    assert asyncio.run(first_burst()) == (True, 0)
    assert asyncio.run(several_bursts()) >= 12


def cut_server(head: bytes) -> AsyncIterator[str]:
    """Returns a function that runs a server which sends `head` and resets the connection."""

    async def run() -> AsyncIterator[str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    return run()


@pytest.mark.parametrize(("text", "wrong"), [("ab", 0), ("xy", 1), ("", 0)])
def test_a_cut_connection_is_counted_and_its_partial_answer_checked(text: str, wrong: int) -> None:
    chunk = b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (
        len(chunk),
        chunk,
    )
    request = load.LoadRequest("/v1/completions", {"stream": True})

    async def work() -> list[Answer]:
        async for url in cut_server(head):
            running = Load([url], [request], 1)
            running.start(1)
            return await running.ended()
        raise AssertionError

    expected = Answer(0, 0.0, text="ab ab", finish_reason="length", usage=(1, 2))
    result = compare([expected], asyncio.run(work()))
    assert (result.failed, result.cut, result.wrong) == (0, 1, wrong)


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_a_server_that_dies_while_a_client_connects_cuts_the_connection(
    monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """A server that dies while a client connects cuts the connection, because its kernel had
    accepted it. Without a listener there is no connection to cut."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    connect = BaseSelectorEventLoop._sock_connect  # type: ignore[attr-defined]

    def connect_and_die(*args: Any) -> None:
        connect(*args)
        listener.close()

    if dies == "before":
        listener.close()
    monkeypatch.setattr(BaseSelectorEventLoop, "_sock_connect", connect_and_die)

    async def work() -> list[Answer]:
        running = Load([url], [load.LoadRequest("/v1/completions", {})], 1)
        running.start(1)
        return await running.ended()

    (answer,) = asyncio.run(work())
    assert answer.error is not None and answer.error.startswith("ConnectError")
    assert answer.cut == (dies == "meanwhile"), answer.error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "abc"),
        ("finish_reason", "stop"),
        ("usage", (1, 3)),
        ("logprobs", [[-0.5], [-1.0000000000000002]]),
        ("logprobs", [[-0.5]]),
    ],
)
def test_each_field_is_compared(name: str, value: object) -> None:
    def answer() -> Answer:
        logprobs: list[list[float | None]] = [[-0.5], [-1.0]]
        return Answer(0, 0.0, "", "abd", "length", (1, 2), logprobs)

    other = answer()
    assert compare([answer()], [other]).wrong == 0
    setattr(other, name, value)
    result = compare([answer()], [other])
    assert result.wrong == 1
    assert name in result.examples[0]


@pytest.mark.parametrize(
    ("logprobs", "wrong"), [([], 0), ([[-0.5]], 0), ([[-0.5], [-1.5]], 1), ([[-0.5]] * 3, 1)]
)
def test_log_probabilities_of_a_cut_answer_must_be_right(
    logprobs: list[list[float | None]], wrong: int
) -> None:
    expected = Answer(0, 0.0, text="ab", logprobs=[[-0.5], [-1.0]])
    got = Answer(0, 0.0, text="a", logprobs=logprobs, error="ReadError", cut=True)
    assert compare([expected], [got]).wrong == wrong


def test_the_longest_pause_counts_from_the_request_to_the_end() -> None:
    assert Answer(0, 1.0, chunks_s=[1.5, 4.0], ended_s=4.5).pause_s == 2.5
    assert Answer(0, 1.0, chunks_s=[9.0], ended_s=9.1).pause_s == 8.0
    assert Answer(0, 1.0, chunks_s=[1.5], ended_s=5.5).pause_s == 4.0
    assert Answer(0, 1.0, ended_s=9.0).pause_s == 0, "a whole answer is read at once"


# ---------------------------------------------------------------- faults


def state_of(pid: int) -> ClusterState:
    worker = {"rank": 0, "tensor": 0, "pipeline": 0, "pid": pid, "status": "ready"}
    engine = {"rank": 0, "state": "active", "pid": pid, "workers": [worker]}
    body: dict[str, Any] = {"epoch": 1, "wave": 0, "state": "serving", "target": 1}
    body |= {"engines": [engine], "coordinator": {"pid": pid}, "rescale": {"phase": "idle"}}
    return msgspec.convert(body, ClusterState)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def condition(pid: int) -> str:
    """Returns R, S, T (stopped) or Z, as the kernel reports it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("kind", ["engine", "worker", "coordinator"])
def test_signals_have_the_effect_of_their_names(
    kind: str, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_types, "_SLOW_S", 0.01)
    pid, none = sleeper.pid, msgspec.UNSET
    effects: dict[str, FaultEffect] = {}
    for action in ("slow", "stop", "kill"):
        act = fault_types.FAULTS[f"{action}-{kind}"].act
        effects[action] = asyncio.run(act(none, state_of(pid), random.Random(0)))  # type: ignore[arg-type]
        if action == "slow":
            assert condition(pid) != "T"
        if action == "stop":
            os.waitpid(pid, os.WUNTRACED)
            assert condition(pid) == "T"
    assert sleeper.wait(timeout=HANG_S) == -signal.SIGKILL
    assert not alive(pid)
    assert (effects["slow"].expects_no_restart, effects["slow"].victims) == (True, frozenset())
    assert [effects[action].victims for action in ("stop", "kill")] == [{pid}, {pid}]
    assert all(effect.targets == {1} and str(pid) in effect.text for effect in effects.values())


def test_processes_killed_together_are_all_found_before_the_first_signal(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that are killed together are all found before the first signal: they die at the
    same instant, and each must have a successor."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    state = state_of(sleeper.pid)

    def named(part: str) -> list[int]:
        assert alive(sleeper.pid), "the engine was hit before the manager was found"
        return [other.pid]

    monitor: Any = SimpleNamespace(cluster=SimpleNamespace(named=named))
    act = fault_types.FAULTS["kill-engine+manager"].act
    try:
        effect = asyncio.run(act(monitor, state, random.Random(0)))
        assert effect.victims == {sleeper.pid, other.pid}
        assert (sleeper.wait(timeout=HANG_S), other.wait(timeout=HANG_S)) == (-9, -9)
    finally:
        other.kill()
        other.wait()


def test_each_set_of_kills_is_a_row() -> None:
    sets = [fault for name, fault in fault_types.FAULTS.items() if "+" in name]
    assert {"kill-engine+manager", "kill-engines+manager+coordinator"} <= {e.name for e in sets}
    assert all(fault.cuts_connections == ("ingress" in fault.name) for fault in sets)


def test_zombies_are_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    assert alive(sleeper.pid) and "time.sleep" in title(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(sleeper.pid)


def test_listeners_of_a_shared_port_are_counted() -> None:
    with contextlib.ExitStack() as stack:
        first, *others = (stack.enter_context(socket.socket()) for _ in range(3))
        for sock in (first, *others):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        for count, sock in enumerate((first, *others)):
            if sock is not first:
                sock.bind(("127.0.0.1", port))
            assert listeners(port) == count, "one that is only bound is none"
            sock.listen()
        assert listeners(port) == 3
    assert listeners(port) == 0


def test_a_victim_that_does_not_exist_is_not_reached() -> None:
    state = state_of(1)
    state = msgspec.structs.replace(state, coordinator=msgspec.convert({}, type(state.coordinator)))
    with pytest.raises(NotReached):
        asyncio.run(fault_types.FAULTS["kill-coordinator"].act(None, state, random.Random(0)))  # type: ignore[arg-type]


def test_a_soak_is_deterministic_and_stays_near_its_size() -> None:
    known = list(fault_types.FAULTS.values())
    faults = command.random_faults(known, 300, seed=1)
    assert (
        faults == command.random_faults(known, 300, seed=1) != command.random_faults(known, 300, 2)
    )
    assert sizes_of(faults) == {-1, 0, 1}
    assert sizes_of(command.random_faults(known, 300, seed=1, most=0)) == {-1, 0}


def sizes_of(faults: list[Fault]) -> set[int]:
    """Returns by how many engines the size differs from the first after each fault."""
    change = {"scale-up": 1, "scale-down": -1, "drain": -1}
    return set(itertools.accumulate(change.get(fault.name, 0) for fault in faults))


def test_cells_that_cannot_exist_are_left_out() -> None:
    rows, columns = list(fault_types.FAULTS.values()), list(moments.MOMENTS.values())
    dense = {(fault.name, when.name) for fault, when in command.cells(rows, columns, waves=False)}
    every = {(fault.name, when.name) for fault, when in command.cells(rows, columns, waves=True)}
    assert ("drain", "decode") in dense and ("drain", "rescale-commit") not in every
    assert ("kill-engine", "rescale-commit") in dense
    assert {when for _, when in every - dense} == {"wave-start", "wave-end"}


# ---------------------------------------------------------------- reports


def result(failed: int) -> Result:
    counts = load.LoadResult(answers=9, failed=failed, cut=0, wrong=0, pause_s=0.25, moved=1)
    cell = Cell("kill-engine", "decode", ["kill"], 5, counts, 1.5, 0.2, 0.9, 3, [])
    return Result("dense", ["a.b=1"], [cell])


def test_a_page_changes_only_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- dense -->\nold\n<!-- end -->\ntail\n<!-- end -->\n")
    for _ in range(2):
        report.write_markdown(str(page), [result(0)])
        text = page.read_text()
        assert text.startswith("head\n<!-- dense -->\n`a.b=1`")
        assert text.endswith("|\n<!-- end -->\ntail\n<!-- end -->\n")
        assert "old" not in text and text.count("| kill-engine | decode |") == 1
    with pytest.raises(ValueError, match="expert"):
        report.write_markdown(str(page), [msgspec.structs.replace(result(0), setup="expert")])


def test_results_are_good_or_not_and_read_back(tmp_path: Path) -> None:
    assert result(0).good and not result(1).good
    assert not msgspec.structs.replace(result(0), problem="left a process").good
    assert report.rows(result(1).cells)[0][-1] == "FAILED"
    path = tmp_path / "r.json"
    report.write_json(str(path), [result(2)])
    assert msgspec.json.decode(path.read_bytes(), type=list[Result]) == [result(2)]


def test_the_page_of_this_repository_has_every_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab" / "fault-matrix.md").read_text()
    for name in (*command.SETUPS, *command.HOST_SETUPS):
        assert page.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[1]


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--rows", "--columns", "--setups"):
        with pytest.raises(SystemExit):
            command.main([option, "what"])
        shown = capsys.readouterr().err
        assert "no " in shown and "'what'" in shown
        assert any(name in shown for name in ("kill-engine", "decode", "dense"))
