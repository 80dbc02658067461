"""A blocking call is abandoned after its deadline."""

from __future__ import annotations

import threading

import pytest

from swell.cluster.cli.deadline_call import within


def test_a_result_or_an_error_is_returned() -> None:
    assert within(10.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 / 0)


def test_a_blocking_call_does_not_block_the_caller() -> None:
    forever = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, forever.wait)
    forever.set()
