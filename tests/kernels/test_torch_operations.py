"""A recording of the CPU backend repeats torch's own operations, for any number of rows, and
refuses those whose rows depend on one another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swell.kernels.cpu.capture import torch_operations
from swell.kernels.graph import (
    NotCapturableError,
    Probe,
    capture,
    compared_with_torch,
    rounding_like_replays,
)
from swell.kernels.linear import embedding
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

ROWS, SAMPLES = 13, 5
WIDTH = 24
WEIGHT = torch.linspace(-1, 1, WIDTH)
MATRIX = torch.linspace(-1, 1, 7 * WIDTH).sin().view(7, WIDTH)
NARROW = MATRIX[:, :13].contiguous()


@pytest.fixture(autouse=True)
def compiled() -> None:
    load_backend("cpu", "graph")
    torch.manual_seed(0)


Work = Callable[..., Tensor]


def _by_heads(x: Tensor) -> Tensor:
    return x.view(len(x), 3, 8).transpose(0, 1)


def _normed(x: Tensor) -> Tensor:
    weight = WEIGHT.to(x.dtype)
    return functional.layer_norm(x, (WIDTH,), weight, weight)


def _largest(x: Tensor, k: int) -> Tensor:
    """Returns the places of the largest elements; of equal ones the last."""
    return (x.float() + 1e-3 * WEIGHT).topk(k).indices


ELEMENTWISE: dict[str, Work] = {
    "add": lambda x, y: x + y,
    "add scaled": lambda x, y: torch.add(x, y, alpha=0.5),
    "add a number": lambda x, y: 1.5 + x,
    "sub": lambda x, y: x - y,
    "number - x": lambda x, y: 1 - x,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y.abs() + 1),
    "div, rounded down": lambda x, y: torch.div(x, 0.25, rounding_mode="floor"),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "square": lambda x, y: x.square() + y.pow(2),
    "pow": lambda x, y: x.abs().pow(1.5),
    "2 ** x": lambda x, y: 2.0**x,
    "comparisons": lambda x, y: ((x < y) | (x >= 1) & (y != 0) & ~(y > x)).to(x.dtype),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0) + y.clamp(max=0.25),
    "neg, abs": lambda x, y: -x + y.abs(),
    "sqrt": lambda x, y: x.abs().sqrt() + (y * y + 1).rsqrt() + (x * x + 1).reciprocal(),
    "exp": lambda x, y: x.exp() + y.expm1(),
    "log": lambda x, y: (x.abs() + 1).log() + y.abs().log1p(),
    "sin, cos": lambda x, y: (100 * x).sin() + (100 * y).cos(),
    "tanh": lambda x, y: x.tanh() + y.sigmoid() + x.erf(),
    "silu": lambda x, y: functional.silu(30 * x) + functional.silu(y),
    "relu": lambda x, y: functional.relu(x),
    "softplus": lambda x, y: functional.softplus(20 * x) + functional.softplus(y, 2.0, 1.0),
    "gelu": lambda x, y: functional.gelu(x) + functional.gelu(5 * y),
    "gelu_tanh": lambda x, y: functional.gelu(x, approximate="tanh"),
    "to float32 and back": lambda x, y: (x.float() * y.float()).to(x.dtype),
    "a constant": lambda x, y: x * (1 + torch.full((WIDTH,), 0.5, dtype=x.dtype)),
    "in place": lambda x, y: (x + y).mul_(x).add_(y).neg_(),
    "in a part": lambda x, y: torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * y,
    "stacked": lambda x, y: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2),
    "repeated": lambda x, y: x[..., :12].repeat_interleave(2, dim=-1),
    "by heads": lambda x, y: (_by_heads(x) * _by_heads(y)).transpose(0, 1).reshape(x.shape),
    "filled": lambda x, y: torch.zeros_like(x) + torch.ones(len(x), WIDTH, dtype=x.dtype) * y,
}  # fmt: skip
BY_ROW: dict[str, Work] = {
    "sum": lambda x, y: x.sum(-1, keepdim=True) * y,
    "mean": lambda x, y: x - x.mean(dim=-1)[:, None],
    "amax": lambda x, y: x / x.abs().amax(-1, keepdim=True),
    "softmax": lambda x, y: x.softmax(-1) + torch.softmax(y, -1, dtype=torch.float32).to(x.dtype),
    "by heads": lambda x, y: x.view(len(x), 3, 8).softmax(1).reshape(x.shape),
    "layer norm": lambda x, y: y + _normed(x),
    "topk": lambda x, y: x.topk(5).values.sum(-1, keepdim=True) * y,
    "topk, not sorted": lambda x, y: x.topk(7, dim=1, sorted=False)[0].amax(1, keepdim=True) + y,
    "topk by heads": lambda x, y: x.view(len(x), 3, 8).topk(2, dim=-1)[0].sum(-1),
    "all elements": lambda x, y: x.topk(WIDTH)[0],
    "indices": lambda x, y: x + _largest(x, 3).to(x.dtype).sum(-1, keepdim=True),
    "gather": lambda x, y: y.gather(1, _largest(x, 4)),
    "scatter_": lambda x, y: torch.zeros_like(x).scatter_(1, _largest(y, 9), 1) * x,
    "product": lambda x, y: functional.linear(x, MATRIX.to(x.dtype)),
    "product of a part": lambda x, y: functional.linear(x[:, 5:18], NARROW.to(x.dtype)),
}


def replayed(work: Work, x: Tensor, y: Tensor) -> None:
    """Compares replays of `work` with torch, for several numbers of rows, which are rows of x and y
    in any order. Without a replay, the same rows have the same bits, and each operation has the
    result of torch's."""
    ids = torch.arange(ROWS)

    def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
        return embedding(ids[:rows], x), embedding(ids[:rows], y)

    with torch.inference_mode():
        (result,), graph = capture(lambda: [work(*inputs())], "cpu", ROWS, SAMPLES)
        for rows in (ROWS, 1, 7):
            ids.copy_(torch.randperm(ROWS))
            wanted = work(*inputs())
            result.zero_()
            graph.replay(rows, 1)
            # One rounding to bfloat16 is 2^-8; approximations differ by a few roundings of float32.
            tolerance = 2e-2 if x.dtype == torch.bfloat16 else 3e-6
            torch.testing.assert_close(result[:rows], wanted[:rows], rtol=tolerance, atol=tolerance)
            assert not result[rows:].count_nonzero()
            with rounding_like_replays("cpu"):
                again = work(*inputs(rows))
            assert torch.equal(again, result[:rows])
            with compared_with_torch("cpu") as operations:
                work(*inputs(rows))
            assert operations.difference is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("work", ELEMENTWISE.values(), ids=ELEMENTWISE.keys())
def test_operations_on_elements_are_repeated(work: Work, dtype: torch.dtype) -> None:
    replayed(work, *torch.randn(2, ROWS, WIDTH).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("work", BY_ROW.values(), ids=BY_ROW.keys())
def test_reductions_of_a_row_are_repeated(work: Work, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, ROWS, WIDTH).to(dtype)
    replayed(work, x, y)


@pytest.mark.parametrize("width", [1, 7, 255, 256, 257, 1000])
def test_rows_of_any_width_are_computed(width: int) -> None:
    x, y = torch.randn(2, ROWS, width)
    replayed(lambda x, y: functional.silu(x) * y + x.amax(-1, keepdim=True), x, y)


def test_rotation_has_the_bits_of_torch() -> None:
    """Products and sums are rounded one by one, as by torch."""
    table, angles, ids = torch.randn(ROWS, 24), torch.randn(ROWS, 8), torch.arange(ROWS)

    def work() -> list[Tensor]:
        x = embedding(ids, table).view(1, ROWS, 3, 8).transpose(1, 2)
        turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        return [((x * angles) + (turned * angles))[0].transpose(0, 1)]

    with torch.inference_mode():
        (result,), graph = capture(work, "cpu", ROWS, SAMPLES)
        graph.replay(4, 1)
        assert torch.equal(result[:4], work()[0][:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("work", "wrong"),
    [
        ("silu", {"silu": lambda a: ("sigmoid", a)}),
        ("add scaled", {"add": lambda a, b, alpha=1: ("add", a, b)}),
        ("where", {"where": lambda mask, a, b: ("where", mask, b, a)}),
        ("in place", {"neg": lambda a: ("abs", a)}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_another_operation_than_torch_s_is_found(monkeypatch, work, wrong, dtype) -> None:
    x, y = torch.randn(2, ROWS, WIDTH).to(dtype)
    for name, arrange in wrong.items():
        monkeypatch.setitem(torch_operations.POINTWISE, name, arrange)
    with torch.inference_mode(), compared_with_torch("cpu") as operations:
        ELEMENTWISE[work](x, y)
    assert (operations.difference or "").removesuffix("_") == f"torch's {name}"


def test_a_choice_of_another_element_is_found(monkeypatch) -> None:
    """The values of all elements are nearly equal."""
    topk = torch_operations.CHOICES["topk"]

    def second_best(step, func, x, k, *args):
        values, indices = topk(step, func, x, k + 1, *args)
        return values[..., 1:], indices[..., 1:]

    monkeypatch.setitem(torch_operations.CHOICES, "topk", second_best)
    x = 1 + 1e-6 * torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), compared_with_torch("cpu") as operations:
        x.topk(3)
    assert operations.difference == "torch's topk"


def test_any_of_equal_elements_may_be_chosen() -> None:
    with torch.inference_mode(), compared_with_torch("cpu") as operations:
        torch.ones(ROWS, WIDTH).topk(3)
    assert operations.difference is None


def test_integers_are_exact() -> None:
    positions = torch.tensor([2**40 + 1, 7, 0, -3, *range(ROWS - 4)])
    with torch.inference_mode():
        (result,), graph = capture(lambda: [positions + 2], "cpu", ROWS, SAMPLES)
        graph.replay(5, 0)
    assert result[:5].tolist() == [2**40 + 3, 9, 2, -1, 2]


def test_lookups_select_rows() -> None:
    table, ids = torch.randn(40, WIDTH), torch.arange(ROWS)
    which = torch.tensor([3, 0, 2, 1, 0])

    def work() -> list[Tensor]:
        return [table[ids] + 1, functional.embedding(ids[None], table)[0].index_select(0, which)]

    with torch.inference_mode():
        results, graph = capture(work, "cpu", ROWS, SAMPLES)
        graph.replay(4, 2)
    assert torch.equal(results[0][:4], table[:4] + 1)
    assert torch.equal(results[1][:2], table[[3, 0]])


def test_a_constant_of_the_size_of_the_rows_is_computed_as_a_whole() -> None:
    """A parameter may have as many elements as a step has samples."""
    weight, x, ids = torch.randn(SAMPLES), torch.randn(ROWS, SAMPLES), torch.arange(ROWS)
    with torch.inference_mode():
        (result,), graph = capture(lambda: [embedding(ids, x) * (1 + weight)], "cpu", ROWS, SAMPLES)
        graph.replay(3, 1)
        assert torch.equal(result[:3], x[:3] * (1 + weight))
        weight.add_(1)
        graph.replay(3, 1)
        assert torch.equal(result[:3], x[:3] * (1 + weight))


REFUSED: dict[str, Work] = {
    "a sum of rows": lambda x, w: x.sum(0, keepdim=True),
    "all elements": lambda x, w: x.sum(),
    "one row for all": lambda x, w: x + x[:1],
    "the row before": lambda x, w: x[1:] * x[:-1],
    "rows in a column": lambda x, w: torch.softmax(x + 1, 0),
    "rows merged with columns": lambda x, w: x.view(-1) + 1,
    "two dimensions of rows": lambda x, w: x[:, :1] * x[:, 0],
    "a value": lambda x, w: x * float(x[0, 0]),
    "a choice": lambda x, w: x if (x > 0).all() else -x,
    "a changed parameter": lambda x, w: w.add_(1) + x,
    "an unknown operation": lambda x, w: torch.cumsum(x, -1),
    "a selection by a mask": lambda x, w: x[x > 0],
    "a list of values": lambda x, w: x * len(x.tolist()),
    "an array": lambda x, w: x + torch.from_numpy(x.numpy()),
    "the largest of all rows": lambda x, w: x.topk(3, dim=0)[0],
    "the smallest": lambda x, w: x.topk(3, largest=False)[0],
    "elements of other rows": lambda x, w: x.gather(0, torch.zeros(ROWS, WIDTH, dtype=torch.int64)),
    "a changed part of a parameter": lambda x, w: w.view(1, -1).scatter_(1, x.topk(1)[1], 1) + x,
    "a product of rows": lambda x, w: x.T @ x,
    "a product with other rows": lambda x, w: x @ x[:, :ROWS],
    "a norm of another type": lambda x, w: functional.layer_norm(x.double(), (WIDTH,), w.double()),
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED.keys())
def test_operations_that_a_replay_would_compute_wrongly_are_refused(work: Work) -> None:
    table, weight, ids = torch.randn(ROWS, WIDTH), torch.randn(WIDTH), torch.arange(ROWS)
    before = weight.clone()
    with torch.inference_mode(), pytest.raises(NotCapturableError):
        capture(lambda: [work(embedding(ids, table), weight)], "cpu", ROWS, SAMPLES)
    assert torch.equal(weight, before)


def test_a_gather_raises_an_error_for_an_index_beyond_the_vector() -> None:
    table, ids = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    chosen = torch.zeros(ROWS, 2, dtype=torch.int64)
    with torch.inference_mode():
        work = lambda: [embedding(ids, table).gather(1, chosen)]  # noqa: E731
        (result,), graph = capture(work, "cpu", ROWS, SAMPLES)
        graph.replay(4, 1)
        assert torch.equal(result[:4], table[:4, :1].expand(4, 2))
        chosen[2, 1] = WIDTH
        graph.replay(2, 1)
        with pytest.raises(IndexError, match=f"index {WIDTH} is out of bounds"):
            graph.replay(4, 1)


def shaped(work: Callable[[Tensor, int], Tensor], *sizes: int) -> Callable[[], list[Tensor]]:
    return lambda: [work(embedding(torch.arange(sizes[0]), torch.ones(64, WIDTH)), sizes[0])]


NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "divided by the rows": lambda x, rows: x / rows,
    "multiplied in place": lambda x, rows: (x + 1).mul_(len(x)),
    "a root of the rows": lambda x, rows: x * rows**-0.5,
    "the last index": lambda x, rows: x + torch.arange(WIDTH) * (rows - 1),
    "positions from the end": lambda x, rows: x * torch.arange(rows, 0, -1)[:, None],
    "a bound": lambda x, rows: x.clamp(max=rows),
    "a filled tensor": lambda x, rows: x + torch.full((WIDTH,), float(rows)),
    "the last row of a view": lambda x, rows: (x + 1)[rows - SAMPLES :],
    "an operation for many rows": lambda x, rows: x + 1 if rows < 10 else (x + 1) * 2,
    "another operation for many rows": lambda x, rows: x + 1 if rows < 10 else x * 2,
    "columns by rows": lambda x, rows: x[:, : rows // 2] + 1,
    "the first rows": lambda x, rows: (x + 1)[: rows - 1],
}
ROWS_ALONE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "positions": lambda x, rows: x * torch.arange(rows)[:, None],
    "a view of the rows": lambda x, rows: x.view(rows, 3, 8).transpose(0, 1).exp().transpose(0, 1),
    "zeros": lambda x, rows: x + torch.zeros(rows, WIDTH),
    "a constant": lambda x, rows: x * torch.full((WIDTH,), 0.5) + torch.arange(WIDTH),
    "heads before rows": lambda x, rows: torch.cat([*_by_heads(x).contiguous().unbind(0)], -1) * 2,
}


@pytest.mark.parametrize("work", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_of_rows_used_as_numbers_are_refused(work) -> None:
    probe = Probe(shaped(work, 7, 3), (7, 3))
    with torch.inference_mode(), pytest.raises(NotCapturableError):
        capture(shaped(work, ROWS, SAMPLES), "cpu", ROWS, SAMPLES, probe=probe)


@pytest.mark.parametrize("work", ROWS_ALONE.values(), ids=ROWS_ALONE.keys())
def test_functions_that_only_compute_as_many_rows_are_captured(work) -> None:
    probe = Probe(shaped(work, 7, 3), (7, 3))
    with torch.inference_mode():
        run = shaped(work, ROWS, SAMPLES)
        (result,), graph = capture(run, "cpu", ROWS, SAMPLES, probe=probe)
        graph.replay(4, 1)
        assert torch.equal(result[:4], run()[0][:4])
