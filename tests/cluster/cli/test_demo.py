"""The demo command against a scripted server."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.cli import demo
from tests.cluster.fake_server import running

pytestmark = pytest.mark.slow


def test_the_demo_continues_until_the_new_engine_has_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running() as fake:
        fake.phases = ["prepare", "idle"]
        record = asyncio.run(demo.run_demo(fake.url))
    assert {answer.engines for answer in record.answers} == {"0", "1"}
    assert record.answered_by_new_engines() >= 4
    assert record.epochs == (3, 3) and record.grown_s > record.requested_s > 0
    demo.print_summary(record)
    out = capsys.readouterr().out
    assert "change of engines: idle; epoch 3, 2 of 2 engines active" in out
    assert "engine 0: reverse: kitten -> ab ab" in out and "grew to 2 engines" in out


def test_a_failed_answer_ends_the_demo() -> None:
    with running() as fake:
        fake.fail_every = 9
        with pytest.raises(demo.DemoFailed, match="no engine is ready yet"):
            asyncio.run(demo.run_demo(fake.url))


def test_a_failed_change_ends_the_demo() -> None:
    with running() as fake:
        fake.phases, fake.error = ["failed"], "no more memory"
        with pytest.raises(RuntimeError, match="no more memory"):
            asyncio.run(demo.run_demo(fake.url))
