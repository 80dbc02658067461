"""Recorded operations compute on the inputs' present values; what cannot be repeated is refused."""

from __future__ import annotations

import pytest
import torch

from swell.kernels.activation import silu_and_mul
from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.kernels.linear import linear, pack
from swell.kernels.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(not can_capture("cpu"), reason="the compiled column is missing")


def test_a_replay_computes_with_new_inputs():
    torch.manual_seed(0)
    gate_up, down = pack(torch.randn(64, 24)), pack(torch.randn(24, 32))
    weight, x = torch.randn(24), torch.randn(3, 24)

    def block(x):
        normed = rms_norm(x, weight, 1e-5)
        out = linear(silu_and_mul(linear(normed, gate_up)), down)
        return add_rms_norm(out[:, :24], x, weight, 1e-5)[0]

    out, graph = capture(lambda: block(x), "cpu")
    assert torch.equal(out, block(x))
    for _ in range(2):
        x.copy_(torch.randn(3, 24))
        graph.replay()
        assert torch.equal(out, block(x))


def test_tensors_of_a_graph_outlive_the_function():
    x, weights = torch.ones(2, 8), [torch.full((8,), 3.0), torch.ones(8)]
    out, graph = capture(lambda: rms_norm(rms_norm(x, weights.pop(0), 0), weights.pop(0), 0), "cpu")
    rubbish = [torch.full((8,), float("nan")) for _ in range(100)]
    x.fill_(2.0)
    graph.replay()
    assert torch.equal(out, torch.ones(2, 8)) and rubbish


@pytest.mark.parametrize(
    "work",
    [lambda x: x + 1, lambda x: rms_norm(x, x[0], 1e-5).clone(), lambda x: x.t().contiguous()],
    ids=["sum", "copy", "contiguous"],
)
def test_what_a_replay_would_leave_out_is_refused(work):
    x = torch.ones(4, 8)
    with pytest.raises(NotCapturableError, match="no operation"):
        capture(lambda: work(x), "cpu")
    capture(lambda: rms_norm(x, x[0], 1e-5), "cpu")  # nothing is left of the failure
