"""The coordinator's loop: a `CoordinatorStateMachine` between its channel and its callers.

A coordinator that died is started again with the same keys, name and port, so its peers find it
where it was. It knows nothing then: it lets every engine that reports introduce itself, and after
a moment (`recovery_s`) the cluster consists of these. Serving goes on meanwhile: no view is sent,
and calls wait.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swell.configs.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Inbox, make_keys
from swell.coordinator.engine_monitor import StalledEngine
from swell.coordinator.ground import Ground, ThreadGround
from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.loop_calls import LoopCalls
from swell.coordinator.metrics_aggregator import MetricsAggregator
from swell.coordinator.null_waves import NullCoordinator
from swell.coordinator.roster import Member, Roster
from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.coordinator.wave_interface import CoordinatorWaves, RankedCommands
from swell.coordinator.waves import WaveCoordinator
from swell.coordinator.wire import (
    ClusterView,
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    EngineReport,
    Introduce,
    OtherIngressCounts,
    Subscribe,
)

_SUBSCRIBER_TIMEOUT_HEARTBEATS = 5
"""Heartbeats after which a silent ingress is sent nothing more."""
_CHECKS_PER_TIMEOUT = 10
"""Checks for stalled engines in the time after which one counts as stalled."""


def recovery_s(config: ClusterConfig) -> float:
    """How long a successor listens: peers connect within a second, and send each heartbeat."""
    return 1.0 + config.heartbeat_s


class CoordinatorEndpoint(msgspec.Struct, frozen=True):
    """Where a coordinator is found, and with which keys; its successor has the same."""

    keys: ChannelKeys
    name: str | None = None
    """Of its `ipc` socket; None: any."""
    port: int = 0
    """0: any."""


class ManagerState(msgspec.Struct, frozen=True):
    """Which manager leads, and what it does. What it wants is in its checkpoint."""

    owner: str = ""
    """The manager that leads; empty: none has spoken to this coordinator."""
    phase: str = "idle"
    """Of the change of engines: idle, prepare, commit, drain or failed."""


class Membership(msgspec.Struct, frozen=True):
    """The cluster as the manager sees it."""

    view: ClusterView
    stalled_engines: list[StalledEngine] = []
    """Every engine that was found to have stalled."""
    note: ManagerState = ManagerState()


class CoordinatorService:
    """The coordinator's socket and its loop, for engines, ingresses and the manager.

    The state belongs to the loop. Public methods may be called from any thread: they hand a call
    to the loop and wait for its answer (see `Ground.answer`).
    """

    def __init__(
        self,
        config: ClusterConfig,
        ground: Ground | None = None,
        *,
        lockstep: bool = False,
        endpoint: CoordinatorEndpoint | None = None,
        recover: bool = False,
    ) -> None:
        """`lockstep`: engines share experts. `recover`: it succeeds one that had this endpoint."""
        self._ground = ground = ground or ThreadGround()
        endpoint = endpoint or CoordinatorEndpoint(make_keys())
        self.keys = endpoint.keys
        now = ground.now()
        self._config = config
        self._log = StructuredLogger("coordinator")
        self._inbox: Inbox[CoordinatorMessage] = ground.inbox(
            CoordinatorMessage, endpoint.keys, name=endpoint.name, port=endpoint.port
        )
        waves: CoordinatorWaves = WaveCoordinator() if lockstep else NullCoordinator()
        self._state_machine = CoordinatorStateMachine(config, waves, now)
        self._waker = ground.waker()
        self._calls = LoopCalls(ground, self._waker)
        self._subscribers: dict[bytes, float] = {}
        """Ingresses, and when each subscribed last, by `_subscriber_clock`."""
        self._subscriber_clock = ListeningClock(_SUBSCRIBER_TIMEOUT_HEARTBEATS * config.heartbeat_s)
        self._metrics_aggregator = MetricsAggregator()
        self._peers: dict[int, bytes] = {}
        """Channel identities of engines, by incarnation: a rank may have had several."""
        self._unsent: dict[int, list[EngineCommand]] = {}
        """For engines that join and have not sent `EngineHello` yet; the same key."""
        self._manager_state = ManagerState()
        self._epoch_seen = 0
        self._hellos: dict[int, EngineHello] = {}
        self._recovering = recover
        self._recovery = ListeningClock(recovery_s(config))
        self._recovery.advance(now)
        self._stopping = False
        self._loop = ground.spawn("coordinator", self._run())

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    # ---------------------------------------------------------------- from other threads

    def view(self) -> ClusterView:
        """From the loop itself, so an answer also says that the loop runs."""
        return self._calls.call(lambda: self._state_machine.view())

    def membership(self) -> Membership:
        return self._calls.call(self._membership)

    def wait(self, epoch: int, timeout_s: float) -> Membership:
        """Return when the roster is no longer of `epoch`, or after the time."""
        return self._calls.call_and_wait(
            timeout_s, lambda: self._state_machine.roster.epoch != epoch, self._membership
        )

    def join(self, members: list[Member], timeout_s: float) -> Roster:
        """Return when they are in the roster. Raises ValueError for a rank that is taken, and
        RuntimeError, with all engines as before, if their group does not form in time."""
        ranks = {member.rank for member in members}

        def joined_or_lost() -> bool:
            """All are in the roster, or one will never be."""
            here = set(self._state_machine.roster.ranks)
            return ranks <= here or not ranks <= here | self._state_machine.joining

        def finish() -> Roster:
            missing = sorted(ranks - set(self._state_machine.roster.ranks))
            if not missing:
                return self._state_machine.roster
            stalled = self._state_machine.stalled_engines
            reasons = [engine.reason for engine in stalled if engine.rank in missing]
            self._change(lambda now: self._state_machine.remove_failed(missing, now))
            raise RuntimeError(
                f"engines {missing} did not join the group"
                + (f": {reasons[-1]}" if reasons else f" within {timeout_s:g} s or died meanwhile")
            )

        return self._calls.call_and_wait(
            timeout_s,
            joined_or_lost,
            finish,
            lambda: self._change(lambda now: self._state_machine.join(members, now)),
        )

    def leave(self, ranks: list[int]) -> Roster:
        """These engines get no more requests."""
        return self._calls.call(
            lambda: self._change(lambda now: self._state_machine.leave(ranks, now))
        )

    def cancel_leave(self, ranks: list[int]) -> Roster:
        """Engines that were leaving are active again."""
        return self._calls.call(
            lambda: self._change(lambda now: self._state_machine.cancel_leave(ranks, now))
        )

    def detach(self, ranks: list[int], timeout_s: float) -> Roster:
        """Return when the roster is without them: when their group goes on without them."""
        return self._calls.call_and_wait(
            timeout_s,
            lambda: not set(ranks) & set(self._state_machine.roster.ranks),
            lambda: self._change(lambda now: self._state_machine.remove_failed(ranks, now)),
            lambda: self._change(lambda now: self._state_machine.detach(ranks, now)),
        )

    def remove_failed(self, ranks: list[int]) -> Roster:
        """Take out engines that are dead."""
        return self._calls.call(
            lambda: self._change(lambda now: self._state_machine.remove_failed(ranks, now))
        )

    def pause(self) -> None:
        """Pause all engines."""
        self._calls.call(lambda: self._change(self._state_machine.pause))

    def resume(self) -> None:
        """Let all engines go on."""
        self._calls.call(lambda: self._change(self._state_machine.resume))

    def take_over(self, owner: str) -> None:
        """Let this manager lead from now on."""

        def run() -> None:
            self._manager_state = msgspec.structs.replace(self._manager_state, owner=owner)

        self._calls.call(run)

    def note(self, note: ManagerState) -> None:
        """Keep the state of the manager. A manager that no longer leads is ignored."""

        def run() -> None:
            if self._manager_state.owner in ("", note.owner):
                self._manager_state = note
                self._state_machine.phase = note.phase

        self._calls.call(run)

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
        there = await self._ground.ready(self._inbox, self._wait_s(), self._waker)
        for peer, message in self._inbox.take() if there else ():
            try:
                self._on_message(peer, message)
            except Exception as error:  # a message of one peer ends nothing for the others
                what = type(message).__name__
                self._log.error("not handled", message_type=what, error=repr(error))
        now = self._ground.now()
        if self._recovering:
            self._end_recovery(now)
            return
        self._send(self._state_machine.tick(now))
        self._calls.run(now)
        self._publish(now)

    def _membership(self) -> Membership:
        return Membership(
            self._state_machine.view(),
            list(self._state_machine.stalled_engines),
            self._manager_state,
        )

    def _change(self, step: Callable[[float], RankedCommands]) -> Roster:
        self._send(step(self._ground.now()))
        return self._state_machine.roster

    def _wait_s(self) -> float:
        """Until something is due."""
        now = self._ground.now()
        if self._recovering:
            return (
                max(0.0, recovery_s(self._config) - self._recovery.read(now)) / _CHECKS_PER_TIMEOUT
            )
        check_interval_s = self._config.stall_timeout_s / _CHECKS_PER_TIMEOUT
        publish_s = self._state_machine.cluster_state.wait_s(now)
        return min(publish_s, check_interval_s, self._calls.wait_s(now))

    def _on_message(self, peer: bytes, message: CoordinatorMessage) -> None:
        now = self._ground.now()
        match message:
            case Subscribe():
                self._on_subscribe(peer, message, now)
            case EngineHello():
                self._peers[message.member.incarnation] = peer
                if self._recovering:
                    self._hellos[message.member.rank] = message
                for command in self._unsent.pop(message.member.incarnation, []):
                    self._inbox.send(peer, command)
            case _:
                if self._state_machine.member(message.rank, message.incarnation) is not None:
                    self._peers[message.incarnation] = peer
                    self._send(self._state_machine.on_message(message, now))
                elif self._recovering and isinstance(message, EngineReport):
                    self._inbox.send(peer, Introduce())

    def _on_subscribe(self, peer: bytes, subscription: Subscribe, now: float) -> None:
        self._epoch_seen = max(self._epoch_seen, subscription.epoch)
        is_new = peer not in self._subscribers
        self._subscribers[peer] = self._subscriber_clock.read(now)
        if subscription.counts:
            self._metrics_aggregator.record(subscription.client_index, subscription.counts, now)
        if self._recovering:
            return
        if subscription.counts:
            self._inbox.send(
                peer,
                OtherIngressCounts(
                    self._metrics_aggregator.total_of_others(subscription.client_index)
                ),
            )
        self._state_machine.advance_epoch(subscription.epoch, now)
        if is_new:
            self._inbox.send(peer, self._state_machine.view())

    def _send(self, sends: RankedCommands) -> None:
        """What is for an engine that has not sent `EngineHello` yet waits for it; what is for one
        that has gone is dropped."""
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
        if self._state_machine.cluster_state.due(now) is None:
            return
        silent_s = _SUBSCRIBER_TIMEOUT_HEARTBEATS * self._config.heartbeat_s
        listened_s = self._subscriber_clock.advance(now)
        self._subscribers = {
            p: at for p, at in self._subscribers.items() if listened_s - at < silent_s
        }
        view = self._state_machine.view()
        for peer in self._subscribers:
            self._inbox.send(peer, view)

    def _end_recovery(self, now: float) -> None:
        """Once it has listened for `recovery_s`; time in which it was stopped does not count."""
        if self._recovery.advance(now) < recovery_s(self._config):
            return
        self._recovering = False
        hellos = list(self._hellos.values())
        self._log.warning("recovered", engines=sorted(self._hellos), epoch=self._epoch_seen + 1)
        self._send(self._state_machine.recover(self._epoch_seen, hellos, now))
