"""The real control plane with a thousand engines: `tests/simulator` with metered processes.

Manager, coordinator and ingresses are real, from `AsyncLLM.submit` downward. Engines are real
except for their model. HTTP, tokenization and Ray are not measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from swell.cluster.client.metrics import PrometheusStats
from swell.configs.schema import Config, load
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.engine.executor import ExecutorLimits, Progress
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
from tests.simulator.actors import SimCoordinator, SimEngine
from tests.simulator.control_plane import ControlPlane, Observers, SimIngress
from tests.simulator.groups import SimGroups
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.model import SimExecutor, SimStep, next_token
from tests.simulator.network.network import Network, NetworkOptions
from tests.simulator.operator import Operator
from tests.simulator.scale.channel_costs import ChannelCosts
from tests.simulator.scale.meter import MeteredProcess
from tests.simulator.scale.turns import TurnRuntime
from tests.simulator.scenario import HOSTS, Scenario
from tests.simulator.simulated_ray.ray import SimRayCluster

STEP_S, TOKEN_S = 0.040, 2e-5
"""Seconds of a decode step of a large model, and additional seconds for each of its tokens."""
NUM_BLOCKS, MAX_MODEL_LEN, VOCABULARY = 16_384, 8_192, 1 << 16


def make_config(engines: int, ingresses: int) -> Config:
    """Returns the default configuration for this many engines and ingresses."""
    return load(
        {
            "model": {"path": "none", "device": "cpu"},
            "parallel": {"data": engines},
            "cluster": {"max_engines": engines, "cpus_per_worker": 1.0},
            "serve": {"ingress_replicas": ingresses, "max_waiting_requests": 1_000_000},
        }
    )


class ScaleStats(PrometheusStats):
    """Records when requests continue on other engines."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self.resubmitted_at: list[float] = []

    def resubmitted(self) -> None:
        super().resubmitted()
        self.resubmitted_at.append(self._kernel.now)


class ScaleExecutor(SimExecutor):
    """An executor of a larger and slower model."""

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        return ExecutorLimits(NUM_BLOCKS, MAX_MODEL_LEN, VOCABULARY)

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        sampled = [
            next_token(slot, start + count, 0)
            for slot, start, count, samples in zip(
                plan.slots, plan.starts, plan.num_tokens, plan.samples, strict=True
            )
            if samples
        ]
        at = max(self.process.time(), self._free_at) + STEP_S + TOKEN_S * sum(plan.num_tokens)
        self._free_at = at
        return SimStep(self, ModelRunnerOutput(plan.step, sampled), at)

    _free_at = 0.0


class ScaleEngine(SimEngine):
    def __init__(self, plane: ScalePlane, process: Process, *others: Any) -> None:
        super().__init__(plane, process, *others)
        self.executor = ScaleExecutor(process)


class ScaleIngress(SimIngress):
    def __init__(self, plane: ScalePlane, index: int) -> None:
        super().__init__(plane, index)
        self.usage = ScaleStats(plane.kernel)  # type: ignore[assignment]


class ScaleCoordinator(SimCoordinator):
    """A coordinator whose loop waits like a thread, without asyncio tasks."""

    runtime_class = TurnRuntime


class MeteredRay(SimRayCluster):
    costs: ChannelCosts

    def new_process(self, name: str, host: str) -> Process:
        process = super().new_process(name, host)
        if name.startswith("swell-"):
            return process
        metered = MeteredProcess(self.kernel, process.name, host, self.costs)
        self.processes[self.pid_of(process)] = metered
        return metered


class ScalePlane(ControlPlane):
    """Holds all parts of a scale run except the traffic."""

    def __init__(self, engines: int, ingresses: int, seed: int, costs: ChannelCosts) -> None:
        Observers.__init__(self)
        self.scenario = Scenario(seed, engines, ingresses, False, (), ())
        self.kernel = Kernel(seed)
        self.config = make_config(engines, ingresses)
        options = NetworkOptions.with_silence(self.config.cluster.stall_timeout_s)
        self.net = Network(self.kernel, options)
        self.groups = SimGroups(self.kernel, self.net)
        self.load_times = self.kernel.random("load")
        self.engines, self.coordinators = [], []
        self.provider, self.deployed = None, 0
        nodes = {host: {"CPU": float(engines)} for host in HOSTS}
        make_engine, make_coordinator = partial(ScaleEngine, self), partial(ScaleCoordinator, self)
        self.ray = MeteredRay(self.kernel, self.net, nodes, make_engine, make_coordinator)
        self.ray.costs = costs
        self.contact: CoordinatorContact | None = None
        self.operator = Operator(self)
        self.manager = self._new_manager()
        self.past_ingresses = []
        self.ingresses = [ScaleIngress(self, index) for index in range(ingresses)]
        self.requests = []

    @property
    def num_joined(self) -> int:
        """Number of engines to which every ingress routes."""
        return min(
            (len(each.llm.active_ranks) if each.llm else 0 for each in self.ingresses), default=0
        )
