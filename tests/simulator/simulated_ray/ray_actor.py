"""An actor of the simulated Ray: its successive processes, and its calls in progress.

Invariant: a call is in progress from when it is sent until its answer. When the process dies, Ray
notices it a while later. If the actor is restarted, it runs all calls again from their beginning,
except those whose callers are dead, because the callers send them again. Otherwise the calls fail
with `ActorDied`.

A single call may also fail with `ActorUnavailable`, because the connection of its caller broke for
a moment. The actor may have executed it before, may execute it later, or never does.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from swell.cluster.control.ray.actor_errors import ActorDied, ActorRaised, ActorUnavailable
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import Process

if TYPE_CHECKING:
    from tests.simulator.simulated_ray.ray import SimPlacementGroup, SimRayCluster

_CUT_RETRY_S = 0.1


class Failure(enum.Enum):
    """Ways in which a call fails with `ActorUnavailable`."""

    LOST = "lost"
    """The call fails at once. If it does not run yet, it never runs."""
    RUNS = "runs"
    """The call fails at once, and runs to its end."""
    ANSWER_LOST = "answer lost"
    """The call runs, and its answer is lost."""


Make = Callable[[Process, bool], Any]
"""Creates the object in its process. The flag is True if the actor was restarted."""

_DEFAULT = ""
"""The concurrency group of the other methods."""


@dataclass(frozen=True)
class Concurrency:
    """How many calls an actor executes at the same time: the options of Ray's actors."""

    max_concurrency: int
    """The limit of all methods without a concurrency group together."""
    limits: Mapping[str, int]
    """The limit of each concurrency group."""
    groups: Mapping[str, str]
    """The concurrency group of a method, by its name."""

    def group_of(self, method: str) -> str:
        return self.groups.get(method, _DEFAULT)

    def limit_of(self, group: str) -> int:
        return self.limits.get(group, self.max_concurrency)


@dataclass(eq=False)
class Call:
    method: str
    args: tuple[Any, ...]
    caller: Process
    future: asyncio.Future[Any]
    life: int = 0
    """The number of the actor's process that runs it; 0: none."""
    is_settled: bool = False
    """Whether its caller has its result."""
    loses_answer: bool = False


class SimActor:
    """An actor. `group`: the placement group; None: on `host`."""

    def __init__(
        self,
        cluster: SimRayCluster,
        name: str,
        namespace: str,
        make: Make,
        *,
        host: str,
        concurrency: Concurrency,
        group: SimPlacementGroup | None = None,
        restarts: bool = False,
    ) -> None:
        self.name, self.namespace, self.group = name, namespace, group
        self.process: Process | None = None
        self.dead = False
        self._cluster, self._make, self._host = cluster, make, host
        self._concurrency, self._restarts = concurrency, restarts
        self._impl: Any = None
        self._life = 0
        self._calls: dict[Call, None] = {}
        self._running: Counter[str] = Counter()
        """The number of calls that run, by concurrency group."""
        self._waiting: defaultdict[str, deque[Call]] = defaultdict(deque)
        self._arrives_at: dict[Process, float] = {}
        """When the latest delayed call of each caller arrives."""
        if group is not None:
            group.actors.append(self)

    # ---------------------------------------------------------------- its processes

    def start(self) -> None:
        """Starts a process as soon as the placement group has its resources."""
        if self.dead:
            return
        if self.group is not None and self.group.removed:
            return  # it waits forever, and keeps its name
        if self.group is not None and not self.group.hosts:
            self.group.when_reserved.append(self.start)
            return
        options, kernel = self._cluster.options, self._cluster.kernel
        host = self.group.hosts[0] if self.group is not None else self._host
        self._host = host = self._cluster.living_host(host)
        self._life += 1
        start_s = options.start_s * (0.5 + self._cluster.chance.random())
        kernel.at(kernel.now + start_s, WORLD, self._begin, host)

    def _begin(self, host: str) -> None:
        if self.dead or host in self._cluster.lost_hosts:
            return
        self.process = process = self._cluster.new_process(self.name, host)
        process.on_exit.append(partial(self._on_exit, self._life))
        process.kernel.soon(process, self._create)

    def _create(self) -> None:
        assert self.process is not None
        again = self._life > 1
        self._impl = self._make(self.process, again)
        self._running.clear()
        self._waiting.clear()
        self._calls = dict.fromkeys(self.calls)
        for call in self._calls:
            self._execute(call, self._life)

    def _on_exit(self, life: int, process: Process) -> None:
        """Lets Ray notice the termination a while later, unless the whole host is lost."""
        if life != self._life:
            return
        self._impl = None
        cluster = self._cluster
        if process.host not in cluster.lost_hosts:
            at = cluster.kernel.now + cluster.options.death_s
            noticed = partial(self._noticed, life)
            cluster.kernel.at(at, WORLD, cluster.when_there, noticed, process.host)

    def lose_host(self, host: str) -> None:
        """Handles that Ray has given up a host. The process may still be alive, and is not told."""
        if host == self._host and self._life:
            self._impl = None
            self._noticed(self._life)

    def _noticed(self, life: int) -> None:
        if self.dead or life != self._life:
            return
        self._cluster.kernel.trace(b"ray: died " + self.name.encode())
        if self._restarts:
            self.start()
        else:
            self.forget()

    # ---------------------------------------------------------------- termination

    def forget(self) -> None:
        """Makes the actor dead for Ray: its name becomes free, and its calls fail."""
        if self.dead:
            return
        self.dead = True
        self._cluster.release_name(self)
        for call in list(self._calls):
            self._settle(call, None, ActorDied(f"the actor {self.name} has died"))

    def kill(self, restart: bool) -> None:
        """Kills the process, which is first asked to exit: a stopped one cannot, so it survives for
        `kill_s`."""
        if self.dead:
            return
        if not (restart and self._restarts):
            self.forget()
        process, options = self.process, self._cluster.options
        if process is not None:
            wait_s = options.kill_s if process.stopped else options.call_s
            self._cluster.kernel.at(self._cluster.kernel.now + wait_s, WORLD, process.kill)

    # ---------------------------------------------------------------- calls

    @property
    def calls(self) -> list[Call]:
        """The calls of living callers that wait for their answers."""
        return [each for each in self._calls if each.caller.alive and not each.is_settled]

    def fail(self, call: Call, failure: Failure) -> None:
        """Makes a call fail with `ActorUnavailable`."""
        if failure is Failure.ANSWER_LOST:
            call.loses_answer = True
            return
        error = ActorUnavailable(f"the connection to {self.name} broke")
        if failure is Failure.LOST:
            self._settle(call, None, error)
        else:
            self._report(call, None, error)

    def call(self, caller: Process, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = caller.loop.create_future()
        call = Call(method, args, caller, future)
        self._calls[call] = None
        now, way_s = self._cluster.kernel.now, self._cluster.way_s()
        if now < self._cluster.slow_until:  # a caller's calls do not overtake each other
            way_s = max(way_s, self._arrives_at.get(caller, now) - now)
            self._arrives_at[caller] = now + way_s
        self._after_way(call, way_s, self._deliver)
        self._cluster.net.on_sent(method, None, now + way_s)
        return future

    def _after_way(self, call: Call, way_s: float, arrive: Callable[[Call], None]) -> None:
        """Calls `arrive` after the delay between the hosts of the caller and the actor. Nothing
        arrives during a cut."""
        cluster = self._cluster

        def look() -> None:
            if self.dead or not cluster.net.is_blocked(call.caller.host, self._host):
                arrive(call)
            else:
                cluster.kernel.at(cluster.kernel.now + _CUT_RETRY_S, WORLD, look)

        cluster.kernel.at(cluster.kernel.now + way_s, WORLD, look)

    def _deliver(self, call: Call) -> None:
        if self.dead:
            self._settle(call, None, ActorDied(f"the actor {self.name} has died"))
        elif self._impl is not None and self.process is not None:
            self.process.kernel.soon(self.process, self._execute, call, self._life)

    def _execute(self, call: Call, life: int) -> None:
        """Runs a call. Runs in the actor's process."""
        if life != self._life or call.life == life or call not in self._calls:
            return
        group = self._concurrency.group_of(call.method)
        if self._running[group] >= self._concurrency.limit_of(group):
            self._waiting[group].append(call)
            return
        assert self.process is not None
        self._running[group] += 1
        call.life = life
        self.process.loop.create_task(self._run(call, life), name=call.method)

    async def _run(self, call: Call, life: int) -> None:
        result: Any = None
        failed: Exception | None = None
        try:
            result = getattr(self._impl, call.method)(*call.args)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            failed = ActorRaised(error)
        if life != self._life:
            return
        group = self._concurrency.group_of(call.method)
        self._running[group] -= 1
        way_s = self._cluster.way_s()
        self._after_way(call, way_s, lambda call: self._settle(call, result, failed))
        limit = self._concurrency.limit_of(group)
        while (waiting := self._waiting[group]) and self._running[group] < limit:
            self._execute(waiting.popleft(), life)  # perhaps it has run already

    def _settle(self, call: Call, result: Any, error: Exception | None) -> None:
        if call not in self._calls:
            return
        del self._calls[call]
        if not call.is_settled:
            self._report(call, result, error)

    def _report(self, call: Call, result: Any, error: Exception | None) -> None:
        if call.loses_answer:
            result, error = None, ActorUnavailable(f"the connection to {self.name} broke")
        call.is_settled = True
        self._cluster.kernel.trace(f"ray: {self.name}.{call.method} {error!r}".encode())
        self._cluster.kernel.soon(call.caller, _answer, call.future, result, error)


def _answer(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Sets the result or the exception, unless the caller no longer waits."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    future.set_exception(error)
    future._log_traceback = False  # type: ignore[attr-defined]
