"""The engine's end of its channel to the coordinator, on a separate thread.

A step may take long, and a step whose peer has died may never finish; meanwhile the engine's loop
receives nothing. This thread continues: it repeats the newest report with the current progress, so
that a busy engine never counts as stopped, and it receives the command that interrupts the step by
aborting the collectives. Without this thread an engine would wait for commands that never reach it,
so a failure of the thread exits the process.

It also stores what the coordinator sends to all engines (`CoordinatorHeartbeat`). If the
coordinator is silent, it searches for it, and sends the stored state to the one that it finds, at
the same or another address. If the group does not step meanwhile, it lets the engine serve
standalone (`standalone_monitor.py`).

The loop and this thread share two queues, of messages and of commands, and an `EngineSnapshot` that
the loop replaces as a whole.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from swell.configs.schema import ClusterConfig
from swell.coordinator.manager_state import ManagerState
from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys, Outlet
from swell.coordinator.transport.finder import CoordinatorFinder, FindCoordinator, find_nothing
from swell.coordinator.transport.runtime import Loop, Runtime
from swell.coordinator.wave_protocol.wave_interface import EngineWaves, Phase
from swell.coordinator.wire import (
    CoordinatorHeartbeat,
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    EngineReport,
    Introduce,
    ReconfigureDistributedRequest,
    WorkerReport,
)
from swell.engine.serving.standalone_monitor import StandaloneMonitor


class ServeAlone(msgspec.Struct, frozen=True):
    """The client's own command: no coordinator is reachable, and the group of `epoch` does not
    step."""

    epoch: int


LoopCommand = EngineCommand | ServeAlone
"""Commands that the client passes to the engine's loop."""


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The state of an engine in its group, as of the last turn of its loop."""

    member: Member
    epoch: int
    wave: int
    phase: Phase
    voting: bool
    ranks: tuple[int, ...]
    pause_number: int = 0

    @classmethod
    def of(cls, member: Member, waves: EngineWaves) -> EngineSnapshot:
        number = waves.pause_number
        return cls(member, waves.epoch, waves.wave, waves.phase, waves.voting, waves.ranks, number)

    def hello(self, newest_epoch: int, kept: CoordinatorHeartbeat) -> EngineHello:
        """Returns a hello. `newest_epoch`: epoch of the newest group that was commanded, which
        counts as started. `kept`: the state that coordinators have sent."""
        behind = newest_epoch > self.epoch
        return EngineHello(
            self.member,
            max(self.epoch, newest_epoch),
            list(self.ranks),
            self.wave,
            int(Phase.OUT if behind else self.phase),
            0 if behind else self.pause_number,
            kept.roster_epoch,
            kept.manager_state,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCallbacks:
    """Functions of the engine that run on the client's thread and must not block."""

    progress_counter: Callable[[], int]
    """Returns the engine's progress counter."""
    num_requests: Callable[[], int]
    """Returns the number of requests in the engine."""
    workers: Callable[[], tuple[WorkerReport, ...]]
    """Returns the state of the workers, which changes while the loop replaces one."""
    abort_collectives: Callable[[], None]
    """Interrupts a step whose peers may be gone."""
    on_command: Callable[[], None]
    """Called when a command is in `CoordinatorClient.commands`."""


class CoordinatorClient:
    """Sends messages of the engine's loop, repeats reports, and passes commands to the loop."""

    def __init__(
        self,
        config: ClusterConfig,
        runtime: Runtime,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        snapshot: EngineSnapshot,
        engine: EngineCallbacks,
        find: FindCoordinator = find_nothing,
    ) -> None:
        self._runtime = runtime
        self._keys, self._address = keys, coordinator
        self._finder = CoordinatorFinder(runtime, find, config.stall_timeout_s)
        self._kept = CoordinatorHeartbeat(0, ManagerState())
        self._standalone_monitor = StandaloneMonitor(config, runtime.now())
        self.commands: queue.SimpleQueue[LoopCommand] = queue.SimpleQueue()
        self._heartbeat_s = min(config.heartbeat_s, config.stall_timeout_s / 4)
        self._outlet: Outlet[EngineCommand] = runtime.outlet(coordinator, EngineCommand, keys)
        self._snapshot = snapshot
        self._engine = engine
        self._messages: queue.SimpleQueue[list[CoordinatorMessage]] = queue.SimpleQueue()
        self._newest_epoch = 0
        self._report: EngineReport | None = None
        self._reported_at = self._runtime.now()
        self._waker = runtime.waker()
        self._stopping = False
        self._loop: Loop | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the coordinator has sent nothing for some time."""
        return self._finder.is_silent

    @property
    def load_report_s(self) -> float:
        """The minimum time between two reports that the coordinator has requested."""
        return self._kept.load_report_s

    @property
    def sleep_level(self) -> int:
        """The sleep level that an operator has requested for a paused engine."""
        return self._kept.manager_state.desired.sleep.level

    @property
    def roster_epoch(self) -> int:
        """The newest roster epoch that a coordinator has sent."""
        return self._kept.roster_epoch

    def start(self) -> None:
        self._loop = self._runtime.spawn("coordinator client", self._run())

    # ---------------------------------------------------------------- from the engine's loop

    def publish(self, snapshot: EngineSnapshot) -> None:
        """Replaces the snapshot. Call it before sending messages that depend on it, and before
        forming the groups of a newer epoch."""
        self._snapshot = snapshot

    def send(self, messages: Iterable[CoordinatorMessage]) -> None:
        """Sends messages in order, without a heartbeat in between."""
        self._messages.put(list(messages))
        self._waker.wake()

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()
        assert self._loop is not None
        self._loop.join()

    # ---------------------------------------------------------------- the client's thread

    async def _run(self) -> None:
        try:
            await self._run_until_stopped()
        finally:
            self._outlet.close()
            self._waker.close()

    async def _run_until_stopped(self) -> None:
        self._send_hello()
        while not self._stopping:
            wait_s = max(0.0, self._reported_at + self._heartbeat_s - self._runtime.now())
            there = await self._runtime.ready(self._outlet, wait_s, self._waker)
            command = self._outlet.take() if there else None
            self._send_messages()
            if self._runtime.now() >= self._reported_at + self._heartbeat_s:
                self._send_heartbeat()
            if command is not None:
                self._handle_command(command)
            self._follow_coordinator()
            self._check_standalone()
        self._send_messages()

    def _send_hello(self) -> None:
        self._outlet.send(self._snapshot.hello(self._newest_epoch, self._kept))

    def _follow_coordinator(self) -> None:
        """Connects to a coordinator that has moved. Messages that its predecessor has not received
        are lost: the new one requests the full state."""
        found = self._finder.check()
        if found is None or found.address == self._address or found.keys != self._keys:
            return
        self._outlet.close()
        self._address = found.address
        self._outlet = self._runtime.outlet(found.address, EngineCommand, self._keys)
        self._send_hello()

    def _check_standalone(self) -> None:
        seen = self._snapshot
        is_due = self._standalone_monitor.check(
            seen.phase,
            seen.epoch,
            self._engine.progress_counter(),
            self._runtime.now(),
            may_serve=seen.member.rank in seen.ranks
            and self._newest_epoch <= seen.epoch
            and not self._kept.manager_state.desired.pause_requested,
        )
        if is_due:
            if seen.phase is not Phase.PAUSED:  # otherwise it is not inside a collective
                self._engine.abort_collectives()
            self.commands.put(ServeAlone(seen.epoch))
            self._engine.on_command()

    def _send_messages(self) -> None:
        while not self._messages.empty():
            for message in self._messages.get():
                if isinstance(message, EngineReport):
                    self._report, self._reported_at = message, self._runtime.now()
                self._outlet.send(message)

    def _send_heartbeat(self) -> None:
        """Repeats the last report if the loop has sent none for a while, or none since a new
        roster. The loop may be inside a step that began before the requests of that step were
        reported; the repeated report counts them, and so shows that the engine has work."""
        self._reported_at = self._runtime.now()
        self._abort_if_behind()
        report = self._report
        if report is not None:
            self._outlet.send(
                msgspec.structs.replace(
                    report,
                    waiting=max(0, self._engine.num_requests() - report.running),
                    progress_counter=self._engine.progress_counter(),
                    roster_epoch=self._kept.roster_epoch,
                    workers=self._engine.workers(),
                )
            )

    def _handle_command(self, command: EngineCommand) -> None:
        self._finder.on_message()
        self._standalone_monitor.on_command(self._runtime.now())
        if isinstance(command, CoordinatorHeartbeat):
            self._keep(command)
            return
        if isinstance(command, Introduce):
            self._send_hello()
            return
        if isinstance(command, ReconfigureDistributedRequest):
            self._newest_epoch = max(self._newest_epoch, command.epoch)
            self._abort_if_behind()
        self.commands.put(command)
        self._engine.on_command()

    def _keep(self, heartbeat: CoordinatorHeartbeat) -> None:
        """Merges a heartbeat into the stored state: a new coordinator may know less than its
        engines."""
        known, epoch = self._kept.manager_state, self._kept.roster_epoch
        self._kept = CoordinatorHeartbeat(
            max(epoch, heartbeat.roster_epoch),
            heartbeat.manager_state
            if heartbeat.manager_state.desired.age >= known.desired.age
            else known,
            heartbeat.load_report_s,
        )
        if self._kept.roster_epoch > epoch:
            self._send_heartbeat()

    def _abort_if_behind(self) -> None:
        """Aborts the collectives if the loop has not executed the newest command to reconfigure: it
        may be inside a step that never finishes, or form a group that is obsolete. Repeated at each
        heartbeat, because groups that were just about to be formed missed an earlier abort."""
        seen = self._snapshot
        if self._newest_epoch > seen.epoch and seen.phase is not Phase.PAUSED:
            self._engine.abort_collectives()
