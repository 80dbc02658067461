"""Recorded operations compute on the current values of their inputs; operations that cannot be
replayed are refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swell.kernels.activation import silu_and_mul
from swell.kernels.cpu.capture.arena import ALIGNMENT, Lifetime, assign_offsets
from swell.kernels.graph import NotCapturableError, capture
from swell.kernels.linear import embedding, linear, pack
from swell.kernels.norm import add_rms_norm, rms_norm
from swell.kernels.rope import apply_rope
from swell.kernels.sample import greedy_sample
from tests.kernels.load import load_backend
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def compiled() -> None:
    load_backend("cpu", "graph")


pytestmark = pytest.mark.slow


ROWS = 5


def test_a_replay_computes_the_current_rows_with_new_inputs():
    torch.manual_seed(0)
    weights = [(pack(torch.randn(64, 24)), pack(torch.randn(24, 32))) for _ in range(4)]
    scale, x, cos, sin = torch.randn(24), torch.randn(ROWS, 24), *torch.randn(2, ROWS, 4)

    def model():
        residual, out = x, rms_norm(x, scale, 1e-5)
        for gate_up, down in weights:
            heads = linear(silu_and_mul(linear(out, gate_up)), down).unflatten(1, (3, 8))
            q, _ = apply_rope(heads[:, :2], heads[:, 2:], cos, sin)  # in place, on views
            assert q.data_ptr() == heads.data_ptr()
            out, residual = add_rms_norm(heads.flatten(1), residual, scale, 1e-5)
        return [out, residual[:, :7]]

    results, graph = capture(model, "cpu", ROWS)
    for rows in (ROWS, 1, 3, ROWS):
        x.copy_(torch.randn(ROWS, 24))
        for result in results:
            result.fill_(float("nan"))
        graph.replay(rows)
        for result, wanted in zip(results, model(), strict=True):
            assert torch.equal(result[:rows], wanted[:rows])
            assert result[rows:].isnan().all()


def test_operations_may_have_different_numbers_of_rows():
    """Operations may have different numbers of rows: some of five rows continue to the next
    operation."""
    torch.manual_seed(0)
    table, weight, scale = torch.randn(40, 8), pack(torch.randn(24, 8)), torch.randn(8)
    ids, wanted = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

    def model():
        x = rms_norm(embedding(ids, table), scale, 1e-5)
        return [x, linear(embedding(wanted, x), weight)]

    results, graph = capture(model, "cpu", ROWS, 3)
    calls = 0
    for rows, some in [(5, 3), (4, 1), (2, 0), (1, 1)]:
        ids[:rows] = torch.randint(40, (rows,))
        wanted[:some] = torch.randperm(rows)[:some]
        for result in results:
            result.fill_(float("nan"))
        graph.replay(rows, some)
        calls += 6  # each lookup checks its ids first
        assert graph.progress == calls
        for result, computed, full in zip(results, model(), (rows, some), strict=True):
            assert torch.equal(result[:full], computed[:full])
            assert result[full:].isnan().all()


def test_capturing_computes_nothing():
    q, k, cos, sin = torch.ones(3, 2, 8), torch.ones(3, 2, 8), *torch.zeros(2, 3, 4)
    _, graph = capture(lambda: list(apply_rope(q, k, cos, sin)), "cpu", 3)
    assert (q == 1).all()
    graph.replay(2)
    assert (q[:2] == 0).all() and (q[2] == 1).all()


def test_tensors_of_a_graph_survive_the_function():
    x, weights = torch.ones(2, 8), [torch.full((8,), 3.0), torch.ones(8)]
    (out,), graph = capture(
        lambda: [rms_norm(rms_norm(x, weights.pop(0), 0), weights.pop(0), 0)], "cpu", 2
    )
    rubbish = [torch.full((8,), float("nan")) for _ in range(100)]
    x.fill_(2.0)
    graph.replay(2)
    assert torch.equal(out, torch.ones(2, 8)) and rubbish


@pytest.mark.parametrize(
    "work",
    [lambda x: x.cumsum(1), lambda x: rms_norm(x, x[0], 1e-5).sort().values],
    ids=["first", "later"],
)
def test_operations_that_a_replay_would_omit_are_refused(work):
    x = torch.ones(4, 8)
    with pytest.raises(NotCapturableError, match="not an operation"):
        capture(lambda: [work(x)], "cpu", 4)
    capture(lambda: [rms_norm(x, x[0], 1e-5)], "cpu", 4)  # nothing of the failure remains


def test_other_numbers_of_rows_are_refused():
    x = torch.ones(4, 8)
    with pytest.raises(NotCapturableError, match="rms_norm computes 3 rows; expected 4 or 6"):
        capture(lambda: [rms_norm(x[:3], x[0], 1e-5)], "cpu", 4, 6)


lifetimes = st.builds(
    lambda first, length, size: Lifetime(first, first + length, size),
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(0, 300),
)


@given(st.lists(lifetimes, max_size=30))
def test_buffers_in_use_at_the_same_time_do_not_overlap(buffers):
    offsets, total = assign_offsets(buffers)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    taken: dict[tuple[int, int], int] = {}
    for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        assert offset + buffer.size <= total
        for step in range(buffer.first, buffer.last + 1):
            for byte in range(offset, offset + buffer.size):
                assert taken.setdefault((step, byte), i) == i


@given(st.integers(2, 40), st.integers(1, 300))
def test_a_chain_uses_only_the_memory_of_its_widest_step(length, size):
    # each buffer is the input of the next step
    buffers = [Lifetime(i, i + 1, size) for i in range(length)]
    assert assign_offsets(buffers)[1] <= 2 * (size + ALIGNMENT)


def test_functions_that_cannot_be_recorded_refuse_a_recording():
    """During a recording such a function would run once, on tensors that nothing has computed."""
    from swell.kernels.bitmask import apply_bitmask
    from swell.kernels.logprobs import rank_tokens
    from swell.kernels.sample import uniform_noise

    logits, ids = torch.zeros(ROWS, 32), torch.zeros(ROWS, dtype=torch.int64)
    mask = torch.zeros(ROWS, 1, dtype=torch.int32)
    for refused in (
        lambda: [apply_bitmask(logits, mask, ids, -1.0)],
        lambda: list(rank_tokens(logits, ids, 2)[:3]),
        lambda: [uniform_noise(ids, ids)],
    ):
        with pytest.raises(NotCapturableError, match="cannot be recorded"):
            capture(refused, "cpu", ROWS)


def test_largest_logits_are_recorded():
    table, ids = torch.randn(40, 24), torch.zeros(ROWS, dtype=torch.int64)
    results, graph = capture(lambda: list(greedy_sample(embedding(ids, table))), "cpu", ROWS)
    ids.copy_(torch.randperm(40)[:ROWS])
    graph.replay(3)
    for result, expected in zip(results, greedy_sample(table[ids[:3]]), strict=True):
        assert torch.equal(result[:3], expected)


def test_only_recorded_functions_call_the_library():
    """Any other call would be computed once, during a capture, and never again."""
    folder = ROOT / "kernels" / "cpu"
    files = folder.rglob("*.py")
    callers = [path.name for path in files if re.search(r"\blibrary\(", path.read_text())]
    assert sorted(callers) == ["build.py", "recording.py"]
