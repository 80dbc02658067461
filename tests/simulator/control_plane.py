"""The real control plane on simulated hosts: ingresses from `AsyncLLM.submit` downward, engines
without tensors, the coordinator, the manager, and a simulated Ray."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_connection import EngineId, EngineListener
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient, MetricsExchange
from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutputKind
from swell.cluster.client.requests.request_state import RequestState
from swell.cluster.client.routing.admission import TooManyWaiting
from swell.cluster.client.routing.router import NoEngine
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.configs.schema import Config, load
from swell.coordinator.manager_state import ManagerId, ManagerState
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.wire import ClusterView, EngineHello
from swell.engine.serving.server import EngineServer
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.simulator.actors import SimCoordinator, SimEngine, SimManager, finder
from tests.simulator.groups import SimGroups
from tests.simulator.kernel.kernel import WORLD, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.kernel.runtime import SimRuntime
from tests.simulator.model import NumberDetokenizer
from tests.simulator.network.network import Network, NetworkOptions
from tests.simulator.operator import Operator
from tests.simulator.scenario import HOSTS, PATIENT_S, Request, Scenario
from tests.simulator.simulated_ray.node_provider import NodeProvider
from tests.simulator.simulated_ray.ray import SimRayCluster

STALL_TIMEOUT_S = 10.0
HEARTBEAT_S = 1.0
DRAIN_TIMEOUT_S = 5.0
MAX_ENGINES = 4

_NODE_RESTART_S = 2.0
"""The time from when a host that Ray has given up is reachable again until it is a new node."""
_RESTART_S = 1.0
"""The time until Serve has restarted a manager or an ingress."""
_POLL_S = 0.1


AUTOSCALING = {"queue_s": 0.05, "kv_usage": 0.05, "grow_after_s": 0.5, "shrink_after_s": 4.0}
"""Options with which the small load of a scenario changes the target."""


@functools.cache
def make_config(
    engines: int,
    expert: bool,
    autoscaled: bool = False,
    prefill_engines: int = 0,
    no_engine_timeout_s: float = PATIENT_S,
) -> Config:
    """Returns the configuration of a scenario. With `prefill_engines` the handover folder does not
    exist, so prompts are always computed twice."""
    return load(
        {
            "model": {"path": "none", "device": "cpu"},
            "parallel": {
                "data": engines,
                "expert": expert,
                "prefill_engines": prefill_engines,
                "prefill_min_tokens": 8,
            },
            "cache": {"block_tokens": 4, "handover_folder": "/nowhere"},
            "scheduler": {"max_rows": 8},
            "cluster": {
                "stall_timeout_s": STALL_TIMEOUT_S,
                "heartbeat_s": HEARTBEAT_S,
                "cpus_per_worker": 1.0,
                "drain_timeout_s": DRAIN_TIMEOUT_S,
                "max_engines": MAX_ENGINES,
            },
            "serve": {"no_engine_timeout_s": no_engine_timeout_s},
            "autoscaling": {"enabled": autoscaled, **AUTOSCALING},
        }
    )


class Usage:
    """Counts tokens and finished requests of an ingress."""

    def __init__(self) -> None:
        self.output_tokens = 0
        self.finished: list[Any] = []

    def record(self, stats: Any) -> None:
        self.finished += stats.finished
        self.output_tokens += stats.num_output_tokens

    def resubmitted(self) -> None: ...

    def refused(self, code: str) -> None: ...

    def counts(self) -> dict[str, list[float]]:
        return {"finished": [float(len(self.finished))]}

    def set_other_counts(self, counts: Any) -> None: ...


class SimRequest:
    """An accepted request, as its client sees it."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.token_ids: list[int] = []
        self.text = ""
        self.end: str | None = None
        self.ended_with_ingress = False
        self.was_aborted = False
        """Whether its client has given it up before its end."""
        self.waited_s = 0.0
        """How long it waited for the first engine of its ingress, if it was refused then."""
        self.state: RequestState | None = None
        """The state of the request in the ingress; None: not submitted, or refused."""

    async def follow(self, llm: AsyncLLM) -> None:
        request = EngineCoreRequest(
            f"r{self.number}",
            list(self.request.prompt),
            SamplerParams(seed=self.request.seed),
            self.request.max_tokens,
        )
        params = SamplingParams(max_tokens=self.request.max_tokens)
        try:
            kind = RequestOutputKind.DELTA
            self.state = state = llm.submit(request, params, kind)
            if (timeout_s := self.request.timeout_s) is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(timeout_s, llm.expire, [request.request_id], timeout_s)
            async for batch in MergedOutputs([state], params, kind):
                for _, output in batch:
                    [completion] = output.outputs
                    self.token_ids += completion.token_ids
                    self.text += completion.text
                    if output.finished:
                        self.finish(_reason_of(completion))
                    elif self.gives_up:
                        self.was_aborted = True
                        llm.abort([f"r{self.number}"])
        except Exception as error:
            self.finish(f"{type(error).__name__}: {error}")

    @property
    def gives_up(self) -> bool:
        after = self.request.gives_up_after
        return after is not None and len(self.token_ids) >= after

    def finish(self, reason: str) -> None:
        assert self.end is None, f"r{self.number} has ended twice: {self.end}, {reason}"
        self.end = reason


def _reason_of(completion: CompletionOutput) -> str:
    reason = str(completion.finish_reason)
    return reason if reason != "error" else f"error: {completion.stop_reason}"


class _ObservedLLM(AsyncLLM):
    """Shows the observers of a run each view of an ingress before it is applied."""

    def __init__(self, ingress: SimIngress, *args: Any) -> None:
        super().__init__(*args)
        self._ingress = ingress

    def on_view(self, view: ClusterView, lost: list[EngineId]) -> None:
        for call in self._ingress._plane.on_view:
            call(self._ingress, view)
        super().on_view(view, lost)


class SimIngress:
    """A replica of the ingress. Its requests are lost when it terminates."""

    def __init__(self, plane: ControlPlane, index: int) -> None:
        self.index, self._plane = index, plane
        self.usage = Usage()
        self.requests: list[SimRequest] = []
        host = plane.ray.living_host(HOSTS[index % len(HOSTS)])
        self.process = plane.new_process(f"ingress{index}", host)
        self.process.on_exit.append(self._on_exit)
        self.llm: AsyncLLM | None = None
        self.process.loop.create_task(self._open(), name="ingress")

    @property
    def coordinator_address(self) -> object:
        """The address of the coordinator that it follows."""
        client: Any = None if self.llm is None else self.llm._client
        return None if client is None else client._address

    def _on_exit(self, process: Process) -> None:
        """Finishes the requests, whose clients lose their connections; Serve starts another
        ingress."""
        for request in self.requests:
            if request.end is None:
                request.ended_with_ingress = True
                request.finish("its ingress died")
        self._plane.restart_ingress(self)

    async def _open(self) -> None:
        while (contact := self._plane.contact) is None:
            await asyncio.sleep(_POLL_S)
        runtime = SimRuntime(self.process, self._plane.net)

        def connect(
            client_index: int, listener: EngineListener, metrics: MetricsExchange, **periods: float
        ) -> AsyncEngineCoreClient:
            client = AsyncEngineCoreClient(
                contact.address,
                contact.keys,
                client_index,
                listener,
                metrics,
                **periods,
                runtime=runtime,
                find=finder(self._plane, self.process, contact),
            )
            send = client.send

            def observed_send(engine: EngineId, message: Any) -> None:
                for call in self._plane.on_send:
                    call(self, engine, message)
                send(engine, message)

            client.send = observed_send  # type: ignore[method-assign]
            return client

        self.llm = _ObservedLLM(
            self,
            NumberDetokenizer(),  # type: ignore[arg-type]
            self._plane.config,
            connect,
            self.usage,  # type: ignore[arg-type]
            lambda max_model_len, vocab_size: None,
            runtime,
        )

    def submit(self, request: SimRequest) -> None:
        """Accepts a request as soon as the ingress has opened."""
        self.requests.append(request)
        task = partial(self.process.loop.create_task, name=f"r{request.number}")
        self._plane.kernel.soon(self.process, lambda: task(self._submit(request)))

    async def _submit(self, request: SimRequest) -> None:
        while self.llm is None:
            await asyncio.sleep(_POLL_S)
        begun = self.process.time()
        try:
            await self.llm.wait_for_engine()
            self.llm.check_admission()
        except (NoEngine, TooManyWaiting) as error:
            request.waited_s = self.process.time() - begun
            request.finish(f"{type(error).__name__}: {error}")
        else:
            await request.follow(self.llm)


class Observers:
    """The functions that watch a run."""

    def __init__(self) -> None:
        self.on_view: list[Callable[[SimIngress, ClusterView], None]] = []
        """Called with each view that an ingress applies."""
        self.on_poison: list[Callable[[Process], None]] = []
        """Called when an engine computes a poison request."""
        self.on_leave: list[Callable[[list[int]], None]] = []
        """Called when a coordinator is told that engines must leave."""
        self.on_refused: list[Callable[[list[Member], str], None]] = []
        """Called when engines are not allowed to join: with the engines and the reason."""
        self.on_decided_keep: list[Callable[[SimManager, list[int]], None]] = []
        """Called when a manager tells the coordinator to keep engines that were leaving: with their
        ranks."""
        self.on_keep: list[Callable[[list[int]], None]] = []
        """Called when a coordinator has kept engines that were leaving."""
        self.on_detach: list[Callable[[list[int]], None]] = []
        """Called when a coordinator is told to detach engines."""
        self.on_roster: list[Callable[[Roster, Roster, frozenset[int]], None]] = []
        """Called when a coordinator changes its roster, with the old and the new one, and the ranks
        that it keeps although they were leaving."""
        self.on_command: list[Callable[[ManagerId, ManagerState], None]] = []
        """Called when a coordinator has executed a command: with the manager that sent it, and the
        manager's state that the coordinator knew."""
        self.on_kept: list[Callable[[SimCoordinator, ManagerState, ManagerState], None]] = []
        """Called when a coordinator has got a manager's state: with what it knew before, and what
        it knows now."""
        self.on_hello: list[Callable[[SimCoordinator, EngineHello], None]] = []
        """Called when a coordinator has handled an engine's hello."""
        self.on_send: list[Callable[[SimIngress, EngineId, Any], None]] = []
        """Called with each message from an ingress to an engine."""
        self.on_replace: list[Callable[[EngineServer, list[bytes]], None]] = []
        """Called when an engine learns that connections were replaced: with these connections."""
        self.on_grow: list[Callable[[SimManager, list[str]], None]] = []
        """Called when a manager is about to start engines, before it checks that it leads: with
        their names."""
        self.on_begin: list[Callable[[SimManager, int], None]] = []
        """Called when a manager accepts a request: with the target that follows."""
        self.on_reconcile: list[Callable[[SimManager], None]] = []
        """Called when a manager is about to make a plan."""
        self.on_failed_change: list[Callable[[SimManager, int], None]] = []
        """Called when a requested engine has not started, and the change has failed: with the
        target that follows."""
        self.on_request: list[Callable[[SimManager, str], None]] = []
        """Called when a manager gets a request of an operator, with its kind."""
        self.on_answer: list[Callable[[SimManager, str, Exception | None], None]] = []
        """Called when a manager answers a request: with its kind, and the error if it failed."""


class ControlPlane(Observers):
    """Holds all parts of a scenario except its faults."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.kernel = Kernel(scenario.seed)
        self.config = make_config(
            scenario.engines,
            scenario.expert,
            scenario.autoscaled,
            scenario.prefill_engines,
            scenario.no_engine_timeout_s,
        )
        self.net = Network(self.kernel, NetworkOptions.with_silence(STALL_TIMEOUT_S))
        self.groups = SimGroups(self.kernel, self.net)
        self.load_times = self.kernel.random("load")
        self.engines: list[SimEngine] = []
        """Engines of all starts, alive or not."""
        self.coordinators: list[tuple[Process, SimCoordinator]] = []
        self.resources: dict[str, dict[str, float]] = {
            host: {"CPU": float(room)} for host, room in zip(HOSTS, scenario.rooms, strict=True)
        }
        """The resources of each host, which a new node on it would have, too."""
        if scenario.autoscaled:
            self.resources |= {host: {} for host in HOSTS[1:]}
        self.ray = SimRayCluster(
            self.kernel,
            self.net,
            self.resources,
            partial(SimEngine, self),
            partial(SimCoordinator, self),
        )
        self.contact: CoordinatorContact | None = None
        self.deployed = 0
        """The weights in the configuration with which Serve starts a manager."""
        self.num_redeploys = 0
        self.operator = Operator(self)
        self.provider = NodeProvider(self) if scenario.autoscaled else None
        self.manager = self._new_manager()
        self.past_ingresses: list[SimIngress] = []
        self.ingresses = [SimIngress(self, index) for index in range(scenario.ingresses)]
        self.requests = [SimRequest(*item) for item in enumerate(scenario.requests)]
        for request in self.requests:
            self.kernel.at(request.request.at, WORLD, self._submit, request)
        self.net.on_change.append(self._look_at_hosts)

    def new_process(self, name: str, host: str) -> Process:
        return self.ray.new_process(name, host)

    def _new_manager(self) -> SimManager:
        host = self.ray.living_host(self.scenario.control_host)
        manager = SimManager(self, self.new_process("manager", host))
        manager.process.on_exit.append(self._on_manager_exit)
        self.kernel.at(self.kernel.now + _POLL_S, WORLD, self._look_for_contact)
        return manager

    def _on_manager_exit(self, process: Process) -> None:
        if process is not self.manager.process:  # another manager has replaced it
            return
        self.kernel.at(self.kernel.now + _RESTART_S, WORLD, self._restart_manager)

    def _restart_manager(self) -> None:
        """Starts a manager. If its host is lost, Serve has another host only after Ray has noticed
        the loss."""
        if self.ray.living_host(self.scenario.control_host) in self.ray.lost_hosts:
            self.kernel.at(self.kernel.now + _RESTART_S, WORLD, self._restart_manager)
            return
        self.manager = self._new_manager()

    def replace_manager(self) -> None:
        """Makes Serve start another manager, whether or not this one terminates."""
        self.manager = self._new_manager()

    def redeploy(self, weights: int) -> None:
        """Makes Serve replace the manager with one that has another configuration."""
        self.deployed = weights
        self.num_redeploys += 1
        self.manager.process.kill()

    def _look_for_contact(self) -> None:
        if self.manager.has_started:
            self.contact = self.manager.contact
        elif self.manager.process.alive:
            self.kernel.at(self.kernel.now + _POLL_S, WORLD, self._look_for_contact)

    def _submit(self, request: SimRequest) -> None:
        """Submits a request, or tries again later if the ingress is not running."""
        ingress = self.ingresses[request.request.ingress]
        if ingress.process.alive:
            ingress.submit(request)
        else:
            self.kernel.at(self.kernel.now + _POLL_S, WORLD, self._submit, request)

    def restart_ingress(self, ingress: SimIngress) -> None:
        self.past_ingresses.append(ingress)

        def restart() -> None:
            if self.ray.living_host(HOSTS[ingress.index]) in self.ray.lost_hosts:
                self.kernel.at(self.kernel.now + _POLL_S, WORLD, restart)
            else:
                self.ingresses[ingress.index] = SimIngress(self, ingress.index)

        self.kernel.at(self.kernel.now + _RESTART_S, WORLD, restart)

    def _look_at_hosts(self) -> None:
        """Adds hosts that Ray has given up as new nodes, some seconds after they are reachable
        again."""
        for host in HOSTS:
            if host in self.ray.lost_hosts:
                continue
            if host not in self.ray.nodes and not self.net.is_blocked(host, HOSTS[0]):
                self.kernel.at(self.kernel.now + _NODE_RESTART_S, WORLD, self._restore, host)

    def _restore(self, host: str) -> None:
        if (
            host in self.ray.nodes
            or host in self.ray.lost_hosts
            or self.net.is_blocked(host, HOSTS[0])
        ):
            return
        if self.ray.away:
            self.kernel.at(self.kernel.now + _NODE_RESTART_S, WORLD, self._restore, host)
        else:
            self.ray.restore_host(host, self.resources[host])

    @property
    def living_engines(self) -> list[SimEngine]:
        return [engine for engine in self.engines if engine.process.alive]

    @property
    def changing_engines(self) -> list[SimEngine]:
        """Living engines that load, leave or replace a worker, as the coordinator knows."""
        members = () if self.coordinator is None else self.coordinator.members
        active = {m.incarnation for m in members if m.state is MemberState.ACTIVE}
        return [
            engine
            for engine in self.living_engines
            if engine.server is None or engine.server.incarnation not in active
        ]

    @property
    def coordinator(self) -> SimCoordinator | None:
        """The newest coordinator, if it is alive."""
        if not self.coordinators or not self.coordinators[-1][0].alive:
            return None
        return self.coordinators[-1][1]

    def close(self) -> None:
        for process in self.ray.processes.values():
            process.close()
