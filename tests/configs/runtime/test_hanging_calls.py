"""Calls that may never return: their number is limited, and their resources are released."""

from __future__ import annotations

import threading

import pytest

from swell.configs.runtime.hanging_calls import HangingCalls, TooManyCalls, within
from tests.support.deadlines import HANG_S

LIMIT = 2


def test_a_call_without_a_thread_does_not_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = HangingCalls("test", LIMIT)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(LIMIT + 1):
            with pytest.raises(TooManyCalls, match="can't start new thread"):
                calls.submit(lambda: 1)
    assert calls.submit(lambda: 1).result(HANG_S) == 1


def test_a_hanging_call_counts_until_it_returns() -> None:
    calls, ends = HangingCalls("test", LIMIT), threading.Event()
    hanging = [calls.submit(lambda: ends.wait(HANG_S)) for _ in range(LIMIT)]
    with pytest.raises(TooManyCalls, match="2 reads"):
        calls.submit(lambda: True)
    ends.set()
    assert all(call.result(HANG_S) for call in hanging)
    assert calls.submit(lambda: True).result(HANG_S)


def test_a_failed_call_frees_its_place() -> None:
    calls = HangingCalls("test", 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            calls.submit(lambda: 1 / 0).result(HANG_S)


def test_a_result_or_an_error_is_returned() -> None:
    assert within(10.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 / 0)


def test_a_blocking_call_does_not_block_the_caller() -> None:
    forever = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, forever.wait)
    forever.set()
