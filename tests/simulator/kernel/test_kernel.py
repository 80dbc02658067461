"""The virtual clock: events run by time, then in the order in which they were created."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.kernel import WORLD, Kernel


def test_events_run_by_time_and_then_by_order_of_creation() -> None:
    kernel = Kernel(0)
    seen: list[tuple[float, str]] = []

    def note(what: str) -> None:
        seen.append((kernel.now, what))

    def first() -> None:
        note("first")
        kernel.soon(WORLD, note, "soon")
        kernel.at(0.0, WORLD, note, "past")
        kernel.at(1.0, WORLD, note, "now")

    kernel.at(2.0, WORLD, note, "last")
    kernel.at(1.0, WORLD, first)
    kernel.at(1.0, WORLD, note, "second")
    assert not kernel.run(10.0)
    assert [what for _, what in seen] == ["first", "second", "soon", "past", "now", "last"]
    assert [when for when, _ in seen] == [1.0] * 5 + [2.0]
    assert kernel.now == 10.0


def test_a_run_stops_at_its_end_time_or_on_halt() -> None:
    kernel = Kernel(0)
    kernel.at(1.0, WORLD, kernel.halt)
    kernel.at(2.0, WORLD, kernel.halt)
    assert kernel.run(1.5) and kernel.now == 1.0
    assert not kernel.run(1.5) and kernel.now == 1.5
    assert kernel.run(3.0) and kernel.now == 2.0


def test_an_endless_run_is_an_error() -> None:
    kernel = Kernel(0)

    def again() -> None:
        kernel.soon(WORLD, again)

    again()
    with pytest.raises(RuntimeError, match="100 events until 0"):
        kernel.run(1.0, max_events=100)


def test_random_sources_are_independent() -> None:
    def numbers(seed: int, drawn_before: int) -> list[float]:
        kernel = Kernel(seed)
        other, mine = kernel.random("other"), kernel.random("mine")
        for _ in range(drawn_before):
            other.random()
        return [mine.random() for _ in range(3)]

    assert numbers(1, 0) == numbers(1, 7)
    assert numbers(1, 0) != numbers(2, 0)
    assert Kernel(1).random("a").random() != Kernel(1).random("b").random()


def test_different_runs_have_different_checksums() -> None:
    def checksum(when: float, label: bytes, frame: bytes) -> int:
        kernel = Kernel(0)
        kernel.at(when, WORLD, kernel.trace, label, frame)
        kernel.run(10.0)
        return kernel.checksum

    runs = [(1.0, b"a", b"x"), (1.1, b"a", b"x"), (1.0, b"b", b"x"), (1.0, b"a", b"y")]
    assert len({checksum(*run) for run in runs}) == len(runs)
    assert checksum(*runs[0]) == checksum(*runs[0])
