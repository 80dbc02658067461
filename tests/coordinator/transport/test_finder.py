"""When an engine searches for its coordinator; the clock is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.transport.finder import CoordinatorFinder

SILENCE_S = 10.0
ADDRESS = ChannelAddress("machine", "ipc", "tcp://192.0.2.1:1")
CONTACT = CoordinatorContact(ADDRESS, ChannelKeys(b"public", b"secret"), 1)


class ScriptedRuntime:
    """A scripted clock, and event loops that run only on demand."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.loops: list[Coroutine[Any, Any, None]] = []

    def now(self) -> float:
        return self.time_s

    def spawn(self, _name: str, work: Coroutine[Any, Any, None]) -> None:
        self.loops.append(work)

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


class Search:
    """A finder whose loop runs once a second; the coordinator was last heard from at time 0, or
    never."""

    def __init__(self, *answers: CoordinatorContact | Exception | None, heard: bool = True) -> None:
        self.runtime = ScriptedRuntime()
        self.answers = list(answers)
        self.asked_at: list[float] = []
        self.finder = CoordinatorFinder(self.runtime, self._find, SILENCE_S)  # type: ignore[arg-type]
        self.finder.check()
        if heard:
            self.finder.on_message()

    def _find(self) -> CoordinatorContact | None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def turn(self, seconds: int, *, answers: bool = True) -> list[CoordinatorContact]:
        """Returns the contacts that `check` found; with `answers`, each search completes at
        once."""
        found = []
        for _ in range(seconds):
            self.runtime.time_s += 1.0
            before = len(self.runtime.loops)
            contact = self.finder.check()
            if len(self.runtime.loops) > before:
                self.asked_at.append(self.runtime.time_s)
            while answers and self.runtime.loops:
                asyncio.run(self.runtime.loops.pop())
            found += [contact] if contact is not None else []
        return found


def test_no_search_while_the_coordinator_sends() -> None:
    search = Search(CONTACT)
    for _ in range(10):
        assert search.turn(8) == []
        search.finder.on_message()
    assert search.asked_at == []


def test_a_silent_coordinator_is_searched_until_it_sends() -> None:
    search = Search()
    search.turn(35)
    assert search.asked_at == [10.0, 20.0, 30.0]
    search.finder.on_message()
    search.turn(9)
    assert len(search.asked_at) == 3


def test_a_new_process_searches_early() -> None:
    """A finder that has never heard from the coordinator searches before the coordinator, which
    does not hear from it either, gives up on it."""
    search = Search(None, CONTACT, heard=False)
    assert search.turn(int(SILENCE_S) - 1) == [CONTACT]
    search.finder.on_message()
    search.turn(9)
    assert len(search.asked_at) == 3


def test_a_found_address_is_reported_once() -> None:
    search = Search(None, CONTACT)
    assert search.turn(11) == []
    assert search.turn(12) == [CONTACT]
    assert search.turn(9) == []


def test_only_one_search_runs_at_a_time() -> None:
    """Only one search runs at a time: it may block as long as Ray's GCS is unavailable."""
    search = Search(CONTACT)
    search.turn(50, answers=False)
    assert len(search.asked_at) == 1
    assert search.turn(2) == [CONTACT]


def test_a_failed_search_is_retried() -> None:
    search = Search(RuntimeError("the GCS is away"), CONTACT)
    assert search.turn(30) == [CONTACT]


def test_time_without_listening_is_not_silence() -> None:
    search = Search()
    search.turn(2)
    search.runtime.time_s += 100.0
    search.turn(3)
    assert search.asked_at == []


def test_a_search_begins_only_after_some_silence() -> None:
    search = Search()
    search.turn(int(SILENCE_S / 2))
    assert not search.finder.is_silent
    search.turn(1)
    assert search.finder.is_silent and search.asked_at == []
    search.finder.on_message()
    assert not search.finder.is_silent
