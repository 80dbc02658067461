"""A simulated process: it can be killed, stopped and slowed down, and its clock may be wrong."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from random import Random
from typing import Any, Protocol

from swell.configs.runtime import process as process_setup
from tests.simulator.kernel.kernel import WORLD, Call, Kernel, Owner, ProcessExited

_MAX_OFFSET_S = 1e4
_TIMER_LATE_S = 1e-9
"""Delay of each timer, so that rounding never makes it fire early."""
_MANY_TASKS = 16
"""Number of tasks of a loop above which finished ones are removed from its list."""
_TURNS = 8
"""The maximum number of successive events with which a loop reacts to a timer, each created by the
previous one."""
_MAX_READY = 10_000
"""The maximum number of events of one instant: if there are more, an event never ends."""
_MAX_THREAD_S = 1e-3
"""The maximum delay of a call in another thread."""


class End(Protocol):
    """A channel end of a process."""

    def vanish(self) -> None:
        """Called when the process was killed."""

    def on_process_stopped(self) -> None: ...


class Process(Owner):
    """Has a name, a host, a clock and an event loop. A stopped process queues its events. A killed
    process loses them, and its channel ends vanish. In a slow process each event takes some time,
    and the next one waits."""

    def __init__(self, kernel: Kernel, name: str, host: str = "host0", rate: float = 1.0) -> None:
        """`rate`: seconds of its clock per second of the world."""
        self.kernel, self.name, self.host, self.rate = kernel, name, host, rate
        self.alive, self.stopped, self.slow_s = True, False, 0.0
        """`slow_s`: how long each of its events takes, by the world's clock."""
        self.runs = True
        self.is_behind = False
        """Whether it was resumed and has not handled the events of the stopped time yet."""
        self.stops = 0
        """Number of times that it was stopped."""
        self.ends: list[End] = []
        self.on_exit: list[Callable[[Process], None]] = []
        """Called after it has terminated, outside of any process."""
        self.bits = kernel.random(f"bits:{name}")
        self._offset = kernel.random(f"clock:{name}").random() * _MAX_OFFSET_S
        self._backlog: deque[tuple[Call, tuple[Any, ...]]] = deque()
        self._free_at = 0.0
        self._resuming = False
        self.loop: SimLoop = SimLoop(self)

    @cached_property
    def _resumes(self) -> Random:
        return self.kernel.random(f"resumes:{self.name}")

    @cached_property
    def threads(self) -> Random:
        """The source of delays of calls in other threads."""
        return self.kernel.random(f"threads:{self.name}")

    # ---------------------------------------------------------------- the clock

    def time(self) -> float:
        """Returns seconds by the clock of the process."""
        return self._offset + self.kernel.now * self.rate

    def world_time(self, when: float) -> float:
        """Returns the world's time at which the clock of the process shows `when`."""
        return (when - self._offset) / self.rate + _TIMER_LATE_S

    def set_clock_rate(self, rate: float) -> None:
        """Changes the rate from now on. The clock does not jump."""
        self._offset = self.time() - self.kernel.now * rate
        self.rate = rate

        def retimed(call: Call) -> float | None:
            return self.world_time(call.__self__.when_s) if _is_timer(call) else None  # type: ignore[attr-defined]

        self.kernel.reschedule(self, retimed)

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Sleeps like `asyncio.sleep`, in a task of this process."""
        if seconds <= 0.0:
            return asyncio.sleep(0.0)
        future: asyncio.Future[None] = self.loop.create_future()
        self.loop.call_at(self.time() + seconds, _wake, future)
        return future

    # ---------------------------------------------------------------- lifecycle

    def stop(self) -> None:
        """Stops the process, like SIGSTOP."""
        self.stopped, self.runs = True, False
        self.stops += 1
        for end in list(self.ends):
            end.on_process_stopped()

    def resume(self) -> None:
        """Resumes the process, like SIGCONT. In half of the cases its loops first handle the timers
        that are due, before another thread has received the messages of the stopped time."""
        self.stopped = False
        if self.slow_s or self._resumes.random() < 0.5:
            self._resume_at(self.kernel.now)
            return
        due = [event for event in self._backlog if _is_timer(event[0])]
        self._backlog = deque(event for event in self._backlog if not _is_timer(event[0]))
        self.is_behind = True
        for call, args in due:
            self.turn(call, *args)
        self._take_in(_TURNS)

    def turn(self, call: Call, *args: Any) -> None:
        """Runs a call of a loop while the process has not caught up yet."""
        if self._can_run():
            self.enter(call, *args)
        else:
            self.hold(call, args)

    def _take_in(self, turns: int) -> None:
        """Handles queued events after the loops have handled their timers in `turns` turns."""
        if turns:
            self.kernel.soon(WORLD, self._take_in, turns - 1)
            return
        self.is_behind = False
        if self._can_run():
            self._resume_at(self.kernel.now)

    def slow(self, seconds: float) -> None:
        """Makes each event take this many seconds from now on, by the world's clock; 0 ends
        this."""
        self.slow_s = seconds
        if seconds:
            self.runs = False
        else:
            self._resume_at(self._free_at)

    def charge(self, seconds: float) -> None:
        """Makes the current event take this many seconds: later events wait."""
        self._free_at = max(self._free_at, self.kernel.now) + seconds
        self.runs = False
        self._resume_at(self._free_at)

    def kill(self) -> None:
        """Kills the process, like SIGKILL."""
        if not self.alive:
            return
        self.alive = self.runs = False
        self._backlog.clear()
        self.kernel.trace(b"killed " + self.name.encode())
        for end in list(self.ends):
            end.vanish()
        self.ends.clear()
        for call in self.on_exit:
            self.kernel.soon(WORLD, call, self)

    def fail(self, what: str, error: BaseException) -> None:
        """Terminates the process after an error, which is a failure of the run."""
        if self.alive:
            self.kernel.failures.append(f"{self.name}: {what}: {error!r}")
            self.kill()

    def close(self) -> None:
        """Frees the tasks after the run, without running them."""
        self.alive = self.runs = False
        for task in [task for task in self.loop.tasks if not task.done()]:
            task._log_destroy_pending = False
            try:
                task.get_coro().close()
            except (Exception, ProcessExited):  # the verdict of the run is known already
                pass

    # ---------------------------------------------------------------- queued events

    def hold(self, call: Call, args: tuple[Any, ...]) -> None:
        if self.alive:
            self._backlog.append((call, args))
            if not (self.stopped or self.is_behind):
                self._resume_at(self._free_at)

    def _resume_at(self, when: float) -> None:
        if not self._resuming:
            self._resuming = True
            self.kernel.at(when, WORLD, self._work_off)

    def _work_off(self) -> None:
        """Runs queued events in order until the process is busy again."""
        self._resuming = False
        kernel = self.kernel
        while self._can_run() and self._backlog and self._free_at <= kernel.now:
            call, args = self._backlog.popleft()
            self._free_at = kernel.now + self.slow_s
            self.enter(call, *args)
        if not self._can_run():
            return
        if self._backlog or self._free_at > kernel.now:
            self._resume_at(self._free_at)
        elif not self.slow_s:
            self.runs = True

    def _can_run(self) -> bool:
        return self.alive and not self.stopped

    def enter(self, call: Call, *args: Any) -> None:
        """Runs a call of this process from an event of the world."""
        before = events._get_running_loop()
        events._set_running_loop(self.loop)  # type: ignore[arg-type]
        self.kernel.events += 1
        try:
            call(*args)
        except ProcessExited:
            pass
        except Exception as error:
            self.fail(getattr(call, "__qualname__", "event"), error)
        finally:
            events._set_running_loop(before)


def _is_timer(call: Call) -> bool:
    handle = getattr(call, "__self__", None)
    return isinstance(handle, SimHandle) and handle.when_s is not None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimHandle:
    """Implements `asyncio.Handle` and `asyncio.TimerHandle`."""

    __slots__ = ("_args", "_call", "_cancelled", "_loop", "when_s")

    def __init__(
        self, loop: SimLoop, call: Call, args: tuple[Any, ...], when_s: float | None = None
    ) -> None:
        self._loop, self._call, self._args = loop, call, args
        self._cancelled = False
        self.when_s = when_s
        """The time of a timer, by the clock of its process; None: not a timer."""

    def run(self) -> None:
        if self._cancelled:
            return
        try:
            self._call(*self._args)
        except Exception as error:
            message = f"exception in {getattr(self._call, '__qualname__', 'a callback')}"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        assert self.when_s is not None, "it is no timer"
        return self.when_s


class SimLoop:
    """Implements what asyncio needs of an event loop for one process: tasks, futures, timers and
    threads."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._kernel = process.kernel
        self._ready = process.kernel.ready
        self._handler: Callable[[Any, dict[str, Any]], Any] | None = None
        self.tasks: list[Any] = []
        """All tasks that are not done, and some that are."""
        self._max_tasks = _MANY_TASKS
        self.time = process.time
        loop: Any = self
        self.create_future: Callable[[], asyncio.Future[Any]] = partial(asyncio.Future, loop=loop)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """Schedules a call. Tasks and futures pass a context and never cancel their calls, so they
        get None instead of a handle. No code here uses context variables, so all calls run in the
        same context."""
        if context is None:
            handle = SimHandle(self, callback, args)
            callback, args = handle.run, ()
        else:
            handle = None
        if self.process.is_behind:
            self._ready.append((WORLD, self.process.turn, (callback, *args)))
        else:
            self._ready.append((self.process, callback, args))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = SimHandle(self, callback, args, when)
        process = self.process
        self._kernel.at(process.world_time(when), process, handle.run)
        return handle

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        """Creates a task. Terminates a process whose event creates tasks without end: a loop of it
        never waits."""
        if len(self._ready) > _MAX_READY:
            coro.close()
            self.process.fail("event", RuntimeError("a loop never waits"))
            raise ProcessExited
        name = name or self.process.name
        loop: Any = self
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, name=name, context=context)
        self.tasks.append(task)
        if len(self.tasks) > self._max_tasks:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._max_tasks = 2 * len(self.tasks) + _MANY_TASKS
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Runs a call as if in another thread: without interruption, after a short random delay."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        delay_s = self.process.threads.random() * _MAX_THREAD_S
        self._kernel.at(self._kernel.now + delay_s, self.process, run)
        return future

    get_debug = staticmethod(bool)
    """Returns False: never in debug mode. asyncio calls it for each future and task."""

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.process.alive

    def set_exception_handler(self, handler: Any) -> None:
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Records an error that asyncio reports, such as an exception that nobody has retrieved."""
        if not self.process.alive:
            return
        if self._handler is not None:
            self._handler(self, context)
            return
        error = context.get("exception")
        self._kernel.failures.append(f"{self.process.name}: {context['message']}: {error!r}")


@contextmanager
def simulated_exits() -> Iterator[None]:
    """Makes `exit_process` terminate the simulated process that calls it, which is a failure of the
    run."""
    real = process_setup.exit_process

    def exit_process(loop: str, error: BaseException) -> None:
        running: Any = events._get_running_loop()
        if not isinstance(running, SimLoop):
            return real(loop, error)
        running.process.fail(loop, error)
        raise ProcessExited

    process_setup.exit_process = exit_process
    try:
        yield
    finally:
        process_setup.exit_process = real
