"""States, block tables, batches and the step, each against a direct computation."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.attention import Attention
from swell.worker.memory import kv_cache
from swell.worker.runner import ModelRunner, ModelRunnerArgs
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import BatchBuilder
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.request_states import RequestStates
from swell.worker.step.staging import StagedTable
from swell.worker.step.token_feedback import MAX_OUTSTANDING, FirstStageFeedback
from swell.worker.wire import NewBlocks, NewRequest, SchedulerOutput
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROWS, LENGTH, BLOCK = 6, 40, 4


def greedy_row(slot: int, tokens: list[int], blocks: list[int] | None = None) -> NewRequest:
    return NewRequest(slot, tokens, len(tokens), blocks or [], SamplerParams())


@pytest.mark.parametrize("device_is_host", [True, False])
@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 3), st.integers(0, 7), st.lists(st.integers(0, 99), max_size=3)
            ),
            max_size=3,
            unique_by=lambda write: write[0],
        ),
        max_size=5,
    )
)
def test_staged_writes_equal_direct_ones(device_is_host, steps):
    table, direct = StagedTable(4, 10, torch.int32, CPU), np.zeros((4, 10), dtype=np.int32)
    if not device_is_host:
        table._flat_np = None
    for writes in steps:
        before = table.tensor.clone()
        for row, start, values in writes:
            table.stage(row, start, values)
            direct[row, start : start + len(values)] = values
        assert torch.equal(table.tensor, before)
        table.apply()
        assert np.array_equal(table.tensor.numpy(), direct)


def test_a_row_brings_its_tokens_and_columns():
    states = RequestStates(ROWS, LENGTH, CPU)
    params = SamplerParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=(1 << 64) - 2)
    states.stage(NewRequest(2, [5, 6, 7], 2, [], params))
    states.apply()
    assert states.token_ids[2, :3].tolist() == [5, 6, 7]
    assert states.float_params[2].tolist() == [0.5, 0.25, 0.125]
    assert states.int_params[2].tolist() == [7, -2, 2]
    slot_sets = (states.random_sampling, states.with_top_k_or_p)
    assert all(slots.among(np.array([1, 2])).tolist() == [1] for slots in slot_sets)
    states.stage(greedy_row(2, [1]))
    states.apply()
    assert states.token_ids[2, :1].tolist() == [1]
    assert not any(slots.any for slots in slot_sets)


def test_sampling_filters_are_neutral_for_a_greedy_row():
    states = RequestStates(ROWS, LENGTH, CPU)
    states.stage(NewRequest(1, [5], 1, [], SamplerParams(temperature=0, top_k=7, min_p=0.5)))
    assert not (states.random_sampling.any or states.with_top_k_or_p.any)


def test_a_row_that_is_too_long_is_refused():
    states = RequestStates(ROWS, LENGTH, CPU)
    states.stage(greedy_row(0, [1] * LENGTH))
    with pytest.raises(ValueError, match=f"{LENGTH + 1} tokens exceed.*max_model_len={LENGTH}"):
        states.stage(greedy_row(0, [1] * (LENGTH + 1)))


def test_block_tables_set_append_and_refuse():
    blocks = BlockTables(ROWS, LENGTH, BLOCK, CPU)
    blocks.stage_set(1, [4, 2])
    blocks.stage_append(1, [9])
    blocks.apply()
    assert blocks.tensor[1, :3].tolist() == [4, 2, 9]
    blocks.stage_set(1, [3])
    blocks.stage_append(1, [8])
    blocks.apply()
    assert blocks.tensor[1, :2].tolist() == [3, 8]
    with pytest.raises(ValueError, match="slot 1: 2 \\+ 10 blocks exceed the 11"):
        blocks.stage_append(1, list(range(10)))


@st.composite
def plans(draw):
    """Returns a plan over random slots, with blocks for every row's context."""
    slots = draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS, unique=True))
    counts = [draw(st.integers(1, 12)) for _ in slots]
    starts = [draw(st.integers(0, LENGTH - n)) for n in counts]
    samples = [draw(st.booleans()) for _ in slots]
    tokens = draw(st.randoms(use_true_random=False))
    new = []
    for slot, start, count in zip(slots, starts, counts, strict=True):
        length = start + count
        ids = [tokens.randrange(1000) for _ in range(length)]
        block_ids = [tokens.randrange(500) for _ in range(-(-length // BLOCK))]
        new.append(greedy_row(slot, ids, block_ids))
    return SchedulerOutput(0, 0, new, [], slots, starts, counts, samples)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_a_batch_agrees_with_its_plan(plan):
    states, blocks = RequestStates(ROWS, LENGTH, CPU), BlockTables(ROWS, LENGTH, BLOCK, CPU)
    for row in plan.new_requests:
        states.stage(row)
        blocks.stage_set(row.slot, row.block_ids)
    states.apply()
    blocks.apply()
    batch = BatchBuilder(states, blocks, 256).build(plan)
    ids, positions, slots, last, starts = [], [], [], [], [0]
    sampled = []
    columns = zip(plan.new_requests, plan.starts, plan.num_tokens, plan.samples, strict=True)
    for row, start, count, sample in columns:
        for position in range(start, start + count):
            ids.append(row.token_ids[position])
            positions.append(position)
            slots.append(row.block_ids[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(ids))
        if sample:
            last.append(len(ids) - 1)
            sampled.append((row.slot, start + count))
    assert batch.num_tokens == sum(plan.num_tokens)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.logits_indices.tolist() == last
    found = zip(batch.sample_slots.tolist(), batch.sample_positions.tolist(), strict=True)
    assert list(found) == sampled
    assert batch.sample_slots_np.tolist() == batch.sample_slots.tolist()
    assert batch.sample_positions_np.tolist() == batch.sample_positions.tolist()
    meta = batch.attention
    assert meta.slot_mapping.tolist() == slots
    assert meta.query_start.tolist() == starts
    assert meta.context_tokens.tolist() == [len(row.token_ids) for row in plan.new_requests]
    assert meta.max_query_tokens == max(plan.num_tokens, default=0)
    assert meta.max_context_tokens == max(meta.context_tokens.tolist(), default=0)
    for row, table in zip(plan.new_requests, meta.block_table.tolist(), strict=True):
        assert table[: len(row.block_ids)] == row.block_ids
    for tensor in (meta.query_start, meta.context_tokens, meta.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1


VOCAB = 97


class SumModel(nn.Module):
    """A stage of a model whose next token is 3 * token + 5 * position + 1 modulo 97, so that a
    wrong token or position shows in every later token. Stages pass the token on."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.vocab_size = mesh, VOCAB

    def forward(self, batch, intermediate):
        if intermediate is None:
            hidden = (3 * batch.input_ids + 5 * batch.positions + 1)[:, None].float()
        else:
            hidden = intermediate.hidden_states
        return hidden if self.mesh.is_last_stage else IntermediateTensors(hidden)

    def make_empty_intermediate(self, tokens):
        return IntermediateTensors(torch.empty(tokens, 1))

    def compute_logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB)
        logits[torch.arange(len(hidden)), hidden[:, 0].long() % VOCAB] = 1.0
        return logits

    def argmax(self, hidden):
        tokens = hidden[:, 0].long() % VOCAB
        return tokens, tokens.float()


def expected(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append((3 * tokens[-1] + 5 * (len(tokens) - 1) + 1) % VOCAB)
    return tokens[-count:]


def make_runner(mesh: Mesh, steps_in_flight: int = 2) -> ModelRunner:
    scheduler = SchedulerConfig(max_rows=ROWS, steps_in_flight=steps_in_flight)
    args = ModelRunnerArgs(
        model=SumModel(mesh),
        mesh=mesh,
        scheduler=scheduler,
        cache=CacheConfig(block_tokens=BLOCK),
        max_model_len=LENGTH,
        device=CPU,
    )
    return ModelRunner(args)


FIRST, SECOND, THIRD = [11, 12, 13], [50], [7, 8, 9, 10, 11]
LIFE = [
    # Two requests and the first part of a third, which samples nothing yet.
    SchedulerOutput(
        0,
        0,
        [greedy_row(0, FIRST, [0, 1]), greedy_row(3, SECOND, [2]), greedy_row(1, THIRD, [3, 4])],
        slots=[3, 0, 1],
        starts=[0, 0, 0],
        num_tokens=[1, 3, 2],
        samples=[True, True, False],
    ),
    # The host has read nothing, but rows continue after tokens that are only on the device.
    SchedulerOutput(1, slots=[0, 3, 1], starts=[3, 1, 2], num_tokens=[1, 1, 3], samples=[True] * 3),
    SchedulerOutput(2, slots=[0, 1], starts=[4, 5], num_tokens=[1, 1], samples=[True] * 2),
    SchedulerOutput(3),
    # A new request takes the slot of one whose last token may still be in transit.
    SchedulerOutput(
        4,
        0,
        [greedy_row(3, [70, 71], [2])],
        [NewBlocks(0, [7])],
        slots=[0, 3],
        starts=[5, 0],
        num_tokens=[1, 2],
        samples=[True] * 2,
    ),
    SchedulerOutput(5, slots=[3, 0], starts=[2, 6], num_tokens=[1, 1], samples=[True] * 2),
]


def expected_outputs() -> list[list[int]]:
    first, second, third = expected(FIRST, 5), expected(SECOND, 2), expected(THIRD, 2)
    late = expected([70, 71], 2)
    return [
        [second[0], first[0]],
        [first[1], second[1], third[0]],
        [first[2], third[1]],
        [],
        [first[3], late[0]],
        [late[1], first[4]],
    ]


def test_tokens_feed_back_on_the_device():
    runner = make_runner(Mesh.build(ParallelConfig(), 0))
    results = [runner.execute_model(plan) for plan in LIFE]
    outputs = [result.get_output() for result in results]
    assert [output.step for output in outputs] == [0, 1, 2, 3, 4, 5]
    assert [output.sampled_token_ids for output in outputs] == expected_outputs()
    assert runner.states.token_ids[0, :8].tolist() == FIRST + expected(FIRST, 5)
    assert runner.blocks.tensor[0, :3].tolist() == [0, 1, 7]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (1, 3), (2, 2)])
def test_a_pipeline_yields_the_same_tokens(tensor, pipeline):
    """A pipeline computes the same tokens: every stage runs through all plans at its own speed, and
    one worker returns the results."""
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    store, results, errors = dist.HashStore(), {}, []

    def work(rank: int) -> None:
        try:
            mesh = Mesh.build(parallel, rank, store, 0, "cpu", timeout_s=HANG_S)
            runner = make_runner(mesh)
            outputs = [runner.execute_model(plan) for plan in LIFE]
            results[rank] = (runner.is_output_rank, outputs)
            done.wait(HANG_S)
            mesh.close()
        except BaseException as error:
            errors.append(error)
            done.abort()

    done = threading.Barrier(parallel.world)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(parallel.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    output_ranks = [rank for rank, (returns_outputs, _) in results.items() if returns_outputs]
    assert output_ranks == [tensor * (pipeline - 1)]
    for rank, (returns_outputs, outputs) in results.items():
        if not returns_outputs:
            assert outputs == [None] * len(LIFE), rank
    outputs = results[output_ranks[0]][1]
    assert [output.get_output().sampled_token_ids for output in outputs] == expected_outputs()


class ScriptedGroup:
    """A pipeline group of two, whose last stage has sent 100, 101, ..."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.received = 0

    def recv(self, tensor, src):
        assert src == 1
        tensor.fill_(100 + self.received)
        self.received += 1
        return tensor


def sampled(pairs: list[tuple[int, int]]):
    """The fields of a batch that the feedback reads: (slot, position) of each sampled token."""
    slots, positions = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return SimpleNamespace(
        num_samples=len(pairs),
        sample_slots=torch.tensor(slots),
        sample_positions=torch.tensor(positions),
        sample_slots_np=slots,
        sample_positions_np=positions,
    )


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (SchedulerOutput(9), 0),
        # Slot 0's position 5 arrived with the first message, 6 with the third.
        (SchedulerOutput(9, slots=[0], starts=[5], num_tokens=[1]), 1),
        (SchedulerOutput(9, slots=[0], starts=[6], num_tokens=[1]), 3),
        (SchedulerOutput(9, slots=[0], starts=[0], num_tokens=[5]), 0),
        (SchedulerOutput(9, slots=[0], starts=[0], num_tokens=[6]), 1),
        (SchedulerOutput(9, slots=[2, 1], starts=[8, 3], num_tokens=[1, 1]), 2),
        # A new row must not be overwritten with a token that was sampled for its predecessor.
        (SchedulerOutput(9, new_requests=[greedy_row(1, [1])]), 2),
        (SchedulerOutput(9, new_requests=[greedy_row(4, [1])]), 0),
    ],
)
def test_the_first_stage_receives_what_it_needs_and_no_more(plan, wanted):
    group, states = ScriptedGroup(), RequestStates(ROWS, LENGTH, CPU)
    feedback = FirstStageFeedback(group, states)
    for pairs in ([(0, 5)], [(1, 3)], [], [(0, 6)]):
        feedback.after_forward(sampled(pairs))
    feedback.before_step(plan)
    assert group.received == wanted
    written = [states.token_ids[0, 5], states.token_ids[1, 3], states.token_ids[0, 6]]
    assert [int(t) for t in written] == [100 + i if i < wanted else 0 for i in range(3)]
    feedback.drain()
    assert group.received == 3


def test_a_late_message_is_written_where_its_own_step_sampled():
    """A late message is written where its own step sampled, although the next batch uses the same
    buffers."""
    group, states = ScriptedGroup(), RequestStates(ROWS, LENGTH, CPU)
    builder = BatchBuilder(states, BlockTables(ROWS, LENGTH, BLOCK, CPU), 256)
    feedback = FirstStageFeedback(group, states)
    for slot, start in ((0, 4), (1, 7)):
        plan = SchedulerOutput(1, slots=[slot], starts=[start], num_tokens=[1], samples=[True])
        feedback.after_forward(builder.build(plan))
    feedback.drain()
    assert int(states.token_ids[0, 5]) == 100 and int(states.token_ids[1, 8]) == 101


def test_unneeded_messages_do_not_accumulate():
    group = ScriptedGroup()
    feedback = FirstStageFeedback(group, RequestStates(ROWS, LENGTH, CPU))
    for step in range(MAX_OUTSTANDING + 10):
        feedback.before_step(SchedulerOutput(step))
        feedback.after_forward(sampled([(5, 1)]))
    assert group.received == 9  # the last token was added after the last step


def test_a_worker_with_a_part_of_a_gpu_uses_only_this_part(monkeypatch):
    """The free memory of a shared GPU may be that of an engine that is about to load."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    gpu = torch.device("cuda", 0)
    assert kv_cache.free_bytes(gpu, 1) == 70
    assert kv_cache.free_bytes(gpu, 1, 0.5) == 30
    assert kv_cache.free_bytes(gpu, 1, 0.95) == 70
    assert kv_cache.free_bytes(gpu, 1, 0.1) == 0


def test_block_bytes_and_counts():
    layers = [Attention(8, 2, 64, 0.125), Attention(8, 4, 32, 0.125)]
    size = kv_cache.bytes_per_block(layers, 16, torch.bfloat16)
    assert size == 2 * 16 * (2 * 64 + 4 * 32) * 2
    share = CacheConfig()
    assert kv_cache.count_blocks(share, size, 10 * size, None, 0.5) == 5
    assert kv_cache.count_blocks(share, size, 10 * size, 3, 0.5) == 3
    fixed = CacheConfig(memory_bytes=7 * size + 1)
    assert kv_cache.count_blocks(fixed, size, 10**12, 100, 0.5) == 7
    with pytest.raises(ValueError, match=rf"needs {size} bytes.*memory_bytes=9 .*block_tokens"):
        kv_cache.count_blocks(CacheConfig(memory_bytes=9), size, 10**12, None, 0.5)
    with pytest.raises(ValueError, match=r"memory_fraction=0.5 of 100 free bytes allows 50"):
        kv_cache.count_blocks(share, size, 100, None, 0.5)


def test_caches_are_bound_and_not_part_of_the_model():
    layer = Attention(4, 2, 8, 1.0)
    kv_cache.allocate([layer], 5, BLOCK, torch.bfloat16, CPU)
    assert layer.k_cache.shape == layer.v_cache.shape == (5, 2, BLOCK, 8)
    assert layer.k_cache.dtype == torch.bfloat16
    assert not layer.k_cache.any()
    assert not layer.state_dict()
    layer.unbind_cache()
    assert layer.k_cache.numel() == 0
