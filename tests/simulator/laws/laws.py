"""Runs a scenario and returns the laws that it has broken. A law is an invariant of every run."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from itertools import count

from swell.cluster.control.plan.versions import UpgradeStage
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import JourneyEventType
from tests.simulator.actors import SimEngine, SimManager, weights_of
from tests.simulator.control_plane import (
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
    SimRequest,
)
from tests.simulator.coverage import Transitions
from tests.simulator.faults import FaultInjector
from tests.simulator.kernel.process import simulated_exits
from tests.simulator.laws.agreement import disagreements
from tests.simulator.laws.decisions import logged_defects
from tests.simulator.laws.observations.disturbances import LOOK_S
from tests.simulator.laws.observations.probe import Prober
from tests.simulator.laws.observations.watch import Watch
from tests.simulator.laws.status import StatusReader
from tests.simulator.model import expected_tokens, text_of
from tests.simulator.scenario import Request, Scenario

PATIENCE_S = 120.0
"""The time after the last fault, arrival and operator change within which everything must work
again."""
CHANGES_S = 1200.0
"""The longest time after the last fault and arrival for which operator changes extend the run: a
request that is repeated for longer will never be answered."""
_GIVEN_UP = re.compile("engines in a row were lost (while they computed the request|in its steps)")
_POISON = "poison"
QUEUED, ROUTED, FINISHED = (
    JourneyEventType.QUEUED,
    JourneyEventType.ROUTED,
    JourneyEventType.FINISHED,
)
_LAST_NUMBER = 9000
"""The number of the first request that is sent before the end of the cluster."""
_TAKEN_S, _END_S = 0.1, 30.0
"""The time within which engines have got these requests, and within which the cluster ends."""
_LATE_S = 0.1
"""How late an ingress may notice a deadline."""
_SETTLE_S = 2 * HEARTBEAT_S
MAX_EVENTS = 20_000
"""The maximum number of events between two looks: ten times as many as there are."""


@dataclass(frozen=True)
class Verdict:
    broken: list[str]
    events: int
    checksum: int
    virtual_s: float
    faults: list[str]
    transitions: set[str] = field(default_factory=set)
    """The transitions of the run: see `coverage.py`."""


class Run:
    """Runs a scenario from its first event to its verdict."""

    def __init__(self, scenario: Scenario) -> None:
        self.plane = ControlPlane(scenario)
        self.faults = FaultInjector(self.plane)
        self.watch = Watch(self.plane, self.faults)
        self.prober = Prober(self.plane, self.faults)
        self.status = StatusReader(self.plane)
        self.transitions = Transitions(self.plane)
        # The end of a fault that lasts is known when it happens (`FaultInjector.last_at`).
        self._planned_s = max(
            [request.at for request in scenario.requests]
            + [fault.at for fault in scenario.faults]
            + [operation.at for operation in scenario.operations],
            default=0.0,
        )

    def judge(self) -> Verdict:
        """Runs the scenario until nothing changes any more."""
        return self._close(self._run())

    def judge_to_end(self) -> Verdict:
        """Runs the scenario, and then ends the cluster in order."""
        return self._close(self._run() or self._end())

    def _close(self, broken: list[str]) -> Verdict:
        plane, kernel, happened = self.plane, self.plane.kernel, self.faults.happened
        transitions = self.transitions.finish(happened)
        verdict = Verdict(broken, kernel.events, kernel.checksum, kernel.now, happened, transitions)
        plane.close()  # the order of the processes does not matter
        return verdict

    def _run(self) -> list[str]:
        kernel = self.plane.kernel
        try:
            with simulated_exits(), logged_defects() as defects:
                self._run_until_rest(defects)
            broken = [*self._broken_laws(), *defects]
            if not broken:
                broken = [*self._check_requests(), *self._check_journeys()]
                broken += [*self._check_deadlines(), *self._check_poison(), *self._check_rest()]
        except (AssertionError, RuntimeError) as error:
            broken = [*kernel.failures, f"{type(error).__name__}: {error}"]
        return broken

    def _end(self) -> list[str]:
        try:
            with simulated_exits(), logged_defects() as defects:
                return [*self._check_end(), *defects]
        except (AssertionError, RuntimeError) as error:
            return [*self.plane.kernel.failures, f"{type(error).__name__}: {error}"]

    def _broken_laws(self) -> list[str]:
        return [*self.plane.kernel.failures, *self.watch.broken, *self.prober.broken]

    def _run_until_rest(self, defects: list[str]) -> None:
        """Runs until nothing changes any more, or a law is broken. `defects` receives logged
        exceptions that only a defect raises."""
        kernel = self.plane.kernel
        rest_since: float | None = None
        while True:
            kernel.run(kernel.now + LOOK_S, MAX_EVENTS)
            self.watch.look()
            self.prober.look()
            self.transitions.look()
            if defects or self._broken_laws():
                return
            over = max(self._planned_s, self.faults.last_at)
            over = max(over, min(self.plane.operator.changed_at, over + CHANGES_S))
            if kernel.now <= over:
                continue
            is_disturbed = rest_since is not None and over >= rest_since
            if is_disturbed or not self._is_at_rest():
                rest_since = None
            elif rest_since is None:
                rest_since = kernel.now
                self.status.read()
            elif kernel.now - rest_since >= _SETTLE_S:
                return
            if kernel.now > over + PATIENCE_S:
                return

    def _is_at_rest(self) -> bool:
        plane = self.plane
        if any(request.end is None for request in plane.requests) or self.watch.freed.is_pending:
            return False
        if any(engine.has_work for engine in plane.living_engines):
            return False
        if plane.operator.unanswered or self.prober.is_under_way or not plane.manager.has_started:
            return False
        states = [ingress.llm.view.reports.state for ingress in plane.ingresses if ingress.llm]
        if not {"forming", "pausing"}.isdisjoint(states):
            return False  # packets that a cut held back may still come
        if "paused" in states and not plane.operator.paused:
            return False
        record = plane.manager.manager.upgrader.record
        if record.stage in (UpgradeStage.IN_PROGRESS, UpgradeStage.ROLLING_BACK):
            return False
        if any(engine.current_version != record.wanted for engine in plane.living_engines):
            return False  # an engine without answers of its old version left will be replaced
        fleet = plane.manager.manager._fleet
        if fleet.starting or fleet.ending or not fleet._placement.orphans.is_done:
            return False  # the engines must match the state
        if len(plane.ray.groups) > plane.manager.manager.target:
            return False  # a late call created one; the next poll removes it
        views = [ingress.llm.active_ranks for ingress in plane.ingresses if ingress.llm]
        if len(views) != len(plane.ingresses):
            return False
        target = plane.manager.manager.target
        if any(len(view) != target or target != len(plane.living_engines) for view in views):
            return False
        return next(disagreements(plane), None) is None

    # ---------------------------------------------------------------- laws

    def _check_end(self) -> list[str]:
        """Ends the cluster in order. Checks that its engines finish first the requests that have
        reached them, and that nothing of it is left. A fault or a new deployment that waited for
        one of these messages may end the manager before."""
        plane, kernel = self.plane, self.plane.kernel
        before = len(self.faults.happened), plane.num_redeploys
        last = [
            SimRequest(_LAST_NUMBER + i.index, Request(kernel.now, i.index, (1, 2, 3), 60, i.index))
            for i in plane.ingresses
        ]
        for ingress, request in zip(plane.ingresses, last, strict=True):
            ingress.submit(request)
        kernel.run(kernel.now + _TAKEN_S, MAX_EVENTS)
        reached = {
            request_id
            for engine in plane.living_engines
            if engine.server is not None
            for request_id in engine.server.core.scheduler.requests
        }
        hangs = any(engine.executor.hangs for engine in plane.living_engines)
        may_finish = not (plane.operator.paused or hangs or "clock" in self.faults.kinds)
        stopped = _stop(plane.manager)
        until = kernel.now + _END_S / self.faults.slowest_clock
        while not stopped.done() and kernel.now < until:
            kernel.run(kernel.now + LOOK_S, MAX_EVENTS)
        kernel.run(kernel.now + _SETTLE_S, MAX_EVENTS)  # processes terminate a moment later
        if (len(self.faults.happened), plane.num_redeploys) != before:
            return []
        if not stopped.done():
            return ["the manager does not end the cluster"]
        broken = [*kernel.failures]
        if (error := stopped.exception()) is not None:
            broken.append(f"the end of the cluster fails: {type(error).__name__}: {error}")
        broken += [
            f"r{request.number} ended with the cluster: {request.end}"
            for request in last
            if request.end != "length" and may_finish and f"r{request.number}" in reached
        ]
        ray = plane.ray
        alive = [each.name for each in ray.processes.values() if each.alive]
        left = [name for name in alive if name.startswith(("sim-engine", "coordinator"))]
        if left or ray.actors or ray.groups or ray.values:
            broken.append(f"the cluster leaves {[*left, *ray.actors, *ray.groups, *ray.values]}")
        return broken

    def _check_requests(self) -> list[str]:
        """Checks that each accepted request finishes once, with the text of an undisturbed run with
        the version that it names. So no answer mixes versions."""
        broken = []
        for each in self.plane.requests:
            request, name = each.request, f"r{each.number}"
            version = each.state.answer_version.version if each.state is not None else None
            weights = weights_of(version) if version else 0
            expected = expected_tokens(request.prompt, request.max_tokens, request.seed, weights)
            if each.ended_with_ingress:
                continue
            if each.end.startswith("RequestTimedOut") if each.end else False:
                if each.token_ids != expected[: len(each.token_ids)]:
                    broken.append(f"{name} has a wrong text")
                if not self._has_timed_out(each):
                    broken.append(f"{name} ended before its deadline: {each.end}")
            elif each.end == "abort" and each.gives_up:
                if each.token_ids != expected[: len(each.token_ids)]:
                    broken.append(f"{name} has a wrong text")
            elif each.end is None:
                broken.append(f"{name} never ended, {len(each.token_ids)} tokens came")
            elif _GIVEN_UP.search(each.end) and self._may_be_given_up(each):
                """May be correct: two engines in a row may have been lost while they computed
                it."""
            elif each.end.startswith("NoEngine") and self._has_waited(each):
                """No engine has taken it in time."""
            elif each.was_aborted:
                broken.append(f"{name} was given up by its client, and ended with {each.end}")
            elif each.end != "length":
                broken.append(f"{name} failed: {each.end}")
            elif each.token_ids != expected or each.text != text_of(expected):
                broken.append(f"{name} has a wrong text")
        return broken

    def _check_journeys(self) -> list[str]:
        """Checks that the events of each request are in order, finish once, and name every
        attempt."""
        broken = []
        for each in self.plane.requests:
            if each.ended_with_ingress or each.end is None or each.state is None:
                continue
            journey, ranks = each.state.journey, each.state.ranks
            kinds = [event.kind for event in journey.events]
            times = [event.at_s for event in journey.events]
            routed = [
                (event.rank, event.attempt) for event in journey.events if event.kind is ROUTED
            ]
            if kinds.count(FINISHED) != 1 or kinds[-1] is not FINISHED or times != sorted(times):
                broken.append(f"r{each.number} has events that are not in order: {journey.events}")
            elif not journey.num_left_out and routed != [*zip(ranks, count(1), strict=False)]:
                broken.append(f"r{each.number} ran on {ranks}, and its events name {routed}")
        return broken

    def _may_be_given_up(self, request: SimRequest) -> bool:
        """Returns whether a request may be given up: engines on which it ran were lost or lost a
        worker twice in all, perhaps the same engine. If only poison requests have terminated
        engines, other requests must not be given up."""
        if self.faults.kinds == {_POISON}:
            return request.request.is_poison
        ranks = request.state.ranks if request.state is not None else []
        num_lost = sum(
            self.watch.was_lost(engine) + self.faults.lost_workers[engine.process]
            for engine in self.plane.engines
            if engine.rank in ranks
        )
        return num_lost >= MAX_FAILED_ATTEMPTS

    def _has_waited(self, request: SimRequest) -> bool:
        """Returns whether a request waited for its first engine as long as its limit says."""
        state, limit_s = request.state, 0.999 * self.plane.scenario.no_engine_timeout_s
        if state is None:
            return request.waited_s > limit_s
        if state.ranks:
            return False
        [queued] = [event.at_s for event in state.journey.events if event.kind is QUEUED]
        waited_s = state.journey.events[-1].at_s - queued
        return waited_s > limit_s

    def _has_timed_out(self, request: SimRequest) -> bool:
        """Returns whether a request has lasted as long as its deadline says."""
        timeout_s, state = request.request.timeout_s, request.state
        if timeout_s is None or state is None:
            return False
        events = state.journey.events
        return events[-1].at_s - events[0].at_s > 0.999 * timeout_s

    def _check_deadlines(self) -> list[str]:
        """Checks that no request outlasts its deadline. An ingress that is stopped notices it
        later."""
        broken = []
        for each in self.plane.requests:
            timeout_s, state = each.request.timeout_s, each.state
            if timeout_s is None or state is None or each.ended_with_ingress:
                continue
            events = state.journey.events
            if events[-1].at_s - events[0].at_s > timeout_s + _LATE_S and not self._was_stopped(
                each
            ):
                broken.append(f"r{each.number} outlasts its deadline of {timeout_s:.2f} s")
        return broken

    def _was_stopped(self, request: SimRequest) -> bool:
        """Returns whether the ingress that served the request was stopped."""
        ingresses = [*self.plane.past_ingresses, *self.plane.ingresses]
        return any(each.process.stops for each in ingresses if request in each.requests)

    def _check_poison(self) -> list[str]:
        """Checks that poison requests are given up after `MAX_FAILED_ATTEMPTS` terminated
        engines."""
        if self.faults.kinds == {_POISON} and self.faults.num_poisoned > MAX_FAILED_ATTEMPTS:
            return [f"a request has ended {self.faults.num_poisoned} engines"]
        return []

    def _check_rest(self) -> list[str]:
        """Checks that everything works again and that nothing is left over."""
        plane, operator = self.plane, self.plane.operator
        broken = [f"{operation} was never answered" for operation in operator.unanswered]
        broken += [*disagreements(plane), *self.status.broken]
        target = plane.manager.manager.target
        if target not in operator.possible_targets:
            broken.append(f"{target} engines are the target, not {operator.possible_targets}")
        if len(plane.living_engines) != target:
            names = [engine.process.name for engine in plane.living_engines]
            broken.append(f"{target} engines are wanted, and these live: {names}")
        record = plane.manager.manager.upgrader.record
        if record.stage in (UpgradeStage.IN_PROGRESS, UpgradeStage.ROLLING_BACK):
            broken.append(f"an upgrade is {record.stage} for ever")
        for engine in plane.living_engines:
            if engine.current_version != record.wanted:
                broken.append(f"{engine.process.name} is not of the version {record.wanted}")
        if len(plane.ray.groups) > target:
            broken.append(f"placement groups are left: {sorted(plane.ray.groups)}")
        for ingress in plane.ingresses:
            broken += self._check_ingress(ingress, target)
        for engine in plane.living_engines:
            broken += self._check_engine(engine)
        return broken

    def _check_ingress(self, ingress: SimIngress, target: int) -> list[str]:
        name, llm, usage = ingress.process.name, ingress.llm, ingress.usage
        if llm is None:
            return [f"{name} never opened"]
        broken = []
        if len(llm.active_ranks) != target:
            broken.append(f"{name} routes to {llm.active_ranks}, not {target} engines")
        if llm._processor.request_states or len(llm._placer._queue):
            broken.append(f"{name} keeps requests")
        if not llm.check_ready().ranks and not self.plane.operator.paused:
            broken.append(f"{name} is not ready: {llm.check_ready().reason}")
        tokens = sum(len(request.token_ids) for request in ingress.requests)
        if usage.output_tokens != tokens:
            broken.append(f"{name} counts {usage.output_tokens} tokens, not {tokens}")
        accepted = [request for request in ingress.requests if request.state is not None]
        if len(usage.finished) != len(accepted):
            broken.append(f"{name} counts {len(usage.finished)} of {len(accepted)} ends")
        return broken

    def _check_engine(self, engine: SimEngine) -> list[str]:
        name, clients = engine.process.name, len(self.plane.ingresses)
        if engine.server is None:
            return [f"{name} loads for ever"]
        broken = []
        try:
            engine.server.core.check_idle()
        except AssertionError as leak:
            broken.append(f"{name}: {leak}")
        known = len(engine.server._client_tracker._clients)
        bound_s = (2 * STALL_TIMEOUT_S + self.watch.hang_s) / self.faults.slowest_clock
        if known > clients and self.plane.kernel.now - self.faults.last_at > bound_s:
            broken.append(f"{name} knows {known} clients, not {clients}")
        return broken


def _stop(manager: SimManager) -> asyncio.Future[None]:
    """Ends the cluster, as Serve does when the application ends."""
    loop = manager.process.loop
    ended: asyncio.Future[None] = loop.create_future()

    async def stop() -> None:
        try:
            await manager.manager.stop()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    manager.process.kernel.soon(manager.process, lambda: loop.create_task(stop(), name="stop"))
    return ended


def judge(scenario: Scenario) -> Verdict:
    return Run(scenario).judge_to_end()
