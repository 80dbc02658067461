"""One run of a scenario, and the laws that it has broken."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulator.control_plane import HEARTBEAT_S, STALL_TIMEOUT_S, ControlPlane
from tests.simulator.faults import FaultInjector
from tests.simulator.model import expected_tokens, text_of
from tests.simulator.process import simulated_exits
from tests.simulator.scenario import Scenario

PATIENCE_S = 120.0
"""After the last fault and the last arrival all must be as before."""
_LOOK_S = 0.5
_GIVEN_UP = "engines in a row were lost while they computed it"
_SETTLE_S = 2 * HEARTBEAT_S
MAX_EVENTS = 200_000


@dataclass(frozen=True)
class Verdict:
    broken: list[str]
    events: int
    checksum: int
    virtual_s: float
    faults: list[str]


class Run:
    """A scenario from its first event to its verdict."""

    def __init__(self, scenario: Scenario) -> None:
        self.plane = ControlPlane(scenario)
        self.faults = FaultInjector(self.plane)
        self._planned_s = max(
            [request.at for request in scenario.requests]
            + [fault.at + fault.time_s for fault in scenario.faults]
        )

    def judge(self) -> Verdict:
        plane, kernel = self.plane, self.plane.kernel
        try:
            with simulated_exits():
                self._run_until_rest()
            broken = [*kernel.failures, *self._check_requests(), *self._check_rest()]
        except (AssertionError, RuntimeError) as error:
            broken = [*kernel.failures, f"{type(error).__name__}: {error}"]
        finally:
            plane.close()
        return Verdict(broken, kernel.events, kernel.checksum, kernel.now, self.faults.happened)

    def _run_until_rest(self) -> None:
        kernel = self.plane.kernel
        rest_since: float | None = None
        while True:
            kernel.run(kernel.now + _LOOK_S, MAX_EVENTS)
            over = max(self._planned_s, self.faults.last_at)
            if kernel.now <= over:
                continue
            if not self._is_at_rest():
                rest_since = None
            elif rest_since is None:
                rest_since = kernel.now
            elif kernel.now - rest_since >= _SETTLE_S:
                return
            if kernel.now > over + PATIENCE_S:
                return

    def _is_at_rest(self) -> bool:
        plane = self.plane
        if any(request.end is None for request in plane.requests):
            return False
        wanted = list(range(plane.scenario.engines))
        views = [ingress.llm.active_ranks for ingress in plane.ingresses if ingress.llm]
        return len(views) == len(plane.ingresses) and all(view == wanted for view in views)

    # ---------------------------------------------------------------- laws

    def _check_requests(self) -> list[str]:
        """Each accepted request ends once, with the text of the undisturbed run."""
        broken = []
        for each in self.plane.requests:
            request, name = each.request, f"r{each.number}"
            expected = expected_tokens(request.prompt, request.max_tokens, request.seed)
            if each.ended_with_ingress:
                continue
            if each.end is None:
                broken.append(f"{name} never ended, {len(each.token_ids)} tokens came")
            elif _GIVEN_UP in each.end and self.faults.num_engines_lost >= 2:
                """Two engines were lost in a row while they computed it: it may be the reason."""
            elif each.end != "length":
                broken.append(f"{name} failed: {each.end}")
            elif each.token_ids != expected or each.text != text_of(expected):
                broken.append(f"{name} has a wrong text")
        return broken

    def _check_rest(self) -> list[str]:
        """Everything is there again, and empty."""
        broken, plane = [], self.plane
        for ingress in plane.ingresses:
            name = ingress.process.name
            if ingress.llm is None:
                broken.append(f"{name} never opened")
                continue
            ranks = ingress.llm.active_ranks
            if ranks != list(range(plane.scenario.engines)):
                broken.append(f"{name} routes to {ranks}, not {plane.scenario.engines} engines")
            if ingress.llm._processor.request_states:
                broken.append(f"{name} keeps requests")
            tokens = sum(len(request.token_ids) for request in ingress.requests)
            if ingress.usage.output_tokens != tokens:
                broken.append(f"{name} counts {ingress.usage.output_tokens} tokens, not {tokens}")
        clients = len(plane.ingresses)
        for engine in plane.living_engines:
            if engine.server is None:
                broken.append(f"{engine.process.name} loads for ever")
                continue
            try:
                engine.server.core.check_idle()
            except AssertionError as leak:
                broken.append(f"{engine.process.name}: {leak}")
            known = len(engine.server._client_tracker._clients)
            if known > clients and plane.kernel.now - self.faults.last_at > 2 * STALL_TIMEOUT_S:
                broken.append(f"{engine.process.name} knows {known} clients, not {clients}")
        if len(plane.living_engines) > plane.scenario.engines:
            names = [engine.process.name for engine in plane.living_engines]
            broken.append(f"engines live that nobody wants: {names}")
        return broken


def judge(scenario: Scenario) -> Verdict:
    return Run(scenario).judge()
