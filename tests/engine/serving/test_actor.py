"""The Ray actor of an engine, with Ray's tables stubbed: its address and its share of the host."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray

from swell.cluster.control.engines.actor_names import EngineName
from swell.configs.runtime import process
from swell.configs.runtime.gpus import VISIBLE_GPUS
from swell.configs.schema import Config, load
from swell.coordinator.manager_state import ManagerId, NotLeading
from swell.coordinator.transport.channel import make_keys
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import CoordinatorMessage
from swell.engine.serving import actor
from swell.engine.serving.actor_results import EngineReady, NewWeightsRefused
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest
from swell.worker import worker
from swell.worker.sampler_wire import SamplerParams
from tests.e2e.cluster import NANO
from tests.support.deadlines import HANG_S
from tests.support.weights.changed_weights import add_noise, copy_of, lose_a_tensor

PORTS = range(21_800, 21_832)
MANAGER = ManagerId("first", 1)
SUCCESSOR = ManagerId("second", 2)


def group(rank: int, node: str) -> dict[str, Any]:
    name = str(EngineName("swell-app", rank, "0" * 12, "1"))
    return {"name": name, "state": "CREATED", "bundles_to_node_id": {0: node}}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yields an engine on node `a`, with two others there; its coordinator is silent."""
    groups = {str(rank): group(rank, node) for rank, node in enumerate("aaab")}
    monkeypatch.setattr(actor, "placement_group_table", lambda: groups)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.255.255.1")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["6"])
    monkeypatch.setenv(VISIBLE_GPUS, "4,6")
    monkeypatch.setattr(actor, "find", lambda known, timeout_s: None)
    here = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    settings = {
        "model.device": "cpu",
        "cache.memory_bytes": 2_000_000,
        "cluster.interface": "lo",
        "cluster.ports": f"{PORTS[0]}-{PORTS[-1]}",
    }
    keys = make_keys()
    coordinator = ThreadRuntime().inbox(CoordinatorMessage, keys)
    kind = actor.EngineActor.__ray_metadata__.modified_class
    contact = CoordinatorContact(coordinator.address, keys, 1)
    made = kind(load(str(NANO), settings), 0, "1-a")
    made.contact = contact
    yield made
    made.stop(SUCCESSOR)
    coordinator.close()


def test_an_engine_listens_at_the_interface_and_has_its_share_of_the_host(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus: list[int] = []
    device_of = worker.device_of
    monkeypatch.setattr(
        worker, "device_of", lambda kind, gpu: (gpus.append(gpu), device_of(kind, gpu))[1]
    )
    ready = start(shell, shell._config, "1-a")
    host, _, port = ready.address.tcp.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1" and int(port) in PORTS[len(PORTS) // 4 :]
    assert shell._server.core.executor._worker.local_workers == 3
    assert ready.node == "a" and gpus == [1]


def test_an_engine_lists_the_phases_of_its_start(shell: Any, tmp_path: Path) -> None:
    ready = start(shell, shell._config, "1-a")
    names = [each.phase for each in ready.start]
    assert names[:2] == ["preparing the engine", "loading libraries"]
    assert names[-3:] == ["loading weights", "measuring memory", "allocating the KV cache"]
    blocks = ready.limits.num_blocks
    assert shell.status().text == f"allocating the KV cache, {blocks} of {blocks} blocks"
    folder = copy_of(tmp_path / "other")
    (reading,) = start(shell, with_weights(shell, folder), "2-b").start
    assert reading.phase == f"reading the weights of {folder}"


def start(shell: Any, config: Config, version: str) -> EngineReady:
    ready: EngineReady = shell.start(None, config, version, shell.contact)
    return ready


def with_weights(shell: Any, folder: Path) -> Config:
    model = msgspec.structs.replace(shell._config.model, path=str(folder))
    return msgspec.structs.replace(shell._config, model=model)


def answer(shell: Any, ready: EngineReady) -> list[int]:
    """Returns greedy tokens of the engine at this address."""
    keys = shell.contact.keys
    outlet = ThreadRuntime().outlet(ready.address, EngineCoreOutputs, keys)
    sampler = SamplerParams(temperature=0.0)
    outlet.send(EngineCoreRequest("r", [5, 6, 7, 8], sampler, max_tokens=24))
    tokens: list[int] = []
    while len(tokens) < 24:
        outputs = outlet.receive(HANG_S)
        assert outputs is not None, "no answer"
        tokens += [token for each in outputs.outputs for token in each.new_token_ids]
    outlet.close()
    return tokens


def test_a_reloaded_engine_has_a_new_incarnation(shell: Any, tmp_path: Path) -> None:
    """An engine that loads other weights gets another address, so that a client that has not
    noticed the change receives no output of the new weights."""
    folder = copy_of(tmp_path / "other", lambda tensors: add_noise(tensors, 1))
    first = start(shell, shell._config, "1-a")
    before = answer(shell, first)
    second = start(shell, with_weights(shell, folder), "2-b")
    assert (first.version, second.version, shell.adopt(MANAGER)) == ("1-a", "2-b", "2-b")
    assert second.incarnation != first.incarnation and second.address != first.address
    assert second.pid == first.pid and second.limits == first.limits
    after = answer(shell, second)
    assert after != before
    assert start(shell, with_weights(shell, folder), "2-b") == second
    third = start(shell, with_weights(shell, NANO), "3-c")
    assert answer(shell, third) == before
    assert shell.ended(0.0) is None
    watching = threading.Thread(target=shell.ended, args=(HANG_S,))
    watching.start()
    start(shell, with_weights(shell, folder), "4-d")
    watching.join(HANG_S / 2)
    assert not watching.is_alive(), "few calls may be under way at a time"


def test_a_server_that_cannot_be_created_stops_the_process(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot be created terminates the process. Otherwise a core would be left
    without a server, and the next `start` would load a second model next to it."""
    folder, ended = copy_of(tmp_path / "other"), threading.Event()
    monkeypatch.setattr(actor, "_EXIT_GRACE_S", 0.0)
    monkeypatch.setattr(process, "exit_process", lambda name, error: ended.set())
    start(shell, shell._config, "1-a")

    def no_port(*_args: Any, **_options: Any) -> None:
        raise OSError("no port is free")

    monkeypatch.setattr(actor, "EngineServer", no_port)
    core = shell._server.core
    with pytest.raises(OSError, match="no port is free"):
        start(shell, with_weights(shell, folder), "2-b")
    assert ended.wait(HANG_S)
    with pytest.raises(RuntimeError, match="has terminated"):
        start(shell, with_weights(shell, folder), "2-b")
    core.shutdown()


def test_an_engine_keeps_its_weights_if_new_ones_are_unusable(shell: Any, tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "broken", lose_a_tensor)
    before = answer(shell, first := start(shell, shell._config, "1-a"))
    with pytest.raises(NewWeightsRefused, match=r"norm\.weight"):
        start(shell, with_weights(shell, folder), "2-b")
    second = shell.ready()
    assert (
        second.version == shell.adopt(MANAGER) == "1-a" and second.incarnation != first.incarnation
    )
    assert answer(shell, second) == before
    assert start(shell, shell._config, "1-a") == second


def test_a_failed_or_hanging_engine_is_not_reloaded(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has failed or hangs loads no new weights: its process exits, and another one
    starts."""
    ended = threading.Event()
    monkeypatch.setattr(actor, "_EXIT_GRACE_S", 0.0)
    monkeypatch.setattr(process, "exit_process", lambda name, error: ended.set())
    start(shell, shell._config, "1-a")
    server, hangs, ends_now = shell._server, threading.Event(), threading.Event()

    async def hang() -> None:
        hangs.set()
        ends_now.wait()

    server._run_once = hang
    cluster = msgspec.structs.replace(shell._config.cluster, stall_timeout_s=0.1)
    shell._config = msgspec.structs.replace(shell._config, cluster=cluster)
    server._waker.wake()
    assert hangs.wait(HANG_S)
    with pytest.raises(RuntimeError, match="did not finish within cluster"):
        start(shell, with_weights(shell, tmp_path), "2-b")
    assert ended.wait(HANG_S) and shell.ended(0.0) is not None
    with pytest.raises(RuntimeError, match="has terminated: RuntimeError: its last step"):
        start(shell, with_weights(shell, tmp_path), "2-b")
    ends_now.set()
    shell._thread.join(HANG_S)


def suspend_loading(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Suspends each load. Returns two events: a load has begun, and loads may go on."""
    loading, may_load = threading.Event(), threading.Event()
    build = actor.build_executor

    def build_later(*args: Any, **options: Any) -> Any:
        loading.set()
        may_load.wait(HANG_S)
        return build(*args, **options)

    monkeypatch.setattr(actor, "build_executor", build_later)
    return loading, may_load


def test_an_engine_that_is_stopped_while_it_loads_does_not_serve(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives until Ray kills it. The next manager must not adopt the engine."""
    loading, may_load = suspend_loading(monkeypatch)
    errors: list[str] = []

    def load() -> None:
        try:
            start(shell, shell._config, "1-a")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    assert loading.wait(HANG_S)
    shell.stop(MANAGER)
    with pytest.raises(RuntimeError, match="engine 0 has terminated: it was stopped"):
        shell.adopt(MANAGER)
    may_load.set()
    thread.join(HANG_S)
    assert errors == ["engine 0 has terminated: it was stopped"] and shell._server is None


def test_an_engine_follows_the_coordinator_that_the_newest_manager_names(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator and the first manager are lost with their host while the engine loads."""
    loading, may_load = suspend_loading(monkeypatch)
    lost = msgspec.structs.replace(shell.contact.address, machine="lost", tcp="tcp://127.0.0.1:9")
    calls = [
        threading.Thread(target=shell.start, args=(None, shell._config, "1-a", contact))
        for contact in (msgspec.structs.replace(shell.contact, address=lost), shell.contact)
    ]
    calls[0].start()
    assert loading.wait(HANG_S)
    calls[1].start()
    until = time.monotonic() + HANG_S
    while shell._coordinator is not shell.contact and time.monotonic() < until:
        threading.Event().wait(0.005)
    may_load.set()
    for call in calls:
        call.join(HANG_S)
    assert shell._server._coordinator_client._address == shell.contact.address


def test_a_stopped_engine_has_no_version_for_the_next_manager(shell: Any) -> None:
    """A manager that was lost while it terminated this engine has left its process: the next
    manager must not adopt it."""
    start(shell, shell._config, "1-a")
    assert shell.adopt(MANAGER) == "1-a"
    shell.stop(MANAGER)
    for call in (lambda: shell.adopt(MANAGER), lambda: start(shell, shell._config, "1-a")):
        with pytest.raises(RuntimeError, match="engine 0 has terminated: it was stopped"):
            call()


def test_a_late_stop_of_an_earlier_manager_does_not_end_an_adopted_engine(shell: Any) -> None:
    start(shell, shell._config, "1-a")
    assert shell.adopt(SUCCESSOR) == "1-a"
    assert shell.adopt(MANAGER) == "1-a", "a late probe of the first manager"
    with pytest.raises(NotLeading, match="a later manager"):
        shell.stop(MANAGER)
    assert shell.ended(0.0) is None
    shell.stop(SUCCESSOR)
    assert shell.ended(0.0) == "it was stopped"
