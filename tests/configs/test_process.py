"""A process whose loop has ended ends, and says why."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from swell.configs.process import LOOP_ENDED, vital, vital_task
from tests.conftest import Deaths

PROGRAM = """
import threading, time
from swell.configs.log import configure_logging
from swell.configs.process import vital
configure_logging()
def work():
    raise ZeroDivisionError("planted")
threading.Thread(target=vital(work, "the loop of this test"), daemon=True).start()
time.sleep(600)
"""


def fail() -> None:
    raise ZeroDivisionError("planted")


def test_the_process_ends_loudly_while_its_main_thread_sleeps() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == LOOP_ENDED != 0
    first, *traceback = done.stderr.splitlines()
    assert "ERROR swell.process" in first and "'the loop of this test'" in first
    assert "pid=" in first, "facts stand in the line, not behind the traceback"
    assert traceback[-1] == "ZeroDivisionError: planted"
    assert any("in work" in line for line in traceback)


def test_the_process_ends_where_nothing_can_be_written() -> None:
    program = PROGRAM.replace(
        "configure_logging()\n", "configure_logging(); sys.stdout.close()\n", 1
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{program}".replace("sleep(600)", "sleep(5)")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == LOOP_ENDED


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(0), KeyboardInterrupt()])
def test_whatever_ends_a_thread_ends_the_process(deaths: Deaths, error: BaseException) -> None:
    def raise_it() -> None:
        raise error

    thread = threading.Thread(target=vital(raise_it, "loop"))
    thread.start()
    thread.join()
    assert deaths == [("loop", error)]
    deaths.clear()


def test_a_loop_that_returns_or_is_cancelled_ends_nothing() -> None:
    vital(lambda: None, "loop")()

    async def story() -> None:
        task = asyncio.create_task(vital_task(lambda: asyncio.sleep(600), "loop"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await vital_task(lambda: asyncio.sleep(0), "loop")

    asyncio.run(story())


def test_a_task_that_fails_ends_the_process(deaths: Deaths) -> None:
    async def work() -> None:
        fail()

    asyncio.run(vital_task(work, "task"))
    [(loop, error)] = deaths
    assert loop == "task" and isinstance(error, ZeroDivisionError)
    deaths.clear()
