"""The clients that still wait for outputs; the clock is scripted."""

from __future__ import annotations

import pytest

from swell.engine.serving.client_tracker import ClientTracker

pytestmark = pytest.mark.slow

SILENCE_S = 8.0


def test_a_silent_client_is_dropped_once() -> None:
    clients = ClientTracker(SILENCE_S)
    for second in range(30):
        clients.advance(float(second))
        if second == 0:
            clients.on_message(b"dead", 0.0)
        clients.on_message(b"alive", float(second))
        assert clients.drop_silent() == ([b"dead"] if second == SILENCE_S + 1 else [])


def test_time_while_the_loop_could_not_listen_is_not_silence() -> None:
    """Time in which the loop could not receive does not count as silence, as in two repairs of a
    minute each."""
    clients = ClientTracker(SILENCE_S)
    clients.advance(0.0)
    clients.on_message(b"a", 0.0)
    clients.advance(60.0)
    assert clients.drop_silent() == []
    clients.advance(120.0)
    assert clients.drop_silent() == []
    clients.on_message(b"a", 120.0)
    clients.advance(120.0 + SILENCE_S / 4)
    assert clients.drop_silent() == []


def test_a_client_that_sends_right_after_a_late_turn_is_kept() -> None:
    clients = ClientTracker(SILENCE_S)
    clients.advance(0.0)
    clients.on_message(b"a", 0.0)
    for turn in range(1, 20):
        clients.advance(turn * 100.0)
        clients.on_message(b"a", turn * 100.0)
        assert clients.drop_silent() == []


def test_the_dead_are_dropped_even_if_every_step_is_longer_than_the_limit() -> None:
    clients = ClientTracker(SILENCE_S)
    clients.advance(0.0)
    clients.on_message(b"a", 0.0)
    dropped = []
    for turn in range(1, 7):
        clients.advance(turn * 100.0)
        dropped += clients.drop_silent()
    assert dropped == [b"a"]
