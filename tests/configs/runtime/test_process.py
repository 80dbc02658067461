"""A process whose loop has terminated exits and logs the reason."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from swell.configs.runtime.process import LOOP_FAILED_EXIT_CODE, exit_on_error, exit_on_error_async
from tests.conftest import Deaths
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

PROGRAM = """
import threading, time
from swell.configs.runtime.log import configure_logging
from swell.configs.runtime.process import exit_on_error
configure_logging()
def work():
    raise ZeroDivisionError("planted")
threading.Thread(target=exit_on_error(work, "the loop of this test"), daemon=True).start()
time.sleep(600)
"""


def fail() -> None:
    raise ZeroDivisionError("planted")


def test_the_process_exits_with_a_log_line_while_its_main_thread_sleeps() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == LOOP_FAILED_EXIT_CODE != 0
    first, *traceback = done.stderr.splitlines()
    assert "ERROR swell.process" in first and "'the loop of this test'" in first
    assert "pid=" in first, "facts are in the line, not after the traceback"
    assert traceback[-1] == "ZeroDivisionError: planted"
    assert any("in work" in line for line in traceback)


def test_the_process_exits_although_its_log_is_not_writable() -> None:
    program = PROGRAM.replace(
        "configure_logging()\n", "configure_logging(); sys.stdout.close()\n", 1
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{program}"],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == LOOP_FAILED_EXIT_CODE


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(0), KeyboardInterrupt()])
def test_any_exception_of_a_thread_stops_the_process(deaths: Deaths, error: BaseException) -> None:
    def raise_it() -> None:
        raise error

    thread = threading.Thread(target=exit_on_error(raise_it, "loop"))
    thread.start()
    thread.join()
    assert deaths == [("loop", error)]
    deaths.clear()


def test_a_loop_that_returns_or_is_cancelled_does_not_stop_the_process() -> None:
    exit_on_error(lambda: None, "loop")()

    async def scenario() -> None:
        task = asyncio.create_task(exit_on_error_async(lambda: asyncio.sleep(600), "loop"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await exit_on_error_async(lambda: asyncio.sleep(0), "loop")

    asyncio.run(scenario())


def test_a_failed_task_stops_the_process(deaths: Deaths) -> None:
    async def work() -> None:
        fail()

    asyncio.run(exit_on_error_async(work, "task"))
    [(loop, error)] = deaths
    assert loop == "task" and isinstance(error, ZeroDivisionError)
    deaths.clear()
