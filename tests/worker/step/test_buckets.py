"""Steps of fixed sizes, with graphs that work like CUDA graphs. The answers are those of unpadded
steps."""

from __future__ import annotations

import gc
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.local import LLM, SamplingParams
from swell.configs.schema import ParallelConfig
from swell.kernels.graph import NotCapturableError
from swell.kernels.host.host_reads import RefuseHostReads
from swell.kernels.inputs import Bucket
from swell.worker import worker as worker_module
from swell.worker.comm.groups import GroupError, Handle, ProcessGroup
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import ComputesLogits
from swell.worker.step import captured_forward, captured_steps
from swell.worker.step.buckets import Buckets, EngineStep, NoBuckets
from swell.worker.step.forward import HeadOutput
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import GroupPlan, SchedulerOutput
from tests.support.paths import NANO
from tests.worker import tiny_models
from tests.worker.fixed_graphs import FixedGraphs

pytestmark = pytest.mark.slow


@given(
    max_rows=st.integers(1, 300),
    max_tokens=st.integers(1, 600),
    draft_tokens=st.integers(0, 60),
    data=st.data(),
)
def test_a_step_gets_the_smallest_bucket_that_holds_it(max_rows, max_tokens, draft_tokens, data):
    buckets = Buckets(max_rows, max_tokens, draft_tokens)
    rows = data.draw(st.integers(0, max_rows))
    most = data.draw(st.integers(min(rows, 1), 4))
    tokens = rows if most <= 1 else data.draw(st.integers(rows, max(rows, max_tokens)))
    samples = data.draw(st.integers(0, min(tokens, rows + draft_tokens)))
    sizes = Bucket(tokens, rows, samples, min(most, tokens))
    found = buckets.find(*sizes)
    kind = buckets.decode if sizes.max_query_tokens <= 1 else buckets.mixed
    holding = [b for b in kind if all(a <= b for a, b in zip(sizes, b, strict=True))]
    assert found == min(holding, default=None)
    if found is None:
        assert rows > 256 or tokens > 512
    for bucket in buckets.decode + buckets.mixed:
        assert bucket.rows <= max_rows
        assert bucket.samples <= max_rows + draft_tokens


@st.composite
def waves(draw) -> tuple[Buckets, list[EngineStep]]:
    """Returns buckets, and the steps of engines that have these buckets."""
    max_rows, max_tokens = draw(st.integers(1, 300)), draw(st.integers(1, 600))
    draft_tokens = draw(st.integers(0, 60))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(0, max_rows))
        most = draw(st.integers(min(rows, 1), 4)) if rows else 0
        tokens = rows if most <= 1 else draw(st.integers(rows, max(rows, max_tokens)))
        samples = draw(st.integers(0, min(tokens, rows + draft_tokens)))
        capturable = draw(st.integers(0, 9)) > 0
        steps.append(EngineStep(tokens, rows, samples, min(most, tokens), capturable))
    return Buckets(max_rows, max_tokens, draft_tokens), steps


def holds(bucket: Bucket, step: EngineStep) -> bool:
    return all(size <= room for size, room in zip(step[:4], bucket, strict=True))


@given(wave=waves(), data=st.data())
def test_all_engines_of_a_wave_choose_the_bucket_that_holds_the_step_of_each(wave, data):
    buckets, steps = wave
    found = buckets.choose(steps)
    assert buckets.choose(data.draw(st.permutations(steps))) == found
    idle = EngineStep(0, 0, 0, 0, True)
    assert buckets.choose([*steps, idle]) == found, "an idle engine changes nothing"
    alone = [buckets.choose([step]) for step in steps]
    if found is not None:
        assert all(holds(found, step) for step in steps)
        decodes = all(step.max_query_tokens <= 1 for step in steps)
        kind = buckets.decode if decodes else buckets.mixed
        assert found == min(b for b in kind if all(holds(b, step) for step in steps))
    elif any(step.tokens for step in steps) and all(step.is_capturable for step in steps):
        assert None in [own for own, step in zip(alone, steps, strict=True) if step.tokens]
    if not all(step.is_capturable for step in steps) or not any(step.tokens for step in steps):
        assert found is None


@given(wave=waves())
def test_a_wave_without_buckets_runs_eagerly(wave):
    assert NoBuckets().choose(wave[1]) is None


PROMPTS = [[5, 6, 7], [8, 9], list(range(10, 40)), [11, 12, 13, 14], [15]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, max_tokens=15, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True),
]


def answers(folder, **overrides) -> list:
    """Returns ids and log probabilities of greedy requests by themselves, then of all requests."""
    options = {
        "scheduler.max_rows": 5,
        "scheduler.max_tokens_per_step": 16,
        "cache.memory_bytes": 1 << 22,
        **overrides,
    }
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate(PROMPTS[:2], PARAMS[:2]) + llm.generate(PROMPTS, PARAMS)
    parts = [output.outputs[0] for output in outputs]
    return [(part.token_ids, part.logprobs) for part in parts]


def make(folder, kind: str) -> None:
    tiny_models.make(folder, kind)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


NGRAM = {"drafts.method": "ngram", "drafts.min_match": 1}


@pytest.mark.parametrize(
    ("depth", "kind", "options"),
    [
        (1, "llama", {}),
        (3, "llama", {}),
        (1, "llama", {"model.dtype": "bfloat16"}),
        (3, "llama", {"model.dtype": "bfloat16"}),
        (1, "qwen3", NGRAM),
        (3, "qwen3", NGRAM),
        (1, "qwen3", {"parallel.tensor": 2}),
        (3, "llama", {"parallel.pipeline": 3}),
        (3, "llama", {"parallel.tensor": 2, "parallel.pipeline": 2}),
    ],
)
def test_answers_of_padded_steps_equal_those_of_unpadded_ones(
    tmp_path, request, kind, options, depth
):
    make(tmp_path, kind)
    options = {"scheduler.steps_in_flight": depth, **options}
    expected = answers(tmp_path, **options)
    graphs: FixedGraphs = request.getfixturevalue("fixed_graphs")
    assert answers(tmp_path, **options) == expected
    decode = {(rows, rows, rows) for rows in (1, 2, 4, 5)}
    workers = options.get("parallel.tensor", 1) * options.get("parallel.pipeline", 1)
    assert len(graphs.replays) == workers
    for replays in graphs.replays.values():
        assert decode <= set(replays), "steps of each number of rows are replayed"
        assert {sizes for sizes in replays if sizes[0] > sizes[1]}, "mixed steps as well"


@pytest.mark.parametrize("keep_states", [True, False])
def test_captures_are_dropped_before_their_groups_are_left(
    tmp_path, fixed_graphs, monkeypatch, keep_states
):
    """NCCL frees a communicator only when no graph contains its operations."""
    left_too_late: list[str] = []
    close = ProcessGroup.close

    def close_and_check(self):
        transport = self._transport
        if transport is not None and not fixed_graphs.frees_those_of(transport):
            left_too_late.append(self.name)
        close(self)

    monkeypatch.setattr(ProcessGroup, "close", close_and_check)
    make(tmp_path, "llama")
    options = {"parallel.tensor": 2, "scheduler.max_rows": 2, "cache.memory_bytes": 1 << 22}
    with LLM(str(tmp_path), **options) as llm:
        executor = llm._engine.core.executor
        before = llm.generate(PROMPTS[:2], PARAMS[:2])
        progress = executor.progress_counter
        assert any(each.transports for each in fixed_graphs.graphs)
        executor.regroup(GroupPlan(0, keep_states=keep_states))
        assert not any(each.transports for each in fixed_graphs.graphs)
        assert executor.progress_counter >= progress
        if keep_states:
            after = llm.generate(PROMPTS[:2], PARAMS[:2])
            assert [each.outputs[0].token_ids for each in after] == [
                each.outputs[0].token_ids for each in before
            ]
            assert fixed_graphs.graphs, "steps are captured again"
    assert not left_too_late


def test_captures_are_dropped_before_a_worker_sleeps(tmp_path, fixed_graphs, monkeypatch):
    """Even if the runner lives on: captures have memory of their own, also of groups."""
    make(tmp_path, "llama")
    options = {"scheduler.max_rows": 2, "cache.memory_bytes": 1 << 22}
    with LLM(str(tmp_path), **options) as llm:
        before = llm.generate(PROMPTS[:2], PARAMS[:2])
        worker = llm._engine.core.executor._worker
        runner, left = worker.runner, []

        def count_captures(_device):
            gc.collect()
            left.append(len(fixed_graphs.graphs))

        assert runner.progress and fixed_graphs.graphs
        progress = worker.progress_counter
        monkeypatch.setattr(worker_module, "give_back", count_captures)
        llm._engine.core.memory.set_sleep(1)
        assert left == [0] and worker.progress_counter >= progress
        llm._engine.core.memory.set_sleep(0)
        after = llm.generate(PROMPTS[:2], PARAMS[:2])
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_a_step_is_not_replayed_after_its_groups_were_aborted(tmp_path, fixed_graphs, monkeypatch):
    make(tmp_path, "llama")
    with LLM(str(tmp_path), **{"scheduler.max_rows": 2, "cache.memory_bytes": 1 << 22}) as llm:
        of_worker = llm._engine.core.executor._worker.runner
        batch = of_worker.batches.build(SchedulerOutput(0), Bucket(2, 2, 2, 1))

        def aborted(mesh):
            raise GroupError("aborted")

        monkeypatch.setattr(Mesh, "check", aborted)
        with torch.inference_mode(), pytest.raises(GroupError):
            of_worker._model_step.hidden(batch, None, HeadOutput.LOGITS)
    assert not fixed_graphs.replays


def test_steps_of_engines_that_share_experts_need_graphs_that_repeat_operations_of_groups(
    fixed_graphs, monkeypatch
):
    states = RequestStates(2, 16, torch.device("cpu"))
    model = SimpleNamespace(compute_logits=len, argmax=len)
    assert isinstance(model, ComputesLogits)
    kinds = []
    for accepts_torch in (True, False):
        found = fixed_graphs.TRAITS._replace(accepts_torch=accepts_torch)
        monkeypatch.setattr(captured_forward, "traits", lambda device, found=found: found)
        for expert in (True, False):
            mesh = Mesh.build(ParallelConfig(expert=expert), 0)
            made = captured_forward.make_forward(model, states, mesh, enforce_eager=False)
            kinds.append(
                (accepts_torch, expert, isinstance(made, captured_forward.CapturedForward))
            )
    assert kinds == [
        (True, True, True),
        (True, False, True),
        (False, True, False),
        (False, False, True),
    ]


def test_a_capture_that_fails_with_its_groups_is_tried_again(tmp_path, fixed_graphs, monkeypatch):
    """A capture that fails because the groups were aborted says nothing about the model."""
    make(tmp_path, "llama")
    with LLM(str(tmp_path), **{"scheduler.max_rows": 2, "cache.memory_bytes": 1 << 22}) as llm:
        of_worker = llm._engine.core.executor._worker.runner
        batch = of_worker.batches.build(SchedulerOutput(0), Bucket(8, 2, 2, 8))

        def aborted(mesh):
            raise GroupError("aborted")

        fixed_graphs.refusing.add(threading.get_ident())
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(Mesh, "check", aborted)
            with pytest.raises(GroupError):
                of_worker._model_step.capture(batch, HeadOutput.LOGITS)
        fixed_graphs.refusing.clear()
        before = len(fixed_graphs.captured)
        with torch.inference_mode():
            of_worker._model_step.capture(batch, HeadOutput.LOGITS)
        assert fixed_graphs.captured[before:] == [(8, 2, 2)]


def test_a_worker_whose_captures_fail_computes_the_sizes_of_its_peers(
    tmp_path, request, monkeypatch
):
    """Peers replay operations of their groups with the sizes of a bucket."""
    make(tmp_path, "llama")
    options = {"parallel.tensor": 2}
    expected = answers(tmp_path, **options)
    graphs: FixedGraphs = request.getfixturevalue("fixed_graphs")
    capture, first = graphs.capture, threading.Lock()

    def refuse_one_worker(*args):
        if first.acquire(blocking=False):
            graphs.refusing.add(threading.get_ident())
        return capture(*args)

    monkeypatch.setattr(graphs, "capture", refuse_one_worker)
    assert answers(tmp_path, **options) == expected
    assert len(graphs.refusing) == len(graphs.replays) == 1


def test_activations_are_not_overwritten_while_they_are_sent(tmp_path, fixed_graphs, monkeypatch):
    make(tmp_path, "llama")
    unchanged: list[bool] = []
    send = ProcessGroup.send

    class Comparing(Handle):
        def __init__(self, handle, tensor) -> None:
            self._handle, self._tensor, self._before = handle, tensor, tensor.clone()

        def wait(self) -> None:
            unchanged.append(torch.equal(self._tensor, self._before))
            self._handle.wait()

    def send_and_compare(self, t, dst):
        return Comparing(send(self, t, dst), t)

    monkeypatch.setattr(ProcessGroup, "send", send_and_compare)
    answers(tmp_path, **{"scheduler.steps_in_flight": 3, "parallel.pipeline": 3})
    assert len(unchanged) > 20 and all(unchanged)


def test_sampled_tokens_stay_valid_while_the_next_steps_are_computed(
    tmp_path, fixed_graphs, monkeypatch
):
    """The test above would not notice a result that is overwritten: this shows that it does."""
    make(tmp_path, "llama")
    options = {"scheduler.steps_in_flight": 3}
    found = answers(tmp_path, **options)
    run = captured_steps.CapturedSteps.run

    def run_without_copies(self, batch):
        self._traits = self._traits._replace(is_asynchronous=False)
        return run(self, batch)

    monkeypatch.setattr(captured_steps.CapturedSteps, "run", run_without_copies)
    assert answers(tmp_path, **options) != found


def test_decode_steps_are_captured_before_the_first_request(tmp_path, fixed_graphs):
    make(tmp_path, "llama")
    with LLM(str(tmp_path), **{"scheduler.max_rows": 5, "cache.memory_bytes": 1 << 22}) as llm:
        captured = [*fixed_graphs.captured]
        assert captured == [(512, 5, 5), *((rows,) * 3 for rows in (5, 5, 4, 4, 2, 2, 1, 1))]
        assert not fixed_graphs.replays
        llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert fixed_graphs.captured == captured


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.zeros(1)),
        lambda x: bool((x > 0).all()),
        lambda x: torch.bincount(x.long()),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_steps_after_which_the_host_reads_are_not_captured(read):
    with RefuseHostReads(), pytest.raises(NotCapturableError, match="the host reads"):
        read(torch.ones(3))


def test_a_model_whose_host_reads_runs_eagerly(tmp_path, fixed_graphs):
    make(tmp_path, "qwen3_moe")
    found = answers(tmp_path, **{"model.dtype": "float16"})  # without kernels for experts
    assert not fixed_graphs.replays and not fixed_graphs.captured
    assert [len(ids) for ids, _ in found[2:]] == [params.max_tokens for params in PARAMS]
