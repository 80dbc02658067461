"""Compares the operations of groups before they begin, for workers that are threads of one process.

If only some members of a group begin an operation, it never ends; if they begin it with different
sizes, gloo ends the process. Here the members wait for each other before the operation. All of them
fail with a message if one of them begins a different operation, or ends its step without it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from swell.worker.comm.groups import Handle, ProcessGroup
from swell.worker.comm.mesh import Mesh
from swell.worker.wire import ModelRunnerOutput, SchedulerOutput
from swell.worker.worker import Worker
from tests.support.deadlines import HANG_S
from tests.worker.moe.moe_engines import EngineGroup


class _Place(NamedTuple):
    """A group in this process, since groups of several engines have the same name."""

    name: str
    engine: int | None
    """None: the group is between engines."""


class MatchedOperations:
    """The operations of all workers in one step of an `EngineGroup`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here = threading.local()
        """`mesh`: the mesh of the worker whose step this thread computes."""
        self.clear()

    def clear(self) -> None:
        """Forgets the step; called while no worker computes one."""
        self._members: defaultdict[_Place, dict[int, str]] = defaultdict(dict)
        """Group -> rank -> worker, of the workers that have begun the step."""
        self._begun: defaultdict[Any, list[str]] = defaultdict(list)
        """Group (and for messages: source and target), rank -> the operations that it has begun."""
        self._ended: dict[str, str] = {}
        """The workers that have ended the step, and how."""
        self._failure: str | None = None

    def execute(self, execute_model: Any, worker: Worker, plan: SchedulerOutput) -> Any:
        """Calls `execute_model`."""
        mesh = self._here.mesh = worker.mesh
        name = f"worker {mesh.rank} of engine {mesh.data.rank}"
        with self._changed:
            for group in (mesh.tensor, mesh.pipeline, mesh.data, mesh.sync, mesh.expert):
                if isinstance(group, ProcessGroup):
                    self._members[_place(mesh, group)][group.rank] = name
        how = "has ended its step"
        try:
            return execute_model(worker, plan)
        except BaseException as error:
            how = f"has failed ({error!r})"
            raise
        finally:
            self._here.mesh = None
            with self._changed:
                self._ended[name] = how
                self._changed.notify_all()

    def begin(self, group: ProcessGroup, operation: str, *args: Any) -> None:
        """Called before an operation. Waits for the group's other members."""
        mesh: Mesh | None = getattr(self._here, "mesh", None)
        # Tokens in a feedback group belong to other steps.
        if mesh is None or group._dry_run or group.name.startswith("feedback"):
            return
        place, ranks, channel = _place(mesh, group), range(group.size), ()
        if operation in ("send", "recv"):
            peer = args[1]
            ranks = channel = (group.rank, peer) if operation == "send" else (peer, group.rank)
        tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        sizes = [list(each.shape) for each in tensors if isinstance(each, Tensor)]
        with self._changed:
            own = self._begun[place, channel, group.rank]
            own.append(f"{'message' if channel else operation} {sizes}")
            self._changed.notify_all()
            if operation == "send":
                return
            while not self._is_matched(place, channel, ranks, len(own)):
                if not self._changed.wait(HANG_S):
                    self._fail(f"group {group.name!r}: rank {group.rank} waits with {own[-1]}")

    def _is_matched(
        self, place: _Place, channel: tuple[int, ...], ranks: Sequence[int], number: int
    ) -> bool:
        """Whether all of these ranks have begun their operation of this number."""
        if self._failure is not None:
            raise AssertionError(self._failure)
        begun, members, text = {}, self._members[place], f"group {place.name!r}: "
        for rank in ranks:
            operations = self._begun[place, channel, rank]
            if len(operations) >= number:
                begun[members[rank]] = operations[number - 1]
        if len({*begun.values()}) > 1:
            self._fail(f"{text}operation {number} of the step differs: {begun}")
        for rank in ranks:
            worker = members.get(rank)
            if worker in self._ended and worker not in begun:
                how = self._ended[worker]
                self._fail(f"{text}{worker} {how} without operation {number}: {begun}")
        return len(begun) == len(ranks)

    def _fail(self, message: str) -> None:
        self._failure = message
        self._changed.notify_all()
        raise AssertionError(message)


def _place(mesh: Mesh, group: ProcessGroup) -> _Place:
    is_own = group.name.startswith(("tensor", "pipeline"))
    return _Place(group.name, mesh.data.rank if is_own else None)


@pytest.fixture
def matched_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the operations of all steps that `EngineGroup.advance` computes."""
    matched = MatchedOperations()
    run, send = ProcessGroup._run, ProcessGroup.send
    execute, advance = Worker.execute_model, EngineGroup.advance

    def match_and_run(self: ProcessGroup, operation: str, *args: Any) -> None:
        matched.begin(self, operation, *args)
        run(self, operation, *args)

    def note_and_send(self: ProcessGroup, t: Tensor, dst: int) -> Handle:
        matched.begin(self, "send", [t], dst)
        return send(self, t, dst)

    def clear_and_advance(self: EngineGroup) -> list[ModelRunnerOutput]:
        matched.clear()
        return advance(self)

    monkeypatch.setattr(ProcessGroup, "_run", match_and_run)
    monkeypatch.setattr(ProcessGroup, "send", note_and_send)
    monkeypatch.setattr(
        Worker, "execute_model", lambda self, plan: matched.execute(execute, self, plan)
    )
    monkeypatch.setattr(EngineGroup, "advance", clear_and_advance)
