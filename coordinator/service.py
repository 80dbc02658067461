"""The coordinator's loop: a `CoordinatorStateMachine` between its channel and whoever calls it.

Runs on a thread of the coordinator actor; without Ray, on any thread. Everything that it knows
belongs to this thread: calls from others are run there, between messages.

A coordinator that died is started again with the same keys, name and port, so its peers find it
where it was. It knows nothing then: whoever speaks is asked to introduce itself, and after a
moment the cluster is what was heard. Serving goes on meanwhile: nobody is told a view.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error
from swell.configs.schema import ClusterConfig
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Inbox, Waker, make_keys
from swell.coordinator.engine_monitor import StalledEngine
from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.metrics_aggregator import MetricsAggregator
from swell.coordinator.null_waves import NullCoordinator
from swell.coordinator.roster import Member, Roster
from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.coordinator.waves import RankedCommands, WaveCoordinator
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

T = TypeVar("T")

_SUBSCRIBER_TIMEOUT_HEARTBEATS = 5
"""Heartbeats after which a silent ingress is told nothing more."""
_CHECKS_PER_TIMEOUT = 10
"""How often it is looked, while an engine may be silent, whether it is."""


def recovery_s(config: ClusterConfig) -> float:
    """How long a successor listens: peers find it within a second, and speak each heartbeat."""
    return 1.0 + config.heartbeat_s


class CoordinatorEndpoint(msgspec.Struct, frozen=True):
    """Where a coordinator is found, and by which keys; its successor takes the same."""

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
    """What the manager follows."""

    view: ClusterView
    stalled_engines: list[StalledEngine] = []
    """Every engine that was found to have stopped."""
    note: ManagerState = ManagerState()


class CoordinatorService:
    """Hears engines and ingresses, answers the manager."""

    def __init__(
        self,
        config: ClusterConfig,
        host: str = "127.0.0.1",
        *,
        lockstep: bool = False,
        endpoint: CoordinatorEndpoint | None = None,
        recover: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lockstep`: engines share experts. `recover`: another one was here before."""
        endpoint = endpoint or CoordinatorEndpoint(make_keys())
        self.keys = endpoint.keys
        self._clock = clock
        now = clock()
        self._config = config
        self._log = StructuredLogger("coordinator")
        self._inbox: Inbox[CoordinatorMessage] = Inbox(
            CoordinatorMessage, endpoint.keys, host, name=endpoint.name, port=endpoint.port
        )
        waves = WaveCoordinator() if lockstep else NullCoordinator()
        self._state_machine = CoordinatorStateMachine(config, waves, now)
        self._waker = Waker()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._subscribers: dict[bytes, float] = {}
        """Ingresses, and when each spoke last, by `_subscriber_clock`."""
        self._subscriber_clock = ListeningClock(_SUBSCRIBER_TIMEOUT_HEARTBEATS * config.heartbeat_s)
        self._metrics_aggregator = MetricsAggregator()
        self._peers: dict[int, bytes] = {}
        """Engines that have spoken, by incarnation: a rank may have had others."""
        self._unsent: dict[int, list[EngineCommand]] = {}
        """For engines that join and have not introduced themselves yet; the same key."""
        self._changed = threading.Condition()
        self._notified: tuple[int, frozenset[int]] = (0, frozenset())
        """What those who wait for a change were last woken for: epoch, and who is joining."""
        self._note = ManagerState()
        self._epoch_seen = 0
        self._hellos: dict[int, EngineHello] = {}
        self._recovering = recover
        self._recovery = ListeningClock(recovery_s(config))
        self._recovery.advance(now)
        self._stopping = threading.Event()
        run = exit_on_error(self._run, "coordinator")
        self._thread = threading.Thread(target=run, name="swell-coordinator", daemon=True)
        self._thread.start()

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    # ---------------------------------------------------------------- from other threads

    def view(self) -> ClusterView:
        return self._call(self._state_machine.view)

    def membership(self) -> Membership:
        return self._call(
            lambda: Membership(
                self._state_machine.view(), list(self._state_machine.stalled_engines), self._note
            )
        )

    def wait(self, epoch: int, timeout_s: float) -> Membership:
        """Return when the roster is no longer of `epoch`, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._state_machine.roster.epoch != epoch, timeout_s)
        return self.membership()

    def join(self, members: list[Member], timeout_s: float) -> Roster:
        """Return when they are in the roster. Raises ValueError for a rank that is taken, and
        RuntimeError, with everybody as before, if their group does not form in time."""
        ranks = {member.rank for member in members}
        self._change(lambda now: self._state_machine.join(members, now))
        with self._changed:
            self._changed.wait_for(lambda: self._joined_or_lost(ranks), timeout_s)
        roster = self._state_machine.roster
        missing = sorted(ranks - set(roster.ranks))
        if missing:
            reasons = [v.reason for v in self.membership().stalled_engines if v.rank in missing]
            self.remove_failed(missing)
            raise RuntimeError(
                f"engines {missing} did not join the group"
                + (f": {reasons[-1]}" if reasons else f" within {timeout_s:g} s or died meanwhile")
            )
        return roster

    def leave(self, ranks: list[int]) -> Roster:
        return self._change(lambda now: self._state_machine.leave(ranks, now))

    def cancel_leave(self, ranks: list[int]) -> Roster:
        """Engines that were leaving are active again."""
        return self._change(lambda now: self._state_machine.cancel_leave(ranks, now))

    def detach(self, ranks: list[int], timeout_s: float) -> Roster:
        """Return when the roster is without them: when their group goes on without them."""
        self._change(lambda now: self._state_machine.detach(ranks, now))
        with self._changed:
            self._changed.wait_for(
                lambda: not set(ranks) & set(self._state_machine.roster.ranks), timeout_s
            )
        return self.remove_failed(ranks)

    def remove_failed(self, ranks: list[int]) -> Roster:
        """Take out engines that are dead."""
        return self._change(lambda now: self._state_machine.remove_failed(ranks, now))

    def pause(self) -> None:
        """Pause all engines."""
        self._change(self._state_machine.pause)

    def resume(self) -> None:
        """Let all engines go on."""
        self._change(self._state_machine.resume)

    def take_over(self, owner: str) -> None:
        """Let this manager lead from now on."""
        with self._changed:
            self._note = msgspec.structs.replace(self._note, owner=owner)

    def note(self, note: ManagerState) -> None:
        """Keep what the manager wants. One that no longer rules is not heard."""
        with self._changed:
            if self._note.owner in ("", note.owner):
                self._note = note
                self._state_machine.phase = note.phase

    def stop(self) -> None:
        self._stopping.set()
        self._waker.wake()
        self._thread.join()
        self._inbox.close()
        self._waker.close()

    def _joined_or_lost(self, ranks: set[int]) -> bool:
        known = {*self._state_machine.roster.ranks, *self._state_machine.joining}
        return ranks <= set(self._state_machine.roster.ranks) or not ranks <= known

    def _change(self, step: Callable[[float], RankedCommands]) -> Roster:
        def run() -> Roster:
            self._send(step(self._clock()))
            return self._state_machine.roster

        return self._call(run)

    def _call(self, run: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((run, future))
        self._waker.wake()
        return future.result()

    # ---------------------------------------------------------------- the loop

    def _run(self) -> None:
        while not self._stopping.is_set():
            for peer, message in self._inbox.receive(self._wait_s(), self._waker):
                try:
                    self._on_message(peer, message)
                except Exception as error:  # what one peer says ends nothing for the others
                    what = type(message).__name__
                    self._log.error("not handled", word=what, error=repr(error))
            if self._recovering:
                self._end_recovery(self._clock())
                continue
            self._serve_calls()
            now = self._clock()
            self._send(self._state_machine.tick(now))
            self._publish(now)
            self._notify_waiters()

    def _wait_s(self) -> float:
        """Until time has to be looked at again."""
        now = self._clock()
        if self._recovering:
            return (
                max(0.0, recovery_s(self._config) - self._recovery.read(now)) / _CHECKS_PER_TIMEOUT
            )
        check_interval_s = self._config.stall_timeout_s / _CHECKS_PER_TIMEOUT
        return min(self._state_machine.cluster_state.wait_s(now), check_interval_s)

    def _notify_waiters(self) -> None:
        now = (self._state_machine.roster.epoch, frozenset(self._state_machine.joining))
        if now != self._notified:
            with self._changed:
                self._notified = now
                self._changed.notify_all()

    def _serve_calls(self) -> None:
        while not self._calls.empty():
            run, future = self._calls.get()
            try:
                future.set_result(run())
            except Exception as error:
                future.set_exception(error)

    def _on_message(self, peer: bytes, message: CoordinatorMessage) -> None:
        now = self._clock()
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
        """An engine that has not introduced itself yet is told when it does; the dead are not."""
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
        """Once it has listened for so long; while it was stopped it has not."""
        if self._recovery.advance(now) < recovery_s(self._config):
            return
        self._recovering = False
        hellos = list(self._hellos.values())
        self._log.warning("recovered", engines=sorted(self._hellos), epoch=self._epoch_seen + 1)
        self._send(self._state_machine.recover(self._epoch_seen, hellos, now))
