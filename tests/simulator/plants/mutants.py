"""Changes one expression or statement of the control plane at a time, and counts how many of these
mutants break a law.

python -m tests.simulator.plants.mutants [PATTERN...] [--sample 100] [--draw 0] [--seeds 200]

A mutant that survives is harmless, or changes something that no run reaches, or that no law sees:
the last column says in how many runs its code was executed, and how many runs it changed.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import importlib
import inspect
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random
from types import FrameType, FunctionType, ModuleType

from tests.simulator.faults import FAULTS
from tests.simulator.laws.laws import Verdict, judge
from tests.simulator.plants.mutations import Code, Site, find_code, instrumented, sites
from tests.simulator.scenario import draw

MODULES = (
    "coordinator.publisher",
    "coordinator.manager_state",
    "coordinator.metrics_aggregator",
    "coordinator.monitors.engine_monitor",
    "coordinator.monitors.forming_monitor",
    "coordinator.monitors.progress_monitor",
    "coordinator.roster",
    "coordinator.service",
    "coordinator.state_machine",
    "coordinator.subscribers",
    "coordinator.transport.finder",
    "coordinator.transport.listening_clock",
    "coordinator.transport.loop_calls",
    "coordinator.wave_protocol.null_waves",
    "coordinator.wave_protocol.wave_interface",
    "coordinator.wave_protocol.waves",
    "cluster.control.elasticity",
    "cluster.control.engines.concurrent_tasks",
    "cluster.control.engines.drain",
    "cluster.control.engines.engine_handle",
    "cluster.control.engines.fleet",
    "cluster.control.engines.orphans",
    "cluster.control.engines.placement",
    "cluster.control.engines.roster_check",
    "cluster.control.manager",
    "cluster.control.plan.autoscaler",
    "cluster.control.plan.backoff",
    "cluster.control.plan.checkpoint",
    "cluster.control.plan.control_state",
    "cluster.control.plan.fleet_view",
    "cluster.control.plan.load_signals",
    "cluster.control.plan.node_drains",
    "cluster.control.plan.upgrade",
    "cluster.control.plan.upgrade_plan",
    "cluster.control.plan.versions",
    "cluster.control.ray.checkpoint_store",
    "cluster.control.ray.checkpoint_writer",
    "cluster.control.ray.coordinator_handle",
    "cluster.control.upgrader",
    "cluster.client.async_llm",
    "cluster.client.engine_connection",
    "cluster.client.engine_core_client",
    "cluster.client.request_placer",
    "cluster.client.requests.answer_version",
    "cluster.client.requests.handover",
    "cluster.client.requests.journey",
    "cluster.client.requests.output_processor",
    "cluster.client.requests.request_state",
    "cluster.client.routing.admission",
    "cluster.client.routing.placement_queue",
    "cluster.client.routing.readiness",
    "cluster.client.routing.routable_engines",
    "cluster.client.routing.routed_engine",
    "cluster.client.routing.router",
    "engine.serving.client_tracker",
    "engine.serving.coordinator_client",
    "engine.serving.engine_report",
    "engine.serving.server",
    "engine.serving.standalone_monitor",
)
"""The modules that decide, without `swell.`"""
_FOR_PEOPLE = {"__repr__", "describe", "error", "error_text", "starting_texts", "not_ready_reason"}
"""Functions whose results only people read."""
_HANG_S = 20
"""CPU seconds after which a run counts as one that never ends; a run takes 0.1 s."""


class Hangs(KeyboardInterrupt):
    """Raised in a run that does not end. Neither asyncio nor `except Exception` catches it."""


@dataclass(frozen=True, eq=False)
class Mutant:
    """One function with one change."""

    function: FunctionType
    site: Site

    def __str__(self) -> str:
        name = f"{self.function.__module__.removeprefix('swell.')}.{self.function.__qualname__}"
        return f"{name}, {self.site.what}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        right = self.function.__code__
        self.function.__code__ = self.site.compile()
        try:
            yield
        finally:
            self.function.__code__ = right


@dataclass(frozen=True, eq=False)
class Result:
    seed: int | None
    """The first seed that breaks a law; None: none does."""
    reached: int
    """The number of seeds that execute the changed code."""
    changed: int
    """The number of runs that differ from those of the correct code, until one breaks a law."""


def all_mutants() -> list[Mutant]:
    found = []
    for name in MODULES:
        module = importlib.import_module(f"swell.{name}")
        found += [
            Mutant(function, site)
            for function in _functions(module)
            if function.__name__ not in _FOR_PEOPLE
            for site in sites(Code.of(module), function)
        ]
    return found


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yields the functions of a module and the methods of its classes."""
    owners = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        if owner is not module and owner.__module__ != module.__name__:
            continue
        for value in vars(owner).values():
            value = getattr(value, "fget", value)
            value = getattr(value, "func", value)
            value = inspect.unwrap(getattr(value, "__func__", value))
            is_own = inspect.isfunction(value) and value.__module__ == module.__name__
            if is_own and value.__code__.co_filename == module.__file__:
                yield value


class Survey:
    """Runs mutants with the same seeds. A seed whose run does not execute the changed code needs no
    run with the mutant."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds
        self._reached: dict[int, frozenset[tuple[str, int]]] = {}
        self._checksums: dict[int, int] = {}
        for seed in seeds:
            with instrumented_modules() as lines:
                self._checksums[seed] = _judge(seed).checksum
            self._reached[seed] = frozenset(lines)

    def run(self, mutant: Mutant) -> Result:
        file = mutant.function.__code__.co_filename
        lines = {(file, line) for line in mutant.site.lines}
        reached = [seed for seed in self.seeds if not lines.isdisjoint(self._reached[seed])]
        changed = 0
        for seed in reached:
            with mutant.planted():
                try:
                    verdict = _judge(seed)
                except (Hangs, Exception):  # a law cannot even read the state of the processes
                    return Result(seed, len(reached), changed)
            if verdict.broken:
                return Result(seed, len(reached), changed)
            changed += verdict.checksum != self._checksums[seed]
        return Result(None, len(reached), changed)


@contextmanager
def instrumented_modules() -> Iterator[set[tuple[str, int]]]:
    """Yields a set that receives the file and line of each statement that is executed."""
    lines: set[tuple[str, int]] = set()
    builtins.__reached__ = lines.add  # type: ignore[attr-defined]
    right = []
    try:
        for name in MODULES:
            module = importlib.import_module(f"swell.{name}")
            for function in _functions(module):
                right.append((function, function.__code__))
                function.__code__ = find_code(instrumented(module), function.__qualname__)
        yield lines
    finally:
        for function, code in right:
            function.__code__ = code


def _judge(seed: int) -> Verdict:
    def hang(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, _HANG_S)
    try:
        return judge(draw(seed, tuple(FAULTS)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="of names; default: all")
    parser.add_argument("--sample", type=int, default=100, help="how many mutants, at most")
    parser.add_argument("--draw", type=int, default=0, help="seed of the sample")
    parser.add_argument("--first", type=int, default=0, help="first seed of the runs")
    parser.add_argument("--seeds", type=int, default=200, help="how many runs of a mutant, at most")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.disable()
    gc.freeze()
    mutants = [
        each
        for each in all_mutants()
        if not args.patterns or any(fnmatchcase(str(each), p) for p in args.patterns)
    ]
    mutants = Random(args.draw).sample(mutants, min(args.sample, len(mutants)))
    survey = Survey(range(args.first, args.first + args.seeds))
    found = 0
    for mutant in mutants:
        result = survey.run(mutant)
        found += result.seed is not None
        end = "survives" if result.seed is None else f"seed {result.seed}"
        print(f"{end}\t{mutant}\t{result.reached} reached, {result.changed} changed", flush=True)
    print(f"{found} of {len(mutants)} mutants break a law")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
