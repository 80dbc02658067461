"""A model of the wave protocol: engines, a coordinator, FIFO channels and failures.

A state is a tuple; `moves` in `model_transitions.py` yields every successor. Each engine runs the
loop of a server: it takes messages, submits steps up to the limit in flight, waits for the oldest
step, takes messages and reads the step's sums. While it waits it takes no messages, unless it must
leave its group. The sums of a step are available when all engines of its epoch have submitted it.

A move is *owed* if it must happen eventually (a message arrives, a step completes, a death is
noticed). Other moves are optional (a request, a death, a peer's error), and no property may rely on
them.
"""

from __future__ import annotations

import enum
from dataclasses import astuple
from typing import Any

from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator, WaveMember
from swell.coordinator.wire import Pause, ReconfigureDistributedRequest, Resume, StartDPWave
from swell.kernels.inputs import Bucket
from swell.worker.step.buckets import Buckets, EngineStep
from tests.coordinator.wave_protocol.model_state import (
    Bounds,
    Budget,
    Engine,
    EngineState,
    Fields,
    Group,
    Packed,
    State,
    Step,
    Violation,
    pack,
    put,
    unpack,
)


class Model:
    """All moves that are possible within the bounds, for one member class and one coordinator
    class."""

    def __init__(
        self,
        bounds: Bounds,
        member: type[WaveMember] = WaveMember,
        coordinator: type[WaveCoordinator] = WaveCoordinator,
    ) -> None:
        self.bounds = bounds
        self._member, self._coordinator = member, coordinator
        self._known: dict[Any, Any] = {}
        """A cache of call results; both halves of the protocol are pure functions of their
        fields."""
        self.most_quiet = 0
        """The largest number of steps without rows or votes at the end of a wave so far."""

    def first(self) -> State:
        """Returns the initial state: a group that has formed and serves, and newcomers outside
        it."""
        b = self.bounds
        ranks = tuple(range(b.engines))
        fields = Fields(epoch=1, phase=Phase.STOPPED, ranks=ranks)
        inside = [Engine(EngineState.INSIDE, fields) for _ in ranks]
        outside = [Engine(EngineState.OUTSIDE, Fields()) for _ in range(b.newcomers)]
        groups = (Group(1, ranks, ((),) * b.engines, (0,) * b.engines),) if ranks else ()
        budget = Budget(
            len(b.jobs), b.pauses, b.newcomers, b.detaches, b.deaths, b.losses, b.restarts,
            b.late_reports, b.errors, b.drops, b.alones,
        )  # fmt: skip
        return State(
            (*inside, *outside), groups, self.fresh(epoch=1, ranks=ranks, target_ranks=ranks), (),
            frozenset(ranks), frozenset(), budget,
        )  # fmt: skip

    def fresh(self, **fields: Any) -> tuple[Any, ...]:
        """Returns the packed state of a new coordinator."""
        return tuple(vars(self._coordinator(**fields)).values())

    # ---------------------------------------------------------------- calls of the two halves

    def _call_member(self, rank: int, fields: Fields, call: str, *args: Any) -> tuple[Fields, Any]:
        key = (rank, fields, call, args)
        found = self._known.get(key)
        if found is None:
            member = self._member(rank, 0, self.bounds.depth, *fields)
            result = getattr(member, call)(*map(unpack, args))
            after = Fields(*astuple(member)[3:])
            if after.epoch < fields.epoch:
                raise Violation(f"the epoch of engine {rank} falls")
            if after.epoch == fields.epoch and after.wave < fields.wave:
                raise Violation(f"the wave of engine {rank} falls")
            if isinstance(result, list):
                result = tuple(pack(m) for m in result)
            found = self._known[key] = (after, result)
        return found

    def _call_coordinator(self, fields: tuple[Any, ...], call: str, *args: Any) -> Any:
        key = (fields, call, args)
        found = self._known.get(key)
        if found is None:
            coordinator = self._coordinator(*fields)
            sends = getattr(coordinator, call)(*map(unpack, args)) or []
            after = tuple(vars(coordinator).values())
            if after[:2] < fields[:2] or after[1] < fields[1]:
                raise Violation("the epoch or wave of the coordinator falls")
            found = self._known[key] = (after, tuple((r, pack(m)) for r, m in sends))
        return found

    def command(self, state: State, call: str, *args: Any) -> State:
        """Calls a method of the coordinator and puts the messages that it sends into the
        inboxes."""
        assert state.coordinator is not None
        after, sends = self._call_coordinator(state.coordinator, call, *args)
        engines = list(state.engines)
        for rank, message in sends:
            engine = engines[rank]
            if engine.place is not EngineState.DEAD and engine.inbox[-1:] != (message,):
                engines[rank] = engine._replace(inbox=(*engine.inbox, message))
        return state._replace(engines=tuple(engines), coordinator=after)

    # ---------------------------------------------------------------- groups

    def _group(self, state: State, rank: int) -> tuple[int, Group]:
        epoch = state.engines[rank].fields.epoch
        for at, group in enumerate(state.groups):
            if group.epoch == epoch:
                return at, group
        raise Violation(f"engine {rank} steps without a group")

    def oldest(self, state: State, rank: int) -> list[Step] | None:
        """Returns what all engines submitted for this engine's oldest step in flight, or None if
        one has not submitted it yet."""
        _, group = self._group(state, rank)
        read = group.reads[group.ranks.index(rank)]
        if min(map(len, group.logs)) <= read:
            return None
        return [log[read] for log in group.logs]

    @staticmethod
    def _with_group(state: State, at: int, group: Group) -> State:
        """Stores the group without the steps that all have read; drops it if all engines have
        left."""
        here = [read for read in group.reads if read >= 0]
        if not here:
            return state._replace(groups=state.groups[:at] + state.groups[at + 1 :])
        done = min(here)
        if done:
            logs = tuple(log[done:] for log in group.logs)
            reads = tuple(max(read - done, -1) for read in group.reads)
            group = group._replace(logs=logs, reads=reads)
        return state._replace(groups=put(state.groups, at, group))

    def leave(self, state: State, rank: int) -> State:
        """Removes the engine from its group: its steps in flight are lost, and its jobs continue
        from the last step that it read."""
        engine = state.engines[rank]
        for at, group in enumerate(state.groups):
            if group.epoch == engine.fields.epoch and rank in group.ranks:
                group = group._replace(reads=put(group.reads, group.ranks.index(rank), -1))
                state = self._with_group(state, at, group)
                break
        jobs = tuple(job._replace(unscheduled=job.unread) for job in engine.jobs)
        engine = state.engines[rank]._replace(jobs=jobs, quiet=0)
        return state.with_engines(put(state.engines, rank, engine))

    def with_engine(
        self, state: State, rank: int, engine: Engine, said: tuple[Packed, ...] = ()
    ) -> State:
        if said:
            engine = engine._replace(outbox=(*engine.outbox, *said))
        return state.with_engines(put(state.engines, rank, engine))

    def call_engine(self, state: State, rank: int, call: str, *args: Any) -> tuple[State, Any]:
        """Calls a method of an engine's half and puts the messages that it returns into the
        outbox."""
        engine = state.engines[rank]
        fields, result = self._call_member(rank, engine.fields, call, *args)
        said = result if isinstance(result, tuple) else ()
        return self.with_engine(state, rank, engine._replace(fields=fields), said), result

    def fall_out(self, state: State, rank: int, place: EngineState) -> State:
        state, _ = self.call_engine(
            self.leave(state, rank), rank, "broken", "", place is EngineState.REPAIRING
        )
        return self.with_engine(state, rank, state.engines[rank]._replace(place=place))

    # ---------------------------------------------------------------- what an engine can do

    def may_submit(self, rank: int, fields: Fields) -> bool:
        return bool(self._call_member(rank, fields, "may_submit")[1])

    def listens(self, state: State, rank: int) -> bool:
        """Whether the engine's loop is at a point where it takes messages."""
        engine = state.engines[rank]
        if engine.place in (EngineState.DEAD, EngineState.FORMING, EngineState.REPAIRING):
            return False
        return (
            engine.fields.phase is not Phase.RUNNING
            or self.may_submit(rank, engine.fields)
            or self.oldest(state, rank) is not None
        )

    def is_aborted(self, engine: Engine) -> bool:
        """Whether a newer group is announced, which aborts any operation that the engine waits
        for."""
        return engine.place not in (EngineState.DEAD, EngineState.REPAIRING) and any(
            m[0] is ReconfigureDistributedRequest and m[1] > engine.fields.epoch
            for m in engine.inbox
        )

    def take(self, state: State, rank: int) -> State:
        """The engine takes the oldest message of its inbox."""
        engine = state.engines[rank]
        message, inbox = engine.inbox[0], engine.inbox[1:]
        state = self.with_engine(state, rank, engine._replace(inbox=inbox))
        if message[0] is not ReconfigureDistributedRequest:
            return self.call_engine(state, rank, _HANDLERS[message[0]], message)[0]
        after, newer = self.call_engine(state, rank, "reconfigure", message)
        if not newer:
            return after
        if engine.fields.in_flight and self._unharmed(state.left):
            raise Violation(f"engine {rank} loses a step although nobody was lost")
        state, _ = self.call_engine(self.leave(state, rank), rank, "reconfigure", message)
        engine = state.engines[rank]
        place = EngineState.FORMING if rank in message[2] else EngineState.OUTSIDE
        return self.with_engine(state, rank, engine._replace(place=place))

    def _unharmed(self, left: Budget) -> bool:
        b = self.bounds
        spent = (left.deaths, left.losses, left.restarts, left.alones)
        return spent == (b.deaths, b.losses, b.restarts, b.alones)

    def submit(self, state: State, rank: int) -> State:
        engine = state.engines[rank]
        planned = [(job, job.schedule()) for job in engine.jobs]
        rows = tuple(job.name for job, after in planned if after is not None)
        jobs = tuple(after or job for job, after in planned)
        works = any(job.works for job in jobs)
        step = Step(engine.fields.wave, works, engine.fields.voting, rows)
        at, group = self._group(state, rank)
        position = group.ranks.index(rank)
        group = group._replace(logs=put(group.logs, position, (*group.logs[position], step)))
        fields, _ = self._call_member(rank, engine.fields, "submitted")
        state = self.with_engine(state, rank, engine._replace(fields=fields, jobs=jobs))
        return state._replace(groups=put(state.groups, at, group))

    def read(self, state: State, rank: int, steps: list[Step]) -> State:
        engine = state.engines[rank]
        if len({step.wave for step in steps}) > 1:
            raise Violation(f"engine {rank} reads a step of several waves")
        at, group = self._group(state, rank)
        position = group.ranks.index(rank)
        captured = self._capture(state, group, position, steps)
        state = self._with_group(
            state, at, group._replace(reads=put(group.reads, position, group.reads[position] + 1))
        )
        ended = [
            job._replace(unread=job.unread - 1) if job.name in steps[position].rows else job
            for job in engine.jobs
        ]
        jobs = tuple(job for job in ended if job.unread)
        busy = any(step.rows or step.votes for step in steps)
        quiet = 0 if busy else engine.quiet + 1
        after_step = engine._replace(jobs=jobs, quiet=quiet, captured=captured)
        state = self.with_engine(state, rank, after_step)
        works = any(job.works for job in jobs)
        sums = sum(step.works for step in steps), sum(step.votes for step in steps)
        after, _ = self.call_engine(state, rank, "on_all_reduce", *sums, works)
        self._check_end(engine, after.engines[rank], steps, works, rank)
        if after.engines[rank].fields.in_flight == 0 and (
            after.engines[rank].fields.wave != engine.fields.wave
        ):
            after = self.with_engine(after, rank, after.engines[rank]._replace(quiet=0))
        return after

    def _capture(
        self, state: State, group: Group, position: int, steps: list[Step]
    ) -> frozenset[Bucket]:
        """Returns what an engine has captured after a step. Operations of the group are captured,
        too: so all engines must capture the same step, or replay it."""
        own = state.engines[group.ranks[position]].captured
        if not self.bounds.captures:
            return own
        read = group.reads[position]
        for rank, other in zip(group.ranks, group.reads, strict=True):
            if other == read and state.engines[rank].captured != own:
                raise Violation(f"engine {rank} replays a step that another engine captures")
        sizes = [_engine_step(step) for step in steps]
        computed = [self.computed(sizes, at) for at in range(len(sizes))]
        self._check_computed(sizes, computed)
        bucket = computed[position]
        return own | {bucket} if isinstance(bucket, Bucket) else own

    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        """Returns what engine `at` of the group computes in a step: the bucket to which it pads its
        step, and which it replays, or how it computes the step without one. `steps`: those of all
        engines."""
        bucket = _BUCKETS.choose(steps)
        if bucket is not None:
            return bucket
        return Eager.LAYERS_WITH_EXPERTS if any(step.tokens for step in steps) else Eager.NOTHING

    def _check_computed(self, steps: list[EngineStep], computed: list[Bucket | Eager]) -> None:
        """Checks that the operations of the group match in a step, and that it is replayed if all
        engines can replay it."""
        if len(set(computed)) > 1:
            raise Violation(f"the engines compute {computed} in one step")
        (bucket,) = set(computed)
        if not any(step.tokens for step in steps):
            if bucket is not Eager.NOTHING:
                raise Violation("a step without tokens is computed")
            return
        if isinstance(bucket, Bucket):
            for step in steps:
                if any(size > room for size, room in zip(step[:4], bucket, strict=True)):
                    raise Violation(f"{bucket} has no room for {step}")
        elif all(step.tokens <= _MAX_TOKENS for step in steps):
            raise Violation("a step is not replayed, although each engine's part has a bucket")

    def captured_when_joining(self, _engine: Engine) -> frozenset[Bucket]:
        """Returns the captures with which an engine joins a group: it drops all of them."""
        return frozenset()

    def _check_end(
        self, before: Engine, after: Engine, steps: list[Step], works: bool, rank: int
    ) -> None:
        if after.quiet > self.bounds.depth:
            raise Violation(f"engine {rank} reads {after.quiet} steps without rows")
        ends = after.fields.finishing or after.fields.phase is not Phase.RUNNING
        if not ends and all(step.votes for step in steps):
            raise Violation(f"engine {rank} goes on although all vote for a pause")
        if after.fields.wave == before.fields.wave:
            return
        if any(step.works for step in steps):
            raise Violation(f"engine {rank} ends a wave although an engine had work")
        self.most_quiet = max(self.most_quiet, after.quiet)
        if works and after.fields.phase is Phase.STOPPED:
            raise Violation(f"engine {rank} stops with work")


def _engine_step(step: Step) -> EngineStep:
    """Returns the sizes of an engine's step: the requests have different numbers of tokens."""
    tokens = [_TOKENS[name % len(_TOKENS)] for name in step.rows]
    rows = len(tokens)
    return EngineStep(sum(tokens), rows, rows, max(tokens, default=0), True)


class Eager(enum.Enum):
    """A step without a bucket."""

    NOTHING = 0
    """No engine has tokens."""
    LAYERS_WITH_EXPERTS = 1
    """All engines compute the layers with experts, those without tokens only these."""


_TOKENS = (1, 1, 2, 9)
"""The tokens that a request has in each step, by the remainder of its name: one token, a few, or
more than a bucket holds."""
_MAX_TOKENS = 4
_BUCKETS = Buckets(max_rows=4, max_tokens=_MAX_TOKENS)
_HANDLERS: dict[type, str] = {StartDPWave: "start", Pause: "pause", Resume: "resume"}
