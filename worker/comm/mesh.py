"""The groups of one worker.

A `Mesh` places one worker in a grid: `rank = stage * tensor + tensor_rank`, so the workers that
split a layer are neighbours. Engines that share experts add a third axis:

    tensor      one stage of one engine: its workers split the dense layers
    pipeline    one tensor rank of one engine, in stage order (`feedback`: the same members)
    data        one stage and tensor rank over all engines (`sync`: the same, always on CPU)
    expert      one stage over all engines: its workers hold the stage's experts;
                rank = engine * tensor + tensor_rank

Every group is a stateless process group over a store. Its keys have a prefix that is new to the
store: it derives from a secret of the members (`group_secret.py`) and from a number, which is the
generation for the engine's own groups and the epoch for groups between engines. A group can be
left, aborted and formed again while the process keeps its model and weights: layers refer to the
engine's own groups, whose transport is replaced, and read `data` and `expert` from the mesh when
they compute. Nothing here is global: threads of one process may each have a mesh over a
`HashStore`; processes use a `TCPStore`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from swell.configs.runtime.log import first_line
from swell.configs.runtime.secret import SecretBytes
from swell.configs.schema import ParallelConfig
from swell.worker.comm.connect import connect
from swell.worker.comm.group_secret import GroupSecret
from swell.worker.comm.groups import (
    Group,
    GroupError,
    Handle,
    ProcessGroup,
    SoloGroup,
    make_group,
)
from swell.worker.comm.transport import PeersAbsent
from swell.worker.wire import GroupPlan

__all__ = ["GROUP_TIMEOUT_S", "Group", "GroupError", "Handle", "Mesh", "ProcessGroup", "SoloGroup"]

GROUP_TIMEOUT_S = 120.0
"""A peer that has not joined a group or a collective after this many seconds counts as dead."""


@dataclass(eq=False)
class Mesh:
    """One worker's position among the workers, and its groups."""

    rank: int
    """The worker's rank among the workers of its engine."""
    epoch: int
    """The epoch of the groups between engines."""
    tensor: Group
    """The workers that split the layers of one stage."""
    pipeline: Group
    """The workers with this tensor rank, one per stage, in stage order."""
    feedback: Group
    """The same workers, for sampled tokens from the last stage to the first. It is a separate group
    because NCCL runs the sends and receives of a group in order, and tokens and activations must
    not wait for each other."""
    data: Group = field(default_factory=SoloGroup)
    """The workers with this stage and tensor rank, one per engine, if engines share experts."""
    sync: Group = field(default_factory=SoloGroup)
    """The same workers, on CPU, for `dp_sync`."""
    expert: Group = field(default_factory=SoloGroup)
    """The workers of this stage in all engines, which hold its experts."""
    shares_experts: bool = False
    """Whether engines share experts; experts are placed when the groups between engines are
    formed."""
    generation: int = 0
    """The generation of the engine's own groups."""
    tokens: list[int] = field(default_factory=list)
    """[engines] the number of tokens that each engine computes in this step, set by `dp_sync`."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: str = "127.0.0.1"
    """The address of this machine at which other workers reach it."""
    exact: bool = False
    """Whether the bits of a row must not depend on its batch (`model.exact`)."""
    _aborted: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def adds_in_order(self) -> bool:
        """Whether terms that several ranks compute are added in a fixed order, at the price of more
        bytes between ranks."""
        return self.exact or self.device.type == "cpu"

    @property
    def tensor_rank(self) -> int:
        return self.tensor.rank

    @property
    def stage(self) -> int:
        return self.pipeline.rank

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this worker returns the results of steps; one worker of the engine does."""
        return self.is_last_stage and self.tensor_rank == 0

    @classmethod
    def build(
        cls,
        parallel: ParallelConfig,
        rank: int,
        store: dist.Store | None = None,
        epoch: int = 0,
        device: torch.device | str = "cpu",
        timeout_s: float = GROUP_TIMEOUT_S,
        host: str = "127.0.0.1",
        exact: bool = False,
    ) -> Mesh:
        """Returns the mesh of worker `rank` (0 .. parallel.world - 1) of an engine.

        With `store`, joins the engine's own groups, of generation `epoch`, without a secret: blocks
        until every other worker of the engine has joined, and raises `GroupError` if one does not.
        Without `store`, groups of several workers are formed in the first `regroup`.
        """
        assert 0 <= rank < parallel.world, f"rank {rank} of a world of {parallel.world}"
        stage, tensor_rank = divmod(rank, parallel.tensor)
        tensor = make_group(
            f"tensor{stage}", tensor_rank, parallel.tensor, exact, has_messages=False
        )
        pipeline = make_group(f"pipeline{tensor_rank}", stage, parallel.pipeline)
        feedback = make_group(f"feedback{tensor_rank}", stage, parallel.pipeline)
        mesh = cls(
            rank,
            0,
            tensor,
            pipeline,
            feedback,
            expert=tensor,
            shares_experts=parallel.expert,
            generation=epoch,
            device=torch.device(device),
            host=host,
            exact=exact,
        )
        if store is not None:
            mesh._form_own(store, timeout_s, b"")
        return mesh

    def begin(self, generation: int) -> None:
        """Starts a plan of this generation; aborts of earlier generations are ignored from now
        on."""
        with self._lock:
            self.generation = generation
            self._aborted.clear()

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called since `begin`."""
        return self._aborted.is_set()

    def regroup(
        self,
        plan: GroupPlan,
        own_store: dist.Store | None = None,
        expert_store: dist.Store | None = None,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> None:
        """Leaves the groups between engines, and with `own_store` the engine's own groups, and
        forms those of the plan. `begin` must have been called.

        Blocks until all peers have joined; each is waited for `timeout_s`. Raises `GroupError` if
        one does not join or `abort` is called; groups that were not formed are then closed, and
        their operations raise until a later plan. Raises `AbortStuck` if an earlier abort does not
        finish.
        """
        assert plan.generation == self.generation, "begin must be called first"
        for group in self._all_groups():
            group.finish_abort()
        _close(self._between_engines())
        if own_store is not None:
            self._form_own(own_store, timeout_s, plan.secret)
        if plan.engines == 1:
            self.data, self.sync, self.expert = SoloGroup(), SoloGroup(), self.tensor
        else:
            assert expert_store is not None, "several engines need a store to find each other"
            self._form_between_engines(plan, expert_store, timeout_s)
        self.epoch = plan.epoch

    def abort(self, generation: int | None = None) -> None:
        """Makes operations in flight fail, and later ones until `regroup`. Returns at once. May be
        called from any thread.

        With `generation`, groups of a later plan are not aborted.
        """
        with self._lock:
            if generation is not None and generation < self.generation:
                return
            self._aborted.set()
        for group in self._all_groups():
            group.abort()

    def poll(self) -> None:
        """Aborts all groups if one of them reports a failed peer that no operation may have
        noticed. Returns at once. May be called from any thread."""
        generation = self.generation
        if any(group.poll() for group in self._all_groups()):
            self.abort(generation)

    def drain(self) -> None:
        """Waits until every worker of the engine has all messages of the engine's own groups. Every
        worker calls it."""
        for group in (self.tensor, self.pipeline, self.feedback):
            group.drain()

    def check(self) -> None:
        """Raises `GroupError` if a group was aborted: the results of the step are not valid."""
        for group in self._all_groups():
            group.check()

    def close(self) -> None:
        """Leaves all groups; a peer inside an operation gets an error. Raises `AbortStuck`."""
        _close(self._all_groups())

    def _all_groups(self) -> list[Group]:
        return [self.tensor, self.pipeline, self.feedback, *self._between_engines()]

    def _between_engines(self) -> list[Group]:
        return [group for group in (self.data, self.sync, self.expert) if group is not self.tensor]

    def _form_own(self, store: dist.Store, timeout_s: float, secret: SecretBytes) -> None:
        device, plan = self.device, f"generation{self.generation}"
        groups = (self.tensor, self.pipeline, self.feedback)
        self._form([(group, device, None) for group in groups], store, timeout_s, secret, plan)

    def _form_between_engines(self, plan: GroupPlan, store: dist.Store, timeout_s: float) -> None:
        suffix, tensor, engines = f"{self.stage}.{self.tensor_rank}", self.tensor.size, plan.engines
        self.data = make_group(f"data{suffix}", plan.index, engines)
        self.sync = make_group(f"sync{suffix}", plan.index, engines)
        rank = plan.index * tensor + self.tensor_rank
        self.expert = make_group(f"expert{self.stage}", rank, engines * tensor)
        device, secret, cpu = self.device, plan.expert_secret, torch.device("cpu")
        groups = [(self.data, device, 1), (self.sync, cpu, 1), (self.expert, device, tensor)]
        self._form(groups, store, timeout_s, secret, f"epoch{plan.epoch}")

    def _form(
        self,
        groups: Sequence[tuple[Group, torch.device, int | None]],
        store: dist.Store,
        timeout_s: float,
        secret: SecretBytes,
        plan: str,
    ) -> None:
        """Forms groups, given with their device and the number of ranks that an engine has in
        each (None: the group is within one engine). `plan`: a name that is new to the store."""
        try:
            for group, device, ranks in groups:
                if isinstance(group, ProcessGroup):
                    own = GroupSecret(secret, f"{plan}/{group.name}")
                    self._open(group, device, ranks, store, timeout_s, own)
        except BaseException:
            _close([group for group, _device, _ranks in groups])
            raise

    def _open(
        self,
        group: ProcessGroup,
        device: torch.device | str,
        engine_ranks: int | None,
        store: dist.Store,
        timeout_s: float,
        secret: GroupSecret,
    ) -> None:
        rank, size, aborted = group.rank, group.size, self._aborted
        try:
            transport = connect(
                device, store, rank, size, timeout_s, aborted, secret, self.host, group.has_messages
            )
        except (RuntimeError, OSError) as error:
            text = f"group {group.name!r} could not be formed at {self.host}: {first_line(error)}"
            absent = error.ranks if engine_ranks and isinstance(error, PeersAbsent) else []
            engines = sorted({rank // (engine_ranks or 1) for rank in absent})
            raise GroupError(text, engines) from error
        group.reopen(transport)
        # `abort` sets the event before it aborts transports, so either it finds this transport or
        # the event is set here.
        if self._aborted.is_set():
            raise GroupError(f"group {group.name!r} was aborted while it was formed")


def _close(groups: Sequence[Group]) -> None:
    """Closes all groups, even if one raises."""
    with ExitStack() as stack:
        for group in reversed(groups):  # a stack calls in reverse order
            stack.callback(group.close)
