"""The coordinator's loop: connects a `CoordinatorStateMachine` to its channel and its callers.

A coordinator that died is restarted with the same keys, name and port, so its peers reconnect to
the same address. If its host was lost, it restarts on another host, and its peers search for it
(`finder.py`). It starts without a roster: it asks every engine that reports for an `EngineHello`
with the manager's state. After `recovery_s`, when all had time to answer, these engines form the
cluster. Until then it sends no view, and calls wait. Engines continue to serve, unless they share
experts with a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.manager_state import NO_MANAGER, ManagerId, ManagerState, NotLeading
from swell.coordinator.metrics_aggregator import MetricsAggregator
from swell.coordinator.publisher import load_report_s
from swell.coordinator.roster import Member, Roster
from swell.coordinator.state_machine import (
    CoordinatorStateMachine,
    JoinResult,
    StalledEngine,
    recovery_s,
)
from swell.coordinator.subscribers import Subscribers
from swell.coordinator.transport.channel import ChannelAddress, Inbox, make_keys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.transport.loop_calls import LoopCalls
from swell.coordinator.transport.runtime import Runtime, ThreadRuntime
from swell.coordinator.wave_protocol.null_waves import NullCoordinator
from swell.coordinator.wave_protocol.wave_interface import CoordinatorWaves, Phase, RankedCommands
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.coordinator.wire import (
    FIRST_TOKENS,
    ClusterView,
    CoordinatorHeartbeat,
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    EngineLoads,
    EngineReport,
    Introduce,
    OtherIngressCounts,
    Subscribe,
)

_CHECKS_PER_TIMEOUT = 10
"""Minimum number of turns of the loop within `stall_timeout_s`, and within the shortest time for
which a recovery listens."""
_CHECK_INTERVAL_S = 0.05
"""Minimum time between two checks: each check visits all engines, and each message is one turn."""
_HEARTBEATS_PER_TIMEOUT = 4
"""Heartbeats to each engine within the time after which it searches for a coordinator."""
_NUMBER_BITS = 48
"""Bits of the random number that identifies a coordinator."""


class Membership(msgspec.Struct, frozen=True):
    """The cluster as the manager sees it."""

    view: ClusterView
    stalled_engines: list[StalledEngine] = []
    """Engines that the coordinator has removed because they had stopped, the newest ones."""
    manager_state: ManagerState = ManagerState()
    first_tokens: list[float] = []
    """`FIRST_TOKENS`, summed over all ingresses."""
    versions: list[str] = []
    """Versions of engines that ingresses need to finish their answers."""


class CoordinatorService:
    """The coordinator's socket and its loop, for engines, ingresses and the manager.

    The state belongs to the loop. Public methods may be called from any thread: they pass a call to
    the loop and wait for its result (see `Runtime.answer`). Those that change something name the
    calling manager (`by`), and raise NotLeading if another manager leads.
    """

    def __init__(
        self,
        config: ClusterConfig,
        runtime: Runtime | None = None,
        *,
        lockstep: bool = False,
        endpoint: CoordinatorEndpoint | None = None,
        recover: bool = False,
    ) -> None:
        """`lockstep`: engines share experts. `recover`: a predecessor had this endpoint."""
        self._runtime = runtime = runtime or ThreadRuntime()
        endpoint = endpoint or CoordinatorEndpoint(make_keys())
        self.keys = endpoint.keys
        now = runtime.now()
        self._config = config
        self._log = StructuredLogger("coordinator")
        self._inbox: Inbox[CoordinatorMessage] = runtime.inbox(
            CoordinatorMessage, endpoint.keys, name=endpoint.name, port=endpoint.port
        )
        waves: CoordinatorWaves = NullCoordinator()
        if lockstep:
            waves = WaveCoordinator(number=runtime.random_bits(_NUMBER_BITS))
        self._state_machine = CoordinatorStateMachine(config, waves, now)
        self._waker = runtime.waker()
        self._calls = LoopCalls(runtime, self._waker)
        self._checked_at = now
        self._probes = LoopCalls(runtime, self._waker)
        """Calls that are answered even during a recovery."""
        self._subscribers = Subscribers(config.heartbeat_s)
        self._metrics_aggregator = MetricsAggregator()
        self._peers: dict[int, bytes] = {}
        """Channel identities of engines that have sent `EngineHello`, by incarnation: a rank may
        have had several. Contains members, and other engines while they send messages."""
        self._unsent: dict[int, list[EngineCommand]] = {}
        """Queued commands, by incarnation: for members that have not sent `EngineHello` here."""
        self._heartbeat_s = min(
            config.heartbeat_s, config.stall_timeout_s / _HEARTBEATS_PER_TIMEOUT
        )
        self._wake_interval_s = config.stall_timeout_s / _CHECKS_PER_TIMEOUT
        self._check_interval_s = min(_CHECK_INTERVAL_S, self._wake_interval_s / 2)
        self._heartbeats: dict[bytes, float] = {}
        """Channel identity of an engine -> when the last `CoordinatorHeartbeat` was sent to it."""
        self._epoch_seen = 0
        self._hellos: dict[int, EngineHello] = {}
        self._recovering = recover
        self._has_moved = not endpoint.is_at(self._inbox.address)
        self._recovery_s = recovery_s(config, None, has_moved=self._has_moved)
        soonest_s = recovery_s(config, 0.0, has_moved=False)
        self._recovery = ListeningClock(soonest_s)
        self._recovery.advance(now)
        self._listen_interval_s = min(self._wake_interval_s, soonest_s / _CHECKS_PER_TIMEOUT)
        self._stopping = False
        self._loop = runtime.spawn("coordinator", self._run())

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    # ---------------------------------------------------------------- from other threads

    def probe(self) -> bool:
        """Returns once the loop runs, even during a recovery."""
        return self._probes.call(lambda: True)

    def view(self) -> ClusterView:
        """Returns the view. The loop computes it, so an answer also proves that the loop runs."""
        return self._calls.call(lambda: self._state_machine.view())

    def membership(self) -> Membership:
        return self._calls.call(self._membership)

    def wait(self, epoch: int, timeout_s: float) -> Membership:
        """Returns when the epoch of the roster differs from `epoch`, or after the timeout."""
        return self._calls.call_and_wait(
            timeout_s, lambda: self._state_machine.roster.epoch != epoch, self._membership
        )

    def join(
        self,
        members: list[Member],
        timeout_s: float,
        by: ManagerId = NO_MANAGER,
        earlier: Sequence[int] = (),
    ) -> JoinResult:
        """Returns when each engine is in the roster or has failed to join. Removes the `earlier`
        incarnations of their ranks. Raises ValueError if another engine has one of the ranks; then
        nothing changes."""
        ranks = {member.rank for member in members}

        def join(now: float) -> RankedCommands:
            unheard = {member.incarnation for member in members} - self._peers.keys()
            return self._state_machine.join(members, now, unheard, earlier)

        def finish() -> JoinResult:
            result = self._state_machine.finish_join(ranks, timeout_s)
            if result.refused:
                self._change(lambda now: self._state_machine.remove_failed(result.refused, now))
            return result

        return self._calls.call_and_wait(
            timeout_s,
            lambda: not ranks & self._state_machine.joining,
            finish,
            lambda: self._change_for(by, join),
        )

    def leave(self, ranks: list[int], by: ManagerId = NO_MANAGER) -> Roster:
        """Stops new requests to these engines; they report once they have received the roster."""
        return self._command(by, lambda now: self._state_machine.leave(ranks, now))

    def cancel_leave(self, ranks: list[int], by: ManagerId = NO_MANAGER) -> Roster:
        """Makes engines that were leaving active again."""
        return self._command(by, lambda now: self._state_machine.cancel_leave(ranks, now))

    def detach(
        self, ranks: list[int], timeout_s: float, by: ManagerId, idle_epoch: int | None = None
    ) -> Roster:
        """Removes running engines. Returns when their group and then the roster continue without
        them; after the timeout they are removed anyway, unless their leave was cancelled. Does
        nothing if the epoch is no longer `idle_epoch`, in which they were found idle."""
        machine = self._state_machine

        def detach(now: float) -> RankedCommands:
            return machine.detach(ranks, now) if idle_epoch in (None, machine.roster.epoch) else []

        def finish(now: float) -> RankedCommands:
            late = machine.detached.intersection(ranks)
            return machine.remove_failed(late, now) if late else []

        return self._calls.call_and_wait(
            timeout_s,
            lambda: machine.detached.isdisjoint(ranks),
            lambda: self._change(finish),
            lambda: self._change_for(by, detach),
        )

    def remove_failed(
        self,
        ranks: list[int],
        by: ManagerId = NO_MANAGER,
        incarnations: list[int] | None = None,
    ) -> Roster:
        """Removes dead engines; with `incarnations` only these."""
        machine = self._state_machine
        return self._command(by, lambda now: machine.remove_failed(ranks, now, incarnations))

    def pause(self, by: ManagerId) -> Roster:
        """Pauses all engines."""
        return self._command(by, lambda now: self._state_machine.pause(now))

    def resume(self, by: ManagerId) -> Roster:
        """Resumes all engines."""
        return self._command(by, lambda now: self._state_machine.resume(now))

    def _command(self, by: ManagerId, step: Callable[[float], RankedCommands]) -> Roster:
        return self._calls.call(lambda: self._change_for(by, step))

    def save_manager_state(self, state: ManagerState) -> ManagerState:
        """Stores the state of the manager; the one with the highest term leads. Drops the state of
        another manager and an older state that arrives late. Returns the stored state."""
        return self._calls.call(lambda: self._keep(state))

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()
        self._loop.join()

    # ---------------------------------------------------------------- the loop

    async def _run(self) -> None:
        try:
            while not self._stopping:
                await self._run_once()
        finally:
            self._inbox.close()
            self._waker.close()

    async def _run_once(self) -> None:
        if await self._runtime.ready(self._inbox, self._wait_s(), self._waker):
            for peer, message in self._inbox.take():
                try:
                    self._on_message(peer, message)
                except Exception as error:  # one peer's message must not stop the loop
                    what = type(message).__name__
                    self._log.error("message not handled", message_type=what, error=repr(error))
        now = self._runtime.now()
        self._probes.run(now)
        if self._recovering:
            self._end_recovery(now)
            return
        if now >= self._checked_at + self._check_interval_s:
            self._checked_at = now
            self._send(self._state_machine.tick(now))
        self._calls.run(now)
        self._publish(now)

    def _membership(self) -> Membership:
        return Membership(
            self._state_machine.view(),
            list(self._state_machine.stalled_engines),
            self._state_machine.manager_state,
            first_tokens=self._metrics_aggregator.total(FIRST_TOKENS),
            versions=self._subscribers.versions,
        )

    def _change_for(self, by: ManagerId, step: Callable[[float], RankedCommands]) -> Roster:
        """Runs a change for a manager. A new coordinator that knows no manager accepts any."""
        if not self._state_machine.manager_state.is_led_by(by):
            raise NotLeading(
                f"the manager {by.owner!r} no longer leads the cluster: a more recent one does"
            )
        return self._change(step)

    def _keep(self, state: ManagerState) -> ManagerState:
        kept = self._state_machine.manager_state
        if (
            kept.is_led_by(state.manager_id)
            and state.desired.age >= kept.desired.age
            and state != kept
        ):
            self._state_machine.keep_manager_state(state)
            self._send_heartbeats()
        return self._state_machine.manager_state

    def _change(self, step: Callable[[float], RankedCommands]) -> Roster:
        self._send(step(self._runtime.now()))
        return self._state_machine.roster

    def _wait_s(self) -> float:
        """Returns the seconds until something is due."""
        now = self._runtime.now()
        if self._recovering:
            left_s = self._recovery_s - self._recovery.read(now)
            return min(max(0.0, left_s), self._listen_interval_s)
        publish_s = self._state_machine.publisher.wait_s(now)
        return min(publish_s, self._wake_interval_s, self._calls.wait_s(now))

    def _on_message(self, peer: bytes, message: CoordinatorMessage) -> None:
        now = self._runtime.now()
        match message:
            case Subscribe():
                self._on_subscribe(peer, message, now)
            case EngineHello():
                self._on_hello(peer, message, now)
            case _:
                member = self._state_machine.member(message.rank, message.incarnation)
                is_known = message.incarnation in self._peers
                if isinstance(message, EngineReport):
                    self._send_heartbeat_if_due(peer, now)
                    if self._recovering or (member is not None and not is_known):
                        self._inbox.send(peer, Introduce())
                if member is not None:
                    if is_known:
                        self._peers[message.incarnation] = peer
                    self._send(self._state_machine.on_message(message, now))
                elif isinstance(message, EngineReport) and not self._recovering:
                    waves, phase = self._state_machine.waves, Phase(message.wave_phase)
                    if (command := waves.left_out(message.epoch, phase)) is not None:
                        self._inbox.send(peer, command)

    def _on_hello(self, peer: bytes, hello: EngineHello, now: float) -> None:
        """Handles a hello. A predecessor's epoch and manager state count even if it is late."""
        self._peers[hello.member.incarnation] = peer
        if hello.manager_state.desired.age > self._state_machine.manager_state.desired.age:
            self._keep(hello.manager_state)
        self._epoch_seen = max(self._epoch_seen, hello.roster_epoch)
        if self._recovering:
            self._time_recovery(hello, now)
            self._hellos[hello.member.rank] = hello
        self._send_heartbeat_if_due(peer, now)
        for command in self._unsent.pop(hello.member.incarnation, []):
            self._inbox.send(peer, command)
        if not self._recovering:
            self._send(self._state_machine.introduced(hello, now))

    def _time_recovery(self, hello: EngineHello, now: float) -> None:
        """Sets how long the coordinator listens, at the message of the first engine that had a
        predecessor. At another address, a newcomer tells nothing about the others: it knew this
        address from its start, and they must first look for it."""
        is_newcomer, has_moved = not hello.roster_epoch, self._has_moved
        if (is_newcomer and has_moved) or any(each.roster_epoch for each in self._hellos.values()):
            return
        heard_s = self._recovery.read(now)
        self._recovery_s = recovery_s(self._config, heard_s, has_moved=has_moved)

    def _heartbeat(self) -> CoordinatorHeartbeat:
        roster = self._state_machine.roster
        epoch = max(self._epoch_seen, roster.epoch)
        report_s = load_report_s(self._config, len(roster.members))
        return CoordinatorHeartbeat(epoch, self._state_machine.manager_state, report_s)

    def _send_heartbeat_if_due(self, peer: bytes, now: float) -> None:
        """Sends a heartbeat to an engine after its message, member or not."""
        if now >= self._heartbeats.get(peer, -float("inf")) + self._heartbeat_s:
            self._heartbeats[peer] = now
            self._inbox.send(peer, self._heartbeat())

    def _send_heartbeats(self) -> None:
        """Sends a new manager state to every engine that has sent something lately."""
        self._inbox.send_to_all(self._heartbeats, self._heartbeat())

    def _on_subscribe(self, peer: bytes, subscription: Subscribe, now: float) -> None:
        self._epoch_seen = max(self._epoch_seen, subscription.epoch)
        is_new = self._subscribers.on_message(peer, now, subscription.versions)
        if subscription.counts:
            self._metrics_aggregator.record(subscription.client_index, subscription.counts, now)
        if self._recovering:
            return
        if subscription.counts:
            others = self._metrics_aggregator.total_of_others(subscription.client_index)
            self._inbox.send(peer, OtherIngressCounts(others))
        self._state_machine.advance_epoch(subscription.epoch, now)
        if is_new or subscription.epoch != self._state_machine.roster.epoch:
            self._inbox.send(peer, self._state_machine.view())

    def _send(self, sends: RankedCommands) -> None:
        """Queues commands for an engine without `EngineHello`; drops those for one that is gone."""
        for rank, command in sends:
            member = self._state_machine.current_member(rank)
            if member is None:
                continue
            peer = self._peers.get(member.incarnation)
            if peer is not None:
                self._inbox.send(peer, command)
            else:
                self._unsent.setdefault(member.incarnation, []).append(command)

    def _publish(self, now: float) -> None:
        publication = self._state_machine.publication(now)
        if publication is None:
            return
        if not isinstance(publication, EngineLoads):
            self._forget_silent_peers(now)
        if isinstance(publication, ClusterView):  # so it is soon known which are idle
            self._send([(rank, self._heartbeat()) for rank in publication.roster.leaving])
        self._inbox.send_to_all(self._subscribers, publication)

    def _forget_silent_peers(self, now: float) -> None:
        forgotten_at = now - self._config.stall_timeout_s
        self._heartbeats = {p: at for p, at in self._heartbeats.items() if at > forgotten_at}
        self._subscribers.forget_silent(now)
        members = self._state_machine.incarnations
        self._peers = {
            incarnation: peer
            for incarnation, peer in self._peers.items()
            if incarnation in members or peer in self._heartbeats
        }
        self._unsent = {i: commands for i, commands in self._unsent.items() if i in members}

    def _end_recovery(self, now: float) -> None:
        """Completes the recovery after `recovery_s` of listening; time in which the loop was
        suspended does not count. An operator's pause stays: sleeping engines must not wake up."""
        if self._recovery.advance(now) < self._recovery_s:
            return
        self._recovering = False
        hellos, self._hellos = [*self._hellos.values()], {}
        ranks = sorted(hello.member.rank for hello in hellos)
        self._log.warning("recovered", engines=ranks, epoch=self._epoch_seen + 1)
        self._send(self._state_machine.recover(self._epoch_seen, hellos, now))
        if self._state_machine.manager_state.desired.pause_requested:
            self._send(self._state_machine.pause(now))
