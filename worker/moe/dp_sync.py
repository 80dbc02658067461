"""Synchronization of the workers of several engines before a step.

Engines that share experts compute each step together: an expert's rank must take part for every
token of every engine. So each step, even a dummy one, begins with one all-reduce over the
corresponding workers of all engines, on CPU, of int64

    [ engines that want another step | engines that vote for a pause | step of engine 0, 1, ... ]

to which each engine adds its own values; a step is the numbers of `EngineStep`. The result shows
the engines whether all of them are done. And all workers of a stage then know how many tokens of
each engine the experts will get, and choose the same bucket by it (see `Buckets.choose`):

- If there is a bucket, every engine computes it, even without tokens. So all engines capture and
  replay the same steps in the same order from the moment on when their group was formed, and the
  operations of the group in these steps match.
- Otherwise, an engine without tokens computes only the layers with experts. If no engine has
  tokens, no layer is computed.
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
from swell.worker.step.buckets import EngineStep
from swell.worker.wire import SchedulerOutput


@dataclass(frozen=True, slots=True)
class DPSyncResult:
    """The result of the all-reduce; this engine is included in the counts."""

    steps: list[EngineStep]
    """[engines] the step of each engine."""
    working: int = 0
    """The number of engines that want another step."""
    pausing: int = 0
    """The number of engines that vote for a pause."""
    sync_s: float = 0.0
    """Duration of the all-reduce in seconds: the wait for the slowest engine."""
    imbalance: float = 0.0
    """The largest load imbalance of a layer's experts, if it was measured before this step;
    otherwise 0."""
    moves_experts: bool = False
    """Whether experts have moved before this step."""


class DPSync:
    """One worker's side of the synchronization. This base class is for an engine that does not
    share experts."""

    def before_step(self, plan: SchedulerOutput, step: EngineStep) -> DPSyncResult:
        """Synchronizes with the other engines; called once for every plan, in order. `step`: the
        plan's step."""
        return DPSyncResult([step])

    def execute_dummy_batch(self) -> None:
        """Takes part in the other engines' expert layers, in a step without a bucket and without
        tokens of this engine."""


class LockstepDPSync(DPSync):
    def __init__(self, model: MixtureOfExperts, mesh: Mesh, balancer: ExpertBalancer) -> None:
        self._model = model
        self._mesh = mesh
        self._balancer = balancer

    def before_step(self, plan: SchedulerOutput, step: EngineStep) -> DPSyncResult:
        # A capture contains the addresses of experts, so none is made or used while they move.
        moves_experts = self._balancer.is_moving
        step = step._replace(is_capturable=step.is_capturable and not moves_experts)
        sync = self._mesh.sync
        reduced = torch.zeros(2 + sync.size * len(step), dtype=torch.int64)
        reduced[0], reduced[1] = plan.work, plan.pause
        reduced[2:].view(sync.size, -1)[sync.rank] = torch.tensor(step)
        started = time.monotonic()
        working, pausing = sync.all_reduce(reduced)[:2].tolist()
        sync_s = time.monotonic() - started
        steps = [EngineStep(*numbers) for numbers in reduced[2:].view(sync.size, -1).tolist()]
        self._mesh.tokens = [each.tokens for each in steps]
        imbalance = self._balancer.before_step()
        return DPSyncResult(steps, working, pausing, sync_s, imbalance, moves_experts)

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
