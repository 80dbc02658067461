"""Captured steps of engines that share experts, with graphs that work like CUDA graphs: all engines
replay the same bucket, or all compute eagerly, and no bit of an answer changes."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from swell.configs.schema import ParallelConfig
from swell.kernels.activation import silu_and_mul
from swell.kernels.linear import linear
from swell.worker.comm.groups import ProcessGroup
from swell.worker.comm.mesh import Mesh
from swell.worker.layers import moe
from swell.worker.layers.moe import ExpertTraits, MoE
from swell.worker.layers.weight_shard import materialize
from swell.worker.moe.dp_sync import DPSyncResult, LockstepDPSync
from swell.worker.runner import ModelRunner
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step import buckets
from swell.worker.step.buckets import EngineStep
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker.comm.test_mesh import in_threads
from tests.worker.fixed_graphs import FixedGraphs
from tests.worker.moe.moe_engines import PROMPTS, Engine, EngineGroup, answers
from tests.worker.moe.test_expert_balance import skewed_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("matched_operations")]

LARGEST = 24
"""The most tokens of a bucket in these tests."""


class Experts:
    """Computes the results of the `reference` backend, but the host reads nothing, as in the
    `triton` backend: every expert is computed for all tokens."""

    def __init__(self) -> None:
        self.choices: defaultdict[int, Tensor] = defaultdict(lambda: torch.tensor(0))
        """Thread -> how many choices of tokens it has received."""

    def expert_outputs(self, x: Tensor, experts: Tensor, weights: Any, out: Tensor) -> None:
        self.choices[threading.get_ident()] += (experts >= 0).sum()
        for expert, (gate_up, down) in sorted(weights.items()):
            computed = linear(silu_and_mul(linear(x, gate_up)), down).unsqueeze(1)
            out.copy_(torch.where((experts == expert).unsqueeze(-1), computed, out))


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Experts:
    made = Experts()
    monkeypatch.setattr(moe, "expert_outputs", made.expert_outputs)
    return made


@pytest.fixture
def graphs(
    fixed_graphs: FixedGraphs, experts: Experts, monkeypatch: pytest.MonkeyPatch
) -> FixedGraphs:
    monkeypatch.setattr(buckets, "_TOKENS", (8, 16, LARGEST))
    return fixed_graphs


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """Thread -> the hidden states that it has sampled from, [S, hidden] for each step with rows."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    sample = ModelRunner._sample

    def sample_and_note(self: Any, hidden: Tensor, batch: Any, *args: Any) -> Any:
        rows = hidden if len(hidden) == batch.num_samples else hidden[batch.logits_indices]
        found[threading.get_ident()].append(rows.clone())
        return sample(self, hidden, batch, *args)

    monkeypatch.setattr(ModelRunner, "_sample", sample_and_note)
    return found


def threads(engine: Engine) -> list[int]:
    """Returns the threads of the engine's workers."""
    return [member.pool.submit(threading.get_ident).result() for member in engine.members]


class StepOfWorker(NamedTuple):
    replays: list[tuple[int, ...]]
    """The sizes of its replays."""
    operations: Counter[tuple[str, str]]
    """How often each group computed each operation."""
    num_captures: int
    """The captures of all workers."""
    choices: int
    """The choices of experts of all tokens that it received."""


class Observed:
    """Runs steps of an engine group, and observes what each worker does."""

    def __init__(self, engine_group: EngineGroup, graphs: FixedGraphs, experts: Experts) -> None:
        self.engine_group, self._graphs, self._experts = engine_group, graphs, experts
        self.steps: list[list[list[StepOfWorker]]] = []
        """[steps][engines][workers]"""
        self.outputs: list[Any] = []
        """Tokens and log probabilities of each engine and step."""

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            of_engines = [threads(engine) for engine in self.engine_group.members]
            replays = {t: len(self._graphs.replays[t]) for of in of_engines for t in of}
            done = {t: len(self._graphs.operations[t]) for of in of_engines for t in of}
            captures = len(self._graphs.captured)
            choices = {t: int(self._experts.choices[t]) for of in of_engines for t in of}
            outputs = self.engine_group.advance()
            self.outputs += [(each.sampled_token_ids, each.extras) for each in outputs]
            self.steps.append(
                [
                    [
                        StepOfWorker(
                            self._graphs.replays[t][replays[t] :],
                            Counter(self._graphs.operations[t][done[t] :]),
                            len(self._graphs.captured) - captures,
                            int(self._experts.choices[t]) - choices[t],
                        )
                        for t in of
                    ]
                    for of in of_engines
                ]
            )

    def check_that_all_do_the_same(self) -> None:
        for number, step in enumerate(self.steps):
            replays = {tuple(worker.replays) for engine in step for worker in engine}
            assert len(replays) == 1, (number, replays)

    def buckets(self) -> list[tuple[int, ...] | None]:
        """Returns the sizes that were replayed in each step; None: the step was eager."""
        return [(*step[0][0].replays, None)[0] for step in self.steps]


SAMPLERS = {"argmax": SamplerParams(), "logits": SamplerParams(logprobs=2)}


def serve(observed: Observed, engines: list[Engine]) -> None:
    """Serves with two engines, and one of them needs logits: decode steps of different sizes, idle
    engines, prompts next to decode steps, and more prompts than a bucket holds. Then a third one
    joins, another leaves, and all become idle."""
    first, second, third = engines
    engine_group = observed.engine_group
    engine_group.regroup(first, second)
    first.start([PROMPTS[0], PROMPTS[1]])
    observed.advance(3)
    second.start([PROMPTS[2], PROMPTS[3], PROMPTS[4]], SAMPLERS["logits"])
    observed.advance(3)
    second.start([PROMPTS[1], PROMPTS[4], PROMPTS[3], PROMPTS[0]], SAMPLERS["logits"])
    observed.advance(3)
    engine_group.regroup(first, second, third, keep_states=True)
    observed.advance(2)
    third.start([PROMPTS[5]])
    observed.advance(2)
    engine_group.regroup(third, first, keep_states=True)
    observed.advance(2)
    for engine in (first, third):
        engine.start([])
    observed.advance()


DECODE, PROMPT = (4, 4, 4), (LARGEST, 4, 4)
BUCKETS = [
    *(PROMPT, (2, 2, 2), (2, 2, 2)),
    *(PROMPT, DECODE, DECODE),
    *(None, DECODE, DECODE),
    *(DECODE, DECODE),
    *((8, 4, 4), DECODE),
    *((2, 2, 2), (2, 2, 2)),
    None,
]
"""The bucket of each step of `serve`."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        ("qwen3_moe-mixed", {"parallel__tensor": 2}),
        ("qwen3_moe", {"parallel__pipeline": 2}),
        ("mixtral", {"parallel__balance_steps": 100}),
    ],
)
def test_all_engines_replay_the_bucket_that_holds_all_their_steps(
    tiny_moe: Any,
    graphs: FixedGraphs,
    experts: Experts,
    sampled: dict[int, list[Tensor]],
    family: str,
    options: dict[str, Any],
) -> None:
    """Answers are those of eager steps bit for bit. In a replay, groups between engines compute as
    many operations as in an eager step, and tokens choose no more experts."""
    found = []
    for eager in (True, False):
        sampled.clear()
        with EngineGroup(tiny_moe(family)[0], model__enforce_eager=eager, **options) as group:
            engines = [group.add() for _ in range(3)]
            observed = Observed(group, graphs, experts)
            serve(observed, engines)
            hidden = [sampled[threads(engine)[engine.output_rank]] for engine in engines]
        observed.check_that_all_do_the_same()
        assert observed.buckets() == [None if eager else bucket for bucket in BUCKETS]
        found.append((observed, hidden))
    (eager_run, expected), (run, got) = found
    assert run.outputs == eager_run.outputs
    for of_engine, other in zip(got, expected, strict=True):
        assert of_engine and all(map(torch.equal, of_engine, other))
    for step, of_eager in zip(run.steps, eager_run.steps, strict=True):
        if not step[0][0].num_captures:
            assert between_engines(step) == between_engines(of_eager)
            # In an eager step the last layer has all tokens, not only those that sample.
            pairs = zip(choices(step), choices(of_eager), strict=True)
            assert all(one <= other for one, other in pairs), "padding chooses no expert"


def between_engines(step: list[list[StepOfWorker]]) -> list[list[dict[tuple[str, str], int]]]:
    """Returns how often each worker computed each operation of a group between engines."""
    return [
        [
            {key: n for key, n in each.operations.items() if key[0].startswith(("data", "sync"))}
            for each in of_engine
        ]
        for of_engine in step
    ]


def choices(step: list[list[StepOfWorker]]) -> list[int]:
    return [worker.choices for engine in step for worker in engine]


def test_captures_are_dropped_when_the_group_of_engines_changes(
    tiny_moe: Any, graphs: FixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL frees a communicator only when no graph contains its operations, and an engine that
    joins has captured nothing."""
    runners: dict[int, Callable[[], Any]] = {}
    left_too_late: list[str] = []
    close = ProcessGroup.close

    def close_and_check(self: ProcessGroup) -> None:
        runner = runners[threading.get_ident()]()
        if self._transport is not None and runner is not None and runner._model_step._captured:
            left_too_late.append(self.name)
        close(self)

    monkeypatch.setattr(ProcessGroup, "close", close_and_check)
    with EngineGroup(tiny_moe("mixtral")[0]) as group:
        engines = [group.add() for _ in range(3)]
        for engine in engines:
            runners[threads(engine)[0]] = lambda worker=engine.workers[0]: worker.runner
        for members, keep in ((engines[:2], False), (engines, True), (engines[1:], False)):
            group.regroup(*members, keep_states=keep)
            steps = [engine.workers[0].runner._model_step for engine in members]
            assert not left_too_late and not any(each._captured for each in steps)
            engines[1].start([PROMPTS[0]])
            group.advance()
            assert all(each._captured for each in steps)
    assert not left_too_late


def test_only_an_engine_without_others_captures_steps_before_the_first_request(
    tiny_moe: Any, graphs: FixedGraphs
) -> None:
    """Other engines may have captured theirs already, and capturing computes a step."""
    with EngineGroup(tiny_moe("mixtral")[0]) as group:
        first, second, third = (group.add() for _ in range(3))
        group.regroup(first, second)
        assert not graphs.captured
        group.regroup(third)
        assert graphs.captured == [(24, 4, 4), *((rows,) * 3 for rows in (4, 2, 1))]


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_a_worker_whose_capture_fails_computes_what_the_others_replay(
    tiny_moe: Any, graphs: FixedGraphs, split: str
) -> None:
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder, **{f"parallel__{split}": 2}) as group:
        group.regroup(*[group.add() for _ in range(2)])
        failing, *others = [thread for engine in group.members for thread in threads(engine)]
        graphs.refusing.add(failing)
        for rows in ([[0, 1], [2, 3, 4]], [[0], []], [[], [5]]):
            assert answers(group, rows) == [truth[i] for mine in rows for i in mine]
        assert failing not in graphs.replays
        assert all(graphs.replays[thread] for thread in others)
        for thread in others:
            assert len(graphs.replays[thread]) == len(graphs.replays[others[0]])


def test_nothing_is_replayed_while_experts_move(
    tiny_moe: Any, graphs: FixedGraphs, experts: Experts, tmp_path: Path
) -> None:
    """A capture contains the places of experts, so it is made again after they have moved."""
    folder = skewed_model(tiny_moe("mixtral")[0], tmp_path / "model")
    found = []
    for options in ({}, {"parallel__balance_steps": 4, "parallel__redundant_experts": 2}):
        with EngineGroup(folder, **options) as group:
            group.regroup(*[group.add() for _ in range(2)])
            observed = Observed(group, graphs, experts)
            for engine, prompt in zip(group.members, PROMPTS, strict=False):
                engine.start([prompt])
            observed.advance(12)
        observed.check_that_all_do_the_same()
        found.append((observed.outputs, observed.buckets(), observed.steps))
    (expected, always, _), (outputs, replayed, steps) = found
    assert outputs == expected and None not in always
    eager = [number for number, bucket in enumerate(replayed) if bucket is None]
    assert eager, "experts have moved"
    for number in eager:
        if replayed[number + 1] is not None:
            captures = steps[number + 1][0][0].num_captures
            assert captures == 4, "each engine captures the bucket again, after the largest one"


@pytest.mark.parametrize("fault", ["own bucket", "no step without tokens"])
def test_workers_whose_operations_do_not_match_fail(
    tiny_moe: Any, graphs: FixedGraphs, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A step in which engines do not compute the same ends with a message, not with a time limit
    or the end of the process."""
    if fault == "own bucket":
        message = r"operation \d+ of the step differs: .*engine 0.*engine 1"
        before_step = LockstepDPSync.before_step

        def return_own_step(self: Any, plan: Any, step: EngineStep) -> DPSyncResult:
            return replace(before_step(self, plan, step), steps=[step])

        monkeypatch.setattr(LockstepDPSync, "before_step", return_own_step)
    else:
        message = r"engine 1 has ended its step without operation \d+: .*engine 0"
        monkeypatch.setattr(ModelRunner, "_execute_dummy", lambda *_args: None)
    with EngineGroup(tiny_moe("mixtral")[0]) as group:
        group.regroup(*[group.add() for _ in range(2)])
        rows = (2, 1) if fault == "own bucket" else (1, 0)
        for engine, count in zip(group.members, rows, strict=True):
            engine.start(PROMPTS[:count])
        with pytest.raises(AssertionError, match=message):
            group.advance()


def in_groups_of_two(work: Callable[[Mesh, int], Any]) -> list[Any]:
    """Calls `work` in two workers that share experts."""
    store = torch.distributed.HashStore()

    def begin(rank: int) -> Any:
        mesh = Mesh.build(ParallelConfig(expert=True), 0)
        mesh.begin(1)
        mesh.regroup(GroupPlan(1, None, 1, 2, rank), None, store, timeout_s=HANG_S)
        try:
            return work(mesh, rank)
        finally:
            mesh.close()

    return in_threads(2, begin)


def test_padding_chooses_no_expert() -> None:
    """The results of the other tokens, and the counted load, are those without padding. The padding
    may contain NaN."""
    traits = ExpertTraits(6, 4, 2, True, False, ("gate", "up", "down"))
    torch.manual_seed(0)
    router = torch.randn(6, 8)
    weights = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(6)]
    inputs = [torch.randn(3, 8), torch.randn(0, 8)]
    filler = [torch.full((2, 8), torch.nan), torch.randn(5, 8)]

    def work(mesh: Mesh, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = MoE(8, traits, mesh)
        materialize(layer, torch.device("cpu"), torch.float32)
        layer.router.weight.copy_(router)
        layer.local_experts.update({expert: weights[expert] for expert in range(rank, 6, 2)})
        layer.record_choices(choices := torch.zeros(5, 2, dtype=torch.int64))
        x = inputs[rank]
        found = []
        for padding in (0, 5 - len(x)):
            layer.count_load()
            mesh.tokens = [len(each) for each in inputs]
            slots = torch.arange(5)
            slots[len(x) :] = -1
            padded = torch.cat((x, filler[rank][:padding]))
            out = layer(padded, slots if padding else None)
            assert layer.load is not None
            found += [out[: len(x)], layer.load.clone()]
        assert (choices[len(x) :] == -1).all() and (choices[: len(x)] >= 0).all()
        return tuple(found)

    for number, (out, load, of_padded, load_of_padded) in enumerate(in_groups_of_two(work)):
        assert torch.equal(of_padded, out) and torch.equal(load_of_padded, load)
        assert load.sum() == 2 * len(inputs[number])
