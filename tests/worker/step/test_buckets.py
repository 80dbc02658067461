"""Steps of fixed sizes: graphs that, like CUDA graphs, compute exactly the sizes of their capture,
share their memory, and whose results are read late. The answers are those of unpadded steps."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swell.cluster.local import LLM, SamplingParams
from swell.engine.executor.inline import InlineExecutor
from swell.kernels import graph
from swell.kernels.graph import NotCapturableError, Traits
from swell.kernels.host_reads import RefuseHostReads
from swell.kernels.inputs import Bucket
from swell.worker import runner
from swell.worker.step import forward
from swell.worker.step.buckets import Buckets
from tests.support.paths import NANO
from tests.worker import tiny_models

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


class FixedGraphs:
    """The module `graph` of a backend whose graphs work like CUDA graphs, on a CPU."""

    TRAITS = Traits(has_fixed_sizes=True, accepts_torch=True, is_asynchronous=True)

    def __init__(self) -> None:
        self.graphs: list[FixedGraph] = []
        self.replays: Counter[tuple[int, ...]] = Counter()

    def capture(
        self, run: Callable[[], list[Tensor]], sizes: tuple[int, ...]
    ) -> tuple[list[Tensor], FixedGraph]:
        with RefuseHostReads():
            run()
        results = [result.clone() for result in run()]
        self.graphs.append(FixedGraph(self, run, results, sizes))
        return results, self.graphs[-1]


class FixedGraph:
    def __init__(
        self,
        graphs: FixedGraphs,
        run: Callable[[], list[Tensor]],
        results: list[Tensor],
        sizes: tuple[int, ...],
    ) -> None:
        self._graphs, self._run, self._results, self._sizes = graphs, run, results, sizes
        self.progress = 0

    def replay(self, *sizes: int) -> None:
        assert all(size <= room for size, room in zip(sizes, self._sizes, strict=True))
        for other in self._graphs.graphs:
            for result in other._results:
                result.fill_(7)  # the memory of one graph's results is reused by the others
        for result, computed in zip(self._results, self._run(), strict=True):
            result.copy_(computed)
        self.progress += 1
        self._graphs.replays[self._sizes] += 1


class LateOutput(runner.ReadyOutput):
    """A result that is read when the engine asks for it, after the next steps have begun."""

    def __init__(self, output, sampled, mesh, stream) -> None:
        self._late, self._sampled = output, sampled

    def get_output(self):
        return self._sampled.fill(self._late)


@pytest.fixture
def fixed_graphs(monkeypatch) -> FixedGraphs:
    made = FixedGraphs()
    monkeypatch.setattr(graph, "_backend", lambda device: made)
    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(forward, "can_capture", lambda device: True)
    monkeypatch.setattr(InlineExecutor, "overlaps", property(lambda self: True))
    monkeypatch.setattr(runner, "CopyingOutput", LateOutput)
    start = runner.ModelRunner.__init__

    def start_late(self, args) -> None:
        start(self, args)
        self._copy_stream = object()

    monkeypatch.setattr(runner.ModelRunner, "__init__", start_late)
    return made


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


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"model.dtype": "bfloat16"}),
        ("qwen3", {"drafts.method": "ngram", "drafts.min_match": 1}),
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
    assert decode <= set(graphs.replays), "steps of each number of rows are replayed"
    assert {sizes for sizes in graphs.replays if sizes[0] > sizes[1]}, "mixed steps as well"


def test_sampled_tokens_stay_valid_while_the_next_steps_are_computed(
    tmp_path, fixed_graphs, monkeypatch
):
    """The test above would not notice a result that is overwritten: this shows that it does."""
    make(tmp_path, "llama")
    options = {"scheduler.steps_in_flight": 3}
    found = answers(tmp_path, **options)
    run = forward._Captured.run

    def run_without_copies(self, batch):
        self._traits = self._traits._replace(is_asynchronous=False)
        return run(self, batch)

    monkeypatch.setattr(forward._Captured, "run", run_without_copies)
    assert answers(tmp_path, **options) != found


def test_decode_steps_are_captured_before_the_first_request(tmp_path, fixed_graphs):
    make(tmp_path, "llama")
    with LLM(str(tmp_path), **{"scheduler.max_rows": 5, "cache.memory_bytes": 1 << 22}) as llm:
        captured = [graph._sizes for graph in fixed_graphs.graphs]
        assert captured == [(rows,) * 3 for rows in (5, 5, 4, 4, 2, 2, 1, 1)]
        assert not fixed_graphs.replays
        llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert [graph._sizes for graph in fixed_graphs.graphs] == captured


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
    found = answers(tmp_path)
    assert not fixed_graphs.replays and not fixed_graphs.graphs
    assert [len(ids) for ids, _ in found[2:]] == [params.max_tokens for params in PARAMS]
