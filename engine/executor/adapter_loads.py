"""Which adapters all workers of an engine have loaded: pure, but for the queue of their answers."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from swell.configs.lora import Adapter
from swell.configs.shown import shown
from swell.worker.wire import AdapterLoaded, LoadAdapter


def late_reason(adapter: Adapter, limit_s: float) -> str:
    """Why the requests of an adapter fail that is not loaded in time."""
    name = shown(adapter.name)
    return f"adapter {name}: it was not loaded within {limit_s:g} s; its folder may hang"


@dataclass(slots=True)
class _Load:
    command: LoadAdapter
    answers: dict[int, AdapterLoaded] = field(default_factory=dict)
    """Rank -> the answer of this worker."""
    is_loaded: bool = False
    """All workers had it."""


class AdapterLoads:
    """The loads that are under way, and those that have ended well."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._loads: dict[int, _Load] = {}
        """By place."""
        self._number = 0

    def begin(self, command: LoadAdapter) -> LoadAdapter:
        """The command as workers get it. What had its place, and a load of the same adapter that
        was given up, count no more."""
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
        """The answer of all, with the first failure; None: some are missing, or none waits."""
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
        """These were lost, and with them the loads that were under way; what the workers in their
        places have to load."""
        self._loads = {place: load for place, load in self._loads.items() if load.is_loaded}
        for load in self._loads.values():
            for rank in ranks:
                load.answers.pop(rank, None)
        return [load.command for load in self._loads.values()]

    def missing(self) -> list[LoadAdapter]:
        """What workers in the places of others have not loaded yet."""
        loaded = [load for load in self._loads.values() if load.is_loaded]
        return [load.command for load in loaded if len(load.answers) < self._workers]

    def give_up(self, limit_s: float) -> list[AdapterLoaded]:
        """What is missing after this time is not waited for; failures of all workers."""
        late = self.missing()
        for command in late:
            del self._loads[command.place]
        return [
            AdapterLoaded(-1, one.adapter.digest, late_reason(one.adapter, limit_s), one.number)
            for one in late
        ]


class QueuedLoads(AdapterLoads):
    """Of workers in this process, which answer from other threads."""

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
