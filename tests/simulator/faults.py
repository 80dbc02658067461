"""Faults by name. Each fault picks its target when it happens, among the processes that exist
then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.simulator.control_plane import HEARTBEAT_S, STALL_TIMEOUT_S, ControlPlane
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import Process
from tests.simulator.network.connection import Side
from tests.simulator.scenario import HOSTS, Fault
from tests.simulator.simulated_ray.ray_actor import Failure

_SLOW_WAY_S, _SLOW_EVENT_S = 0.02, 0.001
_POISON_S = 0.003
_GIVEN_UP_S = STALL_TIMEOUT_S + 1.0
"""The time within which a connection that delivers nothing is closed and replaced."""
_FAILURES = tuple(Failure)
_SLOW_CALL_S = 3.0
"""The longest delay of a call through Ray while calls are slow."""
_POWER_S = 3.0
"""A host without power stays away for at least this much longer than Ray needs to detect it."""


def _actors(one: Process, other: Process) -> frozenset[str]:
    return frozenset(process.name.rpartition(".")[0] for process in (one, other))


class FaultInjector:
    """Arms the faults of the scenario. `last_at`: the time at which the last fault so far has ended
    or will end."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._kernel = plane.kernel
        self.last_at = 0.0
        self.happened: list[str] = []
        self.num_engines_lost = 0
        """Upper bound: each fault except `drop` counts, because it may terminate an engine."""
        self.begun_at = 0.0
        """When the latest fault began."""
        self.num_hangs = 0
        self.num_stopped_newcomers = 0
        """Number of engines that were stopped while they were not in the roster."""
        self.lost_workers: Counter[Process] = Counter()
        """How many workers each engine has lost."""
        self.num_poisoned = 0
        """Number of engines that a poison request has terminated."""
        self.slowest_clock = 1.0
        """The lowest clock rate of any process so far."""
        self.fastest_clock = 1.0
        self.severed_until: dict[frozenset[str], float] = {}
        """Pairs of actors whose connection delivers nothing, and until when at most."""
        self._reset_until: dict[frozenset[str], float] = {}
        """Pairs of actors whose connection was reset, until the lost messages have been sent
        again."""
        self._away_until = 0.0
        """When the latest outage of Ray's GCS ends."""
        self.call_failed_at = float("-inf")
        """When a call through Ray last failed."""
        self._hit: list[Process] = []
        """The processes that the latest fault of a process or link has hit."""
        self.kinds: set[str] = set()
        """The kinds of faults that have happened."""
        plane.on_poison.append(self._poison)
        for fault in plane.scenario.faults:
            self._kernel.at(fault.at, WORLD, self._arm, fault)

    def _arm(self, fault: Fault) -> None:
        if fault.trigger is None:
            FAULTS[fault.kind](self, fault, None)
        else:
            action = partial(FAULTS[fault.kind], self, fault)
            self._plane.net.aim(fault.trigger.kind, fault.trigger.count, action)

    # ---------------------------------------------------------------- targets

    def are_severed(self, one: Process, other: Process) -> bool:
        """Returns whether the connection of two actors delivers nothing: not even that one of them
        has terminated and has a successor at its address."""
        return self.severed_until.get(_actors(one, other), 0.0) > self._kernel.now

    def were_reset(self, one: Process, other: Process) -> bool:
        return self._reset_until.get(_actors(one, other), 0.0) > self._kernel.now

    def _pick(self, fault: Fault, things: Sequence[Any]) -> Any:
        return things[fault.target % len(things)] if things else None

    def _process(self, fault: Fault, side: Side | None, names: Sequence[str]) -> Process | None:
        """Picks a process with one of these name prefixes: preferably an end of the triggering
        message, else any living one."""
        process = self._pick_process(fault, side, names)
        if process is not None:
            self._hit = [process]
        return process

    def _pick_process(
        self, fault: Fault, side: Side | None, names: Sequence[str]
    ) -> Process | None:
        if fault.same:
            same = [p for p in self._hit if p.alive and p.name.startswith(tuple(names))]
            if same:
                return same[fault.target % len(same)]
        if fault.changing:
            changing = [each.process for each in self._plane.changing_engines]
            changing = [each for each in changing if each.name.startswith(tuple(names))]
            if changing:
                return changing[fault.target % len(changing)]
        if side is not None:
            ends = [side.process, side.peer.process]
            fit = [p for p in ends if p.alive and p.name.startswith(tuple(names))]
            if fit:
                return fit[fault.target % len(fit)]
        living = [p for p in self._plane.ray.processes.values() if p.alive]
        found: Process | None = self._pick(
            fault, [p for p in living if p.name.startswith(tuple(names))]
        )
        return found

    def _note(self, fault: Fault, what: str, lasts_s: float = 0.0) -> None:
        self._kernel.trace(f"fault {fault.kind} {what}".encode())
        self.num_engines_lost += fault.kind != "drop"
        self.kinds.add(fault.kind)
        self.happened.append(f"{self._kernel.now:.3f} {fault.kind} {what} {lasts_s:.2f}")
        self.begun_at = self._kernel.now
        self.num_hangs += fault.kind == "hang"
        self.last_at = max(self.last_at, self._kernel.now + lasts_s)

    def _later(self, fault: Fault, undo: Callable[..., None], *args: Any) -> None:
        self._kernel.at(self._kernel.now + fault.time_s, WORLD, undo, *args)

    # ---------------------------------------------------------------- faults

    def drop(self, fault: Fault, side: Side | None) -> None:
        """Resets a connection: messages in flight are lost."""
        net = self._plane.net
        if side is None:
            side = self._pick(fault, net.connections(""))
        if side is not None and not side.closed:
            self._note(fault, side.label.decode())
            if hasattr(side, "peer"):
                self._hit = [side.process, side.peer.process]
                ends = _actors(*self._hit)
                self._reset_until[ends] = self._kernel.now + 2 * HEARTBEAT_S
            net.drop(side if side.connected_here else side.peer)

    def kill(self, fault: Fault, side: Side | None) -> None:
        process = self._process(fault, side, ("sim-engine", "coordinator", "manager"))
        if process is not None:
            self._note(fault, process.name)
            process.kill()

    def stop(self, fault: Fault, side: Side | None) -> None:
        """Stops a process as SIGSTOP does, and resumes it later as SIGCONT does."""
        names = ("sim-engine", "coordinator", "manager", "ingress")
        process = self._process(fault, side, names)
        if process is not None and not process.stopped:
            self._stop(fault, process)

    def _stop(self, fault: Fault, process: Process) -> None:
        self._note(fault, process.name, fault.time_s)
        members = () if self._plane.coordinator is None else self._plane.coordinator.members
        known = {member.incarnation for member in members}
        self.num_stopped_newcomers += any(
            each.process is process and (not each.server or each.server.incarnation not in known)
            for each in self._plane.living_engines
        )
        process.stop()
        self._later(fault, process.resume)

    def cut(self, fault: Fault, side: Side | None) -> None:
        """Cuts off a host from all others."""
        host = self._pick(fault, HOSTS)
        others = [other for other in HOSTS if other != host]
        self._note(fault, host, fault.time_s)
        self._plane.net.isolate(host, others)
        self._later(fault, self._heal, [(host, o) for o in others] + [(o, host) for o in others])

    def half_cut(self, fault: Fault, side: Side | None) -> None:
        """Drops everything that a host sends to others."""
        host = self._pick(fault, HOSTS)
        self._note(fault, host, fault.time_s)
        for other in HOSTS:
            self._plane.net.cut(host, other)
        self._later(fault, self._heal, [(host, other) for other in HOSTS])

    def cut_pair(self, fault: Fault, side: Side | None) -> None:
        """Separates two hosts, while the third one reaches both."""
        here, there = self._pick_pair(fault)
        self._note(fault, f"{here}-{there}", fault.time_s)
        self._plane.net.isolate(here, [there])
        self._later(fault, self._heal, [(here, there), (there, here)])

    def half_cut_pair(self, fault: Fault, side: Side | None) -> None:
        """Drops everything that one host sends to another one."""
        here, there = self._pick_pair(fault)
        self._note(fault, f"{here}>{there}", fault.time_s)
        self._plane.net.cut(here, there)
        self._later(fault, self._heal, [(here, there)])

    def _pick_pair(self, fault: Fault) -> tuple[str, str]:
        """Returns an ordered pair of hosts; every ordered pair is possible."""
        here = fault.target % len(HOSTS)
        further = 1 + fault.target // len(HOSTS) % (len(HOSTS) - 1)
        return HOSTS[here], HOSTS[(here + further) % len(HOSTS)]

    def black_hole(self, fault: Fault, side: Side | None) -> None:
        """Makes one connection deliver nothing for a while, without notifying its ends. Other
        connections between the same hosts work."""
        net = self._plane.net
        if side is None:
            side = self._pick(fault, net.connections(""))
        if side is None or side.closed or not hasattr(side, "peer"):
            return
        self._note(fault, side.label.decode(), fault.time_s)
        self._hit = [side.process, side.peer.process]
        ends = _actors(*self._hit)
        lasts_s = min(fault.time_s, _GIVEN_UP_S)
        self.severed_until[ends] = self._kernel.now + lasts_s
        for each in (side, side.peer):
            each.cut()
            self._kernel.at(self._kernel.now + fault.time_s, each.peer.process, each.release)

    def _heal(self, ways: list[tuple[str, str]]) -> None:
        for one, other in ways:
            self._plane.net.heal(one, other)

    def gcs_away(self, fault: Fault, side: Side | None) -> None:
        self._note(fault, "", fault.time_s)
        self._plane.ray.set_away(True)
        self._away_until = max(self._away_until, self._kernel.now + fault.time_s)
        self._kernel.at(self._away_until, WORLD, self._bring_gcs_back)

    def _bring_gcs_back(self) -> None:
        if self._kernel.now >= self._away_until:  # else a later outage goes on
            self._plane.ray.set_away(False)

    def lose_host_for_good(self, fault: Fault, side: Side | None) -> None:
        """Makes a host lose its power permanently, with the coordinator and the manager if they run
        there. Does nothing if a host is lost already, and never hits the host with Ray's GCS."""
        ray = self._plane.ray
        if ray.lost_hosts:
            return
        host = self._pick(fault, HOSTS[1:])
        self._note(fault, host)
        self.last_at += ray.options.node_timeout_s
        processes = [process for process in ray.processes.values() if process.alive]
        ray.lose_host(host, processes)

    def hang(self, fault: Fault, side: Side | None) -> None:
        """Makes an engine hang: it sends heartbeats, but its steps do not finish."""
        living = self._plane.living_engines
        same = [engine for engine in living if fault.same and engine.process in self._hit]
        changing = self._plane.changing_engines if fault.changing else []
        engine = self._pick(fault, same or changing or living)
        if engine is not None:
            self._note(fault, engine.process.name)
            engine.executor.hangs = True

    def lose_worker(self, fault: Fault, side: Side | None) -> None:
        """Kills a worker of an engine; the worker is replaced."""
        process = self._process(fault, side, ("sim-engine",))
        serving = [each for each in self._plane.living_engines if each.server is not None]
        engine = next((each for each in serving if each.process is process), None)
        if engine is not None and not engine.executor.worker_lost:
            self._note(fault, engine.process.name)
            self.lost_workers[engine.process] += 1
            self._kernel.soon(engine.process, engine.executor.lose_worker)

    def _poison(self, process: Process) -> None:
        """Kills the engine in the middle of the step: messages sent before that have left the
        process."""
        self._kernel.at(self._kernel.now + _POISON_S, WORLD, self._end_poisoned, process)

    def _end_poisoned(self, process: Process) -> None:
        if process.alive:
            self._note(Fault("poison", self._kernel.now), process.name)
            self.num_poisoned += 1
            process.kill()

    def slow(self, fault: Fault, side: Side | None) -> None:
        """Delays all packets to and from a host, and all events on it."""
        host = self._pick(fault, HOSTS)
        self._note(fault, host, fault.time_s)
        self._plane.net.slow(host, _SLOW_WAY_S * (1 + fault.target))
        here = [p for p in self._plane.ray.processes.values() if p.host == host and p.alive]
        for process in here:
            process.slow(_SLOW_EVENT_S)
            self._later(fault, process.slow, 0.0)
        self._later(fault, self._end_slow, host)

    def _end_slow(self, host: str) -> None:
        if host in self._plane.net.slow_hosts:
            self._plane.net.slow(host, 0.0)

    def loss(self, fault: Fault, side: Side | None) -> None:
        """Loses some packets to and from a host. TCP sends them again, and later data on the same
        connection waits for them."""
        host = self._pick(fault, HOSTS)
        self._note(fault, host, fault.time_s)
        self._plane.net.lose_packets(host, 1)
        self._later(fault, self._plane.net.lose_packets, host, -1)

    def flap(self, fault: Fault, side: Side | None) -> None:
        """Resets all connections of a host to others, and loses some of its packets for a while:
        messages of a connection may arrive after those of its successor."""
        host, net = self._pick(fault, HOSTS), self._plane.net
        self._note(fault, host, fault.time_s)
        for each in net.connections(""):
            if (each.process.host == host) != (each.peer.process.host == host):
                ends = _actors(each.process, each.peer.process)
                self._reset_until[ends] = self._kernel.now + 2 * HEARTBEAT_S
                net.drop(each)
        net.lose_packets(host, 1)
        self._later(fault, net.lose_packets, host, -1)

    def slow_calls(self, fault: Fault, side: Side | None) -> None:
        """Delays calls through Ray, as on a busy machine."""
        ray = self._plane.ray
        self._note(fault, "", fault.time_s)
        ray.slow_calls(_SLOW_CALL_S, self._kernel.now + fault.time_s)

    def fail_call(self, fault: Fault, side: Side | None) -> None:
        """Makes a call through Ray fail as unavailable: one of the method that triggers the fault,
        or any one in progress. For a quarter of the targets the whole connection of the caller to
        the actor breaks."""
        calls = [(actor, each) for actor in self._plane.ray.actors.values() for each in actor.calls]
        if fault.trigger is not None:
            named = [found for found in calls if found[1].method == fault.trigger.kind]
            calls = named[-1:] or calls
        if (found := self._pick(fault, calls)) is None:
            return
        actor, call = found
        failure = _FAILURES[fault.target % len(_FAILURES)]
        self._note(fault, f"{actor.name}.{call.method} {failure.value}")
        self.call_failed_at = self._kernel.now
        failing = [call]
        if fault.target % 4 == 3:
            failing = [each for each in actor.calls if each.caller is call.caller]
        for each in failing:
            actor.fail(each, failure)

    def clock(self, fault: Fault, side: Side | None) -> None:
        """Sets the clock of a process to half to twice the world's rate, permanently."""
        process = self._process(fault, side, ("sim-engine", "coordinator", "manager", "ingress"))
        if process is not None:
            rate = 2.0 ** (fault.target % 12 / 5.5 - 1.0)
            self._note(fault, f"{process.name} {rate:.2f}")
            self.slowest_clock = min(self.slowest_clock, rate)
            self.fastest_clock = max(self.fastest_clock, rate)
            process.set_clock_rate(rate)

    def lose_host(self, fault: Fault, side: Side | None) -> None:
        """Makes a host lose its power. It returns empty, as a new node, after Ray has detected the
        loss. The head is never hit, because its loss terminates a Ray cluster."""
        host, ray = self._pick(fault, HOSTS[1:]), self._plane.ray
        if host in ray.lost_hosts:
            return
        away_s = max(fault.time_s, ray.options.node_timeout_s + _POWER_S)
        self._note(fault, host, away_s)
        ray.lose_host(host, list(ray.processes.values()))
        at = self._kernel.now + away_s
        self._kernel.at(at, WORLD, self._restore_host, host)

    def _restore_host(self, host: str) -> None:
        self._plane.ray.restore_host(host, self._plane.resources[host])

    def drain_host(self, fault: Fault, side: Side | None) -> None:
        """Notifies Ray that a host will be taken away, like spot capacity. A new host with the same
        name comes later. With a very short notice, the host is lost before anyone has read the
        notice. For half of the targets the notice is withdrawn after a quarter of its time, and the
        host stays."""
        host, ray = self._pick(fault, HOSTS[1:]), self._plane.ray
        if host in ray.lost_hosts or host in ray.draining or host not in ray.nodes:
            return
        is_withdrawn = fault.target // 2 % 2 == 1
        known_s = fault.time_s / 4 if is_withdrawn else fault.time_s
        self._note(fault, f"{host} has notice", known_s)
        ray.draining[host] = at = self._kernel.now + fault.time_s
        end = self._withdraw_notice if is_withdrawn else self._take_host
        self._kernel.at(self._kernel.now + known_s, WORLD, end, fault, host, at)

    def _withdraw_notice(self, fault: Fault, host: str, at: float) -> None:
        ray = self._plane.ray
        if ray.draining.get(host) == at:
            self._note(fault, f"{host} stays")
            del ray.draining[host]
            ray.withdrawn[host] = self._kernel.now

    def _take_host(self, fault: Fault, host: str, at: float) -> None:
        ray = self._plane.ray
        if ray.draining.get(host) != at or host in ray.lost_hosts:
            return  # it was lost before that
        away_s = ray.options.node_timeout_s + _POWER_S
        self._note(fault, f"{host} is taken", away_s)
        ray.lose_host(host, list(ray.processes.values()))
        self._kernel.at(self._kernel.now + away_s, WORLD, self._restore_host, host)

    def kill_ingress(self, fault: Fault, side: Side | None) -> None:
        process = self._process(fault, side, ("ingress",))
        if process is not None:
            self._note(fault, process.name)
            process.kill()

    def stop_pair(self, fault: Fault, side: Side | None) -> None:
        """Stops two engines at once."""
        engines = [each for each in self._plane.living_engines if not each.process.stopped]
        for index in range(min(2, len(engines))):
            self._stop(fault, engines[(fault.target + index) % len(engines)].process)

    def stop_control(self, fault: Fault, side: Side | None) -> None:
        """Stops the coordinator or the manager."""
        name = ("coordinator", "coordinator", "manager")[fault.target % 3]
        process = self._process(fault, None, (name,))
        if process is not None and not process.stopped:
            self._stop(fault, process)

    def second_manager(self, fault: Fault, side: Side | None) -> None:
        """Makes Serve believe that the manager has died and start another one. The first one keeps
        running until it is killed; for half of the targets it is stopped for the first half of that
        time."""
        plane, earlier = self._plane, self._plane.manager.process
        if not earlier.alive or not plane.manager.has_started:
            return
        self._note(fault, earlier.name, fault.time_s)
        if fault.target % 2 and not earlier.stopped:
            earlier.stop()
            self._kernel.at(self._kernel.now + fault.time_s / 2, WORLD, earlier.resume)
        plane.replace_manager()
        self._later(fault, earlier.kill)

    def kill_control(self, fault: Fault, side: Side | None) -> None:
        """Kills the manager, the coordinator, or both at once."""
        both = ("manager", "coordinator")
        for name in (both, ("manager",), both, ("coordinator",))[fault.target % 4]:
            process = self._process(fault, None, (name,))
            if process is not None:
                self._note(fault, process.name)
                process.kill()


FAULTS: dict[str, Callable[[FaultInjector, Fault, Side | None], None]] = {
    "drop": FaultInjector.drop,
    "kill": FaultInjector.kill,
    "stop": FaultInjector.stop,
    "cut": FaultInjector.cut,
    "half-cut": FaultInjector.half_cut,
    "cut-pair": FaultInjector.cut_pair,
    "half-cut-pair": FaultInjector.half_cut_pair,
    "black-hole": FaultInjector.black_hole,
    "gcs-away": FaultInjector.gcs_away,
    "hang": FaultInjector.hang,
    "lose-worker": FaultInjector.lose_worker,
    "slow": FaultInjector.slow,
    "loss": FaultInjector.loss,
    "flap": FaultInjector.flap,
    "slow-calls": FaultInjector.slow_calls,
    "fail-call": FaultInjector.fail_call,
    "clock": FaultInjector.clock,
    "lose-host": FaultInjector.lose_host,
    "kill-ingress": FaultInjector.kill_ingress,
    "kill-control": FaultInjector.kill_control,
    "stop-pair": FaultInjector.stop_pair,
    "stop-control": FaultInjector.stop_control,
    "second-manager": FaultInjector.second_manager,
    "drain-host": FaultInjector.drain_host,
    "lose-host-for-good": FaultInjector.lose_host_for_good,
}
