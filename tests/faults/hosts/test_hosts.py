"""Hosts are lost, cut off and slowed as the faults describe, and the tool counts the effects on
readers."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swell.cluster.api.admin.protocol import ClusterState
from tests.cluster import fake_server
from tests.faults import __main__ as command
from tests.faults import load, trial
from tests.faults.cluster_monitor import NotReached
from tests.faults.fault_types import Fault, FaultEffect
from tests.faults.hosts import host_faults
from tests.faults.hosts import hosts as hosts_module
from tests.faults.hosts.host_cluster import HostCluster
from tests.faults.hosts.host_faults import HOST_FAULTS
from tests.faults.hosts.hosts import Hosts, HostsFailed
from tests.faults.load import Answer, Load, percentile
from tests.faults.moments import Moment
from tests.faults.report import Result
from tests.faults.trial import Hit
from tests.support.deadlines import HANG_S

ECHO = """
import socket
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("", 9))
print("listens", flush=True)
while True:
    data, sender = end.recvfrom(100)
    print(data.decode(), flush=True)
    end.sendto(data, sender)
"""


ASK = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.settimeout(1.0)
end.sendto(b"a host", (sys.argv[1], 9))
try:
    end.recv(100)
except TimeoutError:
    sys.exit(1)
"""


class BareHosts(Hosts):
    """The network of the hosts without Ray."""

    def start_ray(self, host: int) -> None:
        pass


class Echo:
    """A program on a host that answers packets and reports which arrived."""

    def __init__(self, hosts: Hosts, host: int) -> None:
        self._to = (hosts.addresses[host], 9)
        self.process = subprocess.Popen(
            [*hosts.prefix(host), sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True
        )
        assert self.arrived() == "listens"

    def arrived(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answers(self, text: str, limit_s: float = 0.3) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.settimeout(limit_s)
            end.sendto(text.encode(), self._to)
            try:
                return end.recv(100).decode() == text
            except TimeoutError:
                return False

    def must_answer(self, text: str) -> None:
        """Asserts an answer: at once, or when the kernel has found the route again."""
        assert any(self.answers(text) for _ in range(30))


@pytest.fixture
def bare() -> Iterator[Hosts]:
    if reason := hosts_module.refusal():
        pytest.skip(reason)
    with BareHosts(2) as hosts:
        yield hosts


def test_a_link_loses_one_direction_or_both_and_is_healed(bare: Hosts) -> None:
    echo = Echo(bare, 1)
    assert echo.answers("first", 30) and echo.arrived() == "first"
    bare.drop(1, "from")
    assert not echo.answers("heard") and echo.arrived() == "heard"
    bare.heal(1)
    bare.drop(1, "to")
    assert not echo.answers("unheard")
    bare.heal(1)
    assert echo.answers("again", 30) and echo.arrived() == "again"
    bare.cut(1)
    assert not echo.answers("cut")
    bare.heal(1)
    echo.must_answer("healed")
    assert echo.arrived() == "healed"


def test_parted_hosts_do_not_reach_each_other_and_clients_reach_both(bare: Hosts) -> None:
    echoes = [Echo(bare, host) for host in (0, 1)]
    for echo in echoes:
        echo.must_answer("first")
    assert reaches(bare, 0, 1)
    bare.part(0, 1)
    assert not reaches(bare, 0, 1)
    for echo in echoes:
        assert echo.answers("clients", 30)
    bare.heal(1)
    assert any(reaches(bare, 0, 1) for _ in range(30))


def reaches(hosts: Hosts, first: int, second: int) -> bool:
    """Whether a program on one host gets an answer of the echo server on another one."""
    words = (sys.executable, "-c", ASK, hosts.addresses[second])
    done = subprocess.run([*hosts.prefix(first), *words], timeout=HANG_S, check=False)
    return done.returncode == 0


def test_a_slow_link_passes_packets_at_its_rate(bare: Hosts) -> None:
    echo = Echo(bare, 1)
    bare.slow(1)
    began = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for _ in range(200):  # 200 kB take 0.8 s at 2 Mbit/s; the kernel makes the sender wait
            end.sendto(b"x" * 1000, (bare.addresses[1], 9))
        for _ in range(200):
            echo.arrived()
    assert time.monotonic() - began > 0.6
    bare.heal(1)
    echo.must_answer("fast")


def test_a_lost_host_sends_nothing_and_returns_empty(bare: Hosts) -> None:
    echo = Echo(bare, 1)
    assert bare.pids(1) == [echo.process.pid] and bare.named(1, "recvfrom")
    bare.lose(1)
    assert echo.process.wait(timeout=HANG_S) == -9
    assert not echo.answers("lost") and bare.pids(1) == [] and not bare.is_up(1)
    bare.boot(1)
    assert bare.is_up(1) and bare.pids(1) == []
    Echo(bare, 1).must_answer("back")


@pytest.mark.parametrize("keep", ["", "1"])
def test_a_returned_host_has_no_file_of_its_ray(
    bare: Hosts, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    monkeypatch.setenv("SWELL_KEEP_LOGS", keep)
    file = bare._folder / "1" / "ray_current_cluster"
    for _ in range(2):
        file.parent.mkdir()
        file.write_text("10.0.0.1:6379")
        bare.lose(1)
        bare.boot(1)
        assert not file.exists()
    assert len(list(bare._folder.glob("*/ray_current_cluster"))) == (2 if keep else 0)
    monkeypatch.delenv("SWELL_KEEP_LOGS")


# ---------------------------------------------------------------- faults


class FakeHosts(SimpleNamespace):
    """A fake that records what is done to hosts; each process is on the host that the test sets."""

    def __init__(self, where: dict[int, int]) -> None:
        super().__init__(addresses=["10.0.0.1", "10.0.0.2", "10.0.0.3"], keeps_gcs=False, done=[])
        self._where = where

    def pids(self, host: int) -> list[int]:
        return [pid for pid, where in self._where.items() if where == host]

    def __getattr__(self, name: str) -> Any:
        return lambda host, *way: self.done.append((name, host))


def state_of(coordinator: int, engines: list[int]) -> ClusterState:
    body: dict[str, Any] = {"epoch": 1, "wave": 0, "state": "serving", "target": len(engines)}
    body["engines"] = [
        {"rank": rank, "state": "active", "pid": pid} for rank, pid in enumerate(engines)
    ]
    body |= {"coordinator": {"pid": coordinator}, "rescale": {"phase": "idle"}}
    return msgspec.convert(body, ClusterState)


def monitor_of(hosts: FakeHosts) -> Any:
    cluster: Any = object.__new__(HostCluster)
    cluster.hosts, cluster.url = hosts, "http://10.0.0.1:80"
    return SimpleNamespace(cluster=cluster)


def test_faults_hit_the_host_that_they_name() -> None:
    hosts = FakeHosts({5: 1, 6: 1, 7: 2})
    monitor, state, rng = monitor_of(hosts), state_of(5, [6, 7]), random.Random(0)
    for name, host in (("cut-host", 2), ("cut-control-host", 1), ("cut-head", 0)):
        effect = asyncio.run(HOST_FAULTS[name].act(monitor, state, rng))
        assert hosts.done.pop() == ("cut", host)
        assert effect.unreached == {f"http://{hosts.addresses[host]}:80"}
        assert effect.victims == frozenset() and effect.lasts_s > 3
    effect = asyncio.run(HOST_FAULTS["kill-control-host"].act(monitor, state, rng))
    assert hosts.done.pop() == ("lose", 1) and effect.victims == {6}
    assert not asyncio.run(HOST_FAULTS["slow-host"].act(monitor, state, rng)).unreached


def test_only_a_head_with_kept_state_is_lost() -> None:
    hosts = FakeHosts({5: 1, 6: 1, 7: 2})
    monitor, state = monitor_of(hosts), state_of(5, [6, 7])
    with pytest.raises(NotReached, match="Redis"):
        asyncio.run(HOST_FAULTS["kill-head"].act(monitor, state, random.Random(0)))
    hosts.keeps_gcs = True
    effect = asyncio.run(HOST_FAULTS["kill-head"].act(monitor, state, random.Random(0)))
    assert hosts.done == [("lose", 0)] and effect.undo is not None


def test_faults_avoid_a_control_host_without_engines() -> None:
    monitor = monitor_of(FakeHosts({5: 0, 6: 1, 7: 2}))
    act = HOST_FAULTS["cut-control-host"].act
    with pytest.raises(NotReached, match="host 0"):
        asyncio.run(act(monitor, state_of(5, [6, 7]), random.Random(0)))


def test_a_storm_hits_another_host_if_the_head_has_the_coordinator() -> None:
    hosts = FakeHosts({5: 0, 6: 1, 7: 2})
    monitor = monitor_of(hosts)

    async def get_state() -> ClusterState:
        return state_of(5, [6, 7])

    async def inject() -> None:
        monitor.get_state = get_state
        running = Load(["http://10.0.0.1:80"], [], 1)
        record = trial._Record(monitor, running, random.Random(0), [], 0.0)
        await record.inject(HOST_FAULTS["kill-control-host"])
        assert record._undoing is not None
        record._undoing.cancel()

    asyncio.run(inject())
    ((what, host),) = hosts.done
    assert what == "lose" and host in (1, 2)


def test_coordinator_and_manager_are_moved_to_a_host_with_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Manager and coordinator are moved to a host with an engine: a killed manager restarts
    elsewhere, and a terminated coordinator restarts on its manager's host."""
    where = {5: 0, 6: 1, 7: 2, 9: 0}
    hosts = FakeHosts(where)
    monitor = monitor_of(hosts)
    done: list[str] = []

    async def get_state() -> ClusterState:
        return state_of(5, [6, 7])

    async def until_whole(*_args: Any) -> None:
        pass

    async def no_time(_seconds: float) -> None:
        pass

    def kill(pid: int, _number: int) -> None:
        done.append(f"manager {pid}")
        where[pid] = len(done)  # host 1, then host 2

    def end_coordinator() -> None:
        done.append("coordinator")
        where[5] = where[9]

    monitor.get_state, monitor.until_whole = get_state, until_whole
    monitor.cluster.named = lambda _part: [9]
    monitor.cluster.end_coordinator = end_coordinator
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(asyncio, "sleep", no_time)
    asyncio.run(host_faults._move_control(monitor))
    assert done == ["manager 9", "coordinator"] and where[5] == where[9] == 1
    monkeypatch.setattr(os, "kill", lambda *_: None)
    where[9] = 0
    with pytest.raises(NotReached, match="no other host"):
        asyncio.run(host_faults._move_control(monitor))


def test_only_the_loss_of_a_host_cuts_connections() -> None:
    assert {name for name, fault in HOST_FAULTS.items() if fault.cuts_connections} == {
        "kill-host",
        "kill-control-host",
        "kill-head",
    }
    assert all(
        (fault.prepare is not None) == ("control" in name or fault.needs_patience)
        for name, fault in HOST_FAULTS.items()
    )


def test_a_host_is_parted_only_from_the_head_and_no_process_may_be_killed() -> None:
    hosts = FakeHosts({5: 1, 6: 1, 7: 2})
    hosts.part = lambda first, second: hosts.done.append(("part", first, second))
    monitor, state = monitor_of(hosts), state_of(5, [6, 7])
    for seconds in (6, 15, 40):
        for kind, host in (("host", 2), ("control-host", 1)):
            fault = HOST_FAULTS[f"part-{seconds}-{kind}"]
            effect = asyncio.run(fault.act(monitor, state, random.Random(0)))
            assert hosts.done.pop() == ("part", 0, host)
            assert effect.expects_no_restart and not effect.unreached
            assert effect.lasts_s == seconds


def test_a_replica_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced replica is noticed, also one that is terminated some time after its host is
    reachable again."""
    monitor = monitor_of(FakeHosts({5: 1, 6: 1, 7: 2}))
    state = state_of(5, [6, 7])
    replicas = [11, 12]

    async def get_state() -> ClusterState:
        return state

    async def no_time(seconds: float) -> None:
        replicas[1:] = [13]
        assert seconds > 40, "TCP sends again after up to twice an outage"

    monitor.get_state, monitor.replicas = get_state, lambda: replicas
    monkeypatch.setattr(asyncio, "sleep", no_time)
    record = trial._Record(monitor, Load([], [], 1), random.Random(0), [], 0.0)
    effect = FaultEffect("parted", frozenset({2}), expects_no_restart=True, lasts_s=40.0)
    asyncio.run(record._check_kept(effect, {5, 6, 7, 11, 12}, state))
    assert record.problems == ["parted: processes [12] were replaced without need"]


@pytest.mark.parametrize("streaming", [1, 2])
def test_a_fault_of_a_row_hits_answers(monkeypatch: pytest.MonkeyPatch, streaming: int) -> None:
    monitor = monitor_of(FakeHosts({5: 1}))
    running = Load([], [], 4)
    record = trial._Record(monitor, running, random.Random(0), [], 0.0)
    hit: list[int] = []

    async def get_state(*_limit: float) -> ClusterState:
        return state_of(5, [6])

    async def act(*_cluster: object) -> FaultEffect:
        hit.append(running.streaming)
        raise NotReached("the end of this test")

    monitor.wait_for_state, monitor.replicas = get_state, list
    monkeypatch.setattr("tests.faults.moments.HANG_S", 0.0)
    running.open = {number: Answer(0, 1.0, chunks_s=[2.0]) for number in range(streaming)}
    asyncio.run(record.inject_and_wait(Fault("kill", act), 0.5))
    assert hit == ([2] if streaming == 2 else [])
    assert record.broken and ("streams in flight" in record.problems[0]) == (streaming < 2)


# ---------------------------------------------------------------- readers


def test_an_address_without_a_listener_is_skipped() -> None:
    with socket.socket() as closed, fake_server.running() as fake:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        request = load.LoadRequest(
            "/v1/completions", {"stream": True, "max_tokens": 2, "prompt": "a"}
        )

        async def work(urls: list[str]) -> list[Answer]:
            running = Load(urls, [request], 1)
            running.start(2)
            return await running.ended()

        answers = asyncio.run(work([dead, fake.url]))
        assert [(answer.url, answer.error) for answer in answers] == [(fake.url, None)] * 2
        (answer, _) = asyncio.run(work([dead]))
        assert answer.error is not None and answer.refused and not answer.cut


def test_the_wait_for_the_next_chunk_counts_reachable_readers() -> None:
    streaming = Answer(0, 1.0, url="a", chunks_s=[2.0, 3.0, 5.05, 9.0, 9.5])
    lost = Answer(1, 1.0, url="b", chunks_s=[2.0, 20.0])
    whole, ended = Answer(2, 1.0, url="a"), Answer(3, 1.0, url="a", chunks_s=[2.0])
    later = [Answer(4, 7.0 + n, url="a", chunks_s=[7.5 + n]) for n in range(4)]
    before = [streaming, lost, whole, ended]
    hit = Hit(5.0, before, frozenset({"b"}))
    assert hit.waits([*before, *later], streams=2) == [4.0]
    idle = Hit(5.0, [], frozenset())
    assert idle.waits([*before, *later], streams=2) == [0.5, 0.5], "the first of each stream"


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)


# ---------------------------------------------------------------- the command


def test_unspecified_options_select_everything_that_fits() -> None:
    def choose(*words: str) -> Any:
        args = command.parser().parse_args(words)
        command._choose(args)
        return args

    plain, over_hosts = choose(), choose("--hosts")
    assert {fault.name for fault in over_hosts.rows} == set(HOST_FAULTS)
    assert not {fault.name for fault in plain.rows} & set(HOST_FAULTS)
    assert {setup.name for setup in over_hosts.setups} == set(command.HOST_SETUPS)
    storm = {fault.name for fault in choose("--hosts", "--storm", "9").rows}
    assert {"kill-host", "half-cut-control-host", "kill-engine", "drain"} <= storm
    assert not {"kill-head", "nothing"} & storm
    assert choose("--set", "a.b=1").setups[0].settings[-1] == "a.b=1"


def test_cells_are_saved_when_they_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts = load.LoadResult(answers=9, failed=0, cut=0, wrong=0, pause_s=0.2, moved=1)
    path = tmp_path / "r.json"

    class FakeTrial(trial.Trial):
        def cell(self, fault: Fault, moment: Moment) -> trial.Cell:
            if path.exists():
                saved = msgspec.json.decode(path.read_bytes(), type=list[Result])
                assert [cell.fault for cell in saved[0].cells] == ["kill-engine"]
                raise SystemExit(7)
            return trial.Cell(fault.name, moment.name, [], 5, counts, 1.5, 0.2, 0.9, 3, [])

    monkeypatch.setattr(command, "Trial", FakeTrial)
    words = ["--setups", "dense", "--rows", "kill-engine", "--columns", "idle,decode"]
    with pytest.raises(SystemExit, match="7"):
        command.main([*words, "--json", str(path)])


def test_half_of_the_faults_of_a_host_storm_hit_hosts() -> None:
    args = command.parser().parse_args(["--hosts", "--storm", "200"])
    command._choose(args)
    faults = command.random_faults(args.rows, 200, seed=1)
    assert 80 < sum(fault.hits_host for fault in faults) < 120


def test_the_command_exits_if_hosts_may_not_be_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts_module, "refusal", lambda: "not here")
    with pytest.raises(HostsFailed, match="not here"):
        command._hosts()
    assert command.main(["--hosts"]) == 1
    assert "not here" in capsys.readouterr().err


def test_a_cluster_of_one_host_has_no_host_faults() -> None:
    with pytest.raises(NotReached, match="one host"):
        host_faults._cluster(SimpleNamespace(cluster=None))  # type: ignore[arg-type]
