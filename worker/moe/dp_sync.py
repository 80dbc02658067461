"""Synchronization of the workers of several engines before a step.

Engines that share experts compute each step together: an expert's rank must take part for every
token of every engine. So each step, even a dummy one, begins with one all-reduce over the
corresponding workers of all engines, on CPU, of int64

    [ engines that want another step | engines that vote for a pause | tokens of engine 0, 1, ... ]

to which each engine adds its own values. All workers of a stage then know how many tokens of each
engine the experts will get, and the step's result shows the engines whether all of them are done.
If no engine has tokens, no layer is computed. If only this engine has none, it computes only the
layers with experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swell.configs.schema import ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import MixtureOfExperts, Model
from swell.worker.moe.expert_balancer import ExpertBalancer
from swell.worker.wire import SchedulerOutput


@dataclass(frozen=True, slots=True)
class DPSyncResult:
    """The result of the all-reduce; this engine is included in the counts."""

    working: int = 0
    """The number of engines that want another step."""
    pausing: int = 0
    """The number of engines that vote for a pause."""
    sync_s: float = 0.0
    """Duration of the all-reduce in seconds: the wait for the slowest engine."""
    imbalance: float = 0.0
    """The largest load imbalance of a layer's experts, if it was measured before this step;
    otherwise 0."""


class DPSync:
    """One worker's side of the synchronization. This base class is for an engine that does not
    share experts."""

    def before_step(self, plan: SchedulerOutput) -> DPSyncResult:
        """Synchronizes with the other engines; called once for every plan, in order."""
        return DPSyncResult()

    def execute_dummy_batch(self) -> None:
        """Takes part in the other engines' expert layers, in a step without tokens of this
        engine."""


class LockstepDPSync(DPSync):
    def __init__(self, model: MixtureOfExperts, mesh: Mesh, balancer: ExpertBalancer) -> None:
        self._model = model
        self._mesh = mesh
        self._balancer = balancer

    def before_step(self, plan: SchedulerOutput) -> DPSyncResult:
        mesh = self._mesh
        reduced = torch.zeros(2 + mesh.sync.size, dtype=torch.int64)
        reduced[0], reduced[1] = plan.work, plan.pause
        reduced[2 + mesh.sync.rank] = sum(plan.num_tokens)
        started = time.monotonic()
        working, pausing, *tokens = mesh.sync.all_reduce(reduced).tolist()
        mesh.tokens = tokens
        sync_s = time.monotonic() - started
        return DPSyncResult(working, pausing, sync_s, self._balancer.before_step())

    def execute_dummy_batch(self) -> None:
        if not any(self._mesh.tokens):
            return
        nothing = self._model.make_empty_intermediate(0).hidden_states
        for layer in self._model.moe_layers():
            layer(nothing)


def make_dp_sync(
    model: Model, mesh: Mesh, config: ParallelConfig, on_progress: Callable[[], None]
) -> DPSync:
    """Returns the implementation for this worker's mesh. `on_progress` is called for each expert
    that moves."""
    if not mesh.shares_experts:
        return DPSync()
    assert isinstance(model, MixtureOfExperts), "build_model refuses others"
    return LockstepDPSync(model, mesh, ExpertBalancer(model, mesh, config, on_progress))
