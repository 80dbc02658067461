"""Tracks which adapters all workers of an engine have loaded. Pure, except for the queue of
results."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from swell.configs.error_text import shown
from swell.configs.lora import Adapter
from swell.worker.wire import AdapterLoaded, LoadAdapter


def late_reason(adapter: Adapter, limit_s: float) -> str:
    """Returns why requests fail if their adapter is not loaded in time."""
    name = shown(adapter.name)
    return (
        f"adapter {name}: the adapter was not loaded within {limit_s:g} s; reading "
        "its folder may hang"
    )


@dataclass(slots=True)
class _Load:
    command: LoadAdapter
    answers: dict[int, AdapterLoaded] = field(default_factory=dict)
    """Rank -> the worker's result."""
    is_loaded: bool = False
    """Whether all workers have had the adapter."""


class AdapterLoads:
    """The loads in progress, and those that have succeeded."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._loads: dict[int, _Load] = {}
        """Place -> load."""
        self._number = 0

    def begin(self, command: LoadAdapter) -> LoadAdapter:
        """Starts a load and returns the command for the workers. Drops the load that had this
        place, and a load of the same adapter that was given up."""
        self._number += 1
        numbered = msgspec.structs.replace(command, number=self._number)
        digest = command.adapter.digest
        self._loads = {
            place: load
            for place, load in self._loads.items()
            if load.command.adapter.digest != digest
        }
        self._loads[command.place] = _Load(numbered)
        return numbered

    def answer(self, loaded: AdapterLoaded) -> AdapterLoaded | None:
        """Records a worker's result. Returns the first failure, or success once all workers have
        loaded the adapter; None while results are missing, or if nothing waits for them."""
        loads = (load for load in self._loads.values() if load.command.number == loaded.number)
        load = next(loads, None)
        if load is None:
            return None
        load.answers[loaded.rank] = loaded
        if len(load.answers) < self._workers and not (load.is_loaded and loaded.failure):
            return None
        failed = [one for _, one in sorted(load.answers.items()) if one.failure]
        if failed:
            del self._loads[load.command.place]
            return failed[0]
        was_loaded, load.is_loaded = load.is_loaded, True
        return None if was_loaded else loaded

    def replace_workers(self, ranks: list[int]) -> list[LoadAdapter]:
        """Drops the results of lost workers, and the loads in progress. Returns the loads that
        their replacements must execute."""
        self._loads = {place: load for place, load in self._loads.items() if load.is_loaded}
        for load in self._loads.values():
            for rank in ranks:
                load.answers.pop(rank, None)
        return [load.command for load in self._loads.values()]

    def missing(self) -> list[LoadAdapter]:
        """Returns the loads that replacement workers have not finished yet."""
        loaded = [load for load in self._loads.values() if load.is_loaded]
        return [load.command for load in loaded if len(load.answers) < self._workers]

    def give_up(self, limit_s: float) -> list[AdapterLoaded]:
        """Gives up the missing loads after this time; returns them as failures of all workers."""
        late = self.missing()
        for command in late:
            del self._loads[command.place]
        return [
            AdapterLoaded(-1, one.adapter.digest, late_reason(one.adapter, limit_s), one.number)
            for one in late
        ]


class QueuedLoads(AdapterLoads):
    """The loads of workers in this process, which report results from other threads."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.queue: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()

    def take(self, wait_s: float) -> list[AdapterLoaded]:
        """See `Executor.loaded_adapters`."""
        answers: list[AdapterLoaded] = []
        with suppress(queue.Empty):
            while True:
                answers.append(self.queue.get(timeout=0.0 if answers else wait_s))
        return [whole for one in answers if (whole := self.answer(one)) is not None]
