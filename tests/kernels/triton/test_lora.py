"""Adapters of one layer, in two launches for all adapters of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from swell.kernels.host.host_reads import RefuseHostReads
from swell.kernels.lora import LoraTokens, LoraWeights
from swell.kernels.triton import lora
from tests.kernels.test_lora import OUTS, RANKS, SIZE, formula, layer_of, tokens_of, weights
from tests.kernels.triton.oracle import TOLERANCE, TYPES, close

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models: queries, keys and values, and the second product of
    a feed-forward block."""
    for size, outs in ((4096, [4096, 1024, 1024]), (14336, [4096])):
        layer = lora.make_layer(size, outs, 8, 16, dtype, CPU)
        tokens = LoraTokens(32, 8, CPU)
        yield layer.add(
            torch.empty(32, size, dtype=dtype), torch.empty(32, sum(outs), dtype=dtype), tokens
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "of_token",
    [[], [-1, -1], [2], [1], [-1, 3, 4, 0, 1, 5, 6, 2, 1], [0] * 16 + [4] * 17 + [1, -1, 0]],
    ids=["no token", "no adapter", "not loaded", "one", "many", "full blocks"],
)
def test_definition(of_token, dtype):
    """-1: no adapter; 2, 5 and 6 do not adapt the layer. Tokens without an adapter and the rest of
    the input may be anything."""
    adapters = {n: weights(ranks, OUTS, dtype, n) for n, ranks in RANKS.items()}
    layer = layer_of("triton", adapters, dtype)
    is_adapted = torch.tensor([n in adapters for n in of_token], dtype=torch.bool)
    wide = torch.randn(len(of_token), SIZE + 5).to(dtype)
    wide[:, SIZE:] = float("nan")
    wide[~is_adapted] = float("nan")
    x, y = wide[:, :SIZE], torch.randn(len(of_token), sum(OUTS)).to(dtype)
    wanted, before = y.double(), y.clone()
    for number, one in adapters.items():
        own = torch.tensor([other == number for other in of_token], dtype=torch.bool)
        wanted[own] = formula(x[own], y[own], one)
    tokens = tokens_of(of_token)
    with RefuseHostReads():
        layer.add(x, y, tokens)
    torch.testing.assert_close(y.double(), wanted, rtol=4 * TOLERANCE[dtype], atol=1e-2)
    if dtype == torch.float32:
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[~is_adapted], before[~is_adapted])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_in_any_batch(dtype):
    adapters = {n: weights(ranks, OUTS, dtype, n) for n, ranks in RANKS.items()}
    layer = layer_of("triton", adapters, dtype)
    of_token = [[0, 1, 3, 4][token % 4] for token in range(40)]
    x, y = torch.randn(40, SIZE).to(dtype), torch.randn(40, sum(OUTS)).to(dtype)
    together = y.clone()
    layer.add(x, together, tokens_of(of_token))
    for count in (1, 3, 17):
        some = y[:count].clone()
        layer.add(x[:count], some, tokens_of(of_token[:count]))
        assert torch.equal(some, together[:count])


def test_the_launches_do_not_depend_on_the_adapters(monkeypatch):
    """A captured step, which repeats them, has the same grids for any adapters."""
    grids: dict[int, set[object]] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            grids.setdefault(number, set()).add(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(lora, "_shrink", Kernel())
    monkeypatch.setattr(lora, "_expand", Kernel())
    x, y = torch.randn(40, SIZE), torch.randn(40, sum(OUTS))
    adapters = {n: weights(ranks, OUTS, torch.float32, n) for n, ranks in RANKS.items()}
    for number in range(len(adapters) + 1):
        held = dict(list(adapters.items())[:number])
        layer = layer_of("triton", held, torch.float32)
        layer.add(x, y, tokens_of([[*held, -1][token % (number + 1)] for token in range(40)]))
    assert len(set(map(frozenset, grids.values()))) == 1 and len(grids[0]) == 2


def test_a_captured_step_finds_adapters_that_are_loaded_later(monkeypatch):
    """A captured step repeats the launches, with the same tensors."""
    launched: list[Callable[[], None]] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **kwargs: launched.append(
                partial(self._kernel[grid], *args, **kwargs)
            )

    for name in ("_shrink", "_expand"):
        monkeypatch.setattr(lora, name, Recorded(getattr(lora, name)))
    some, others, wider = (
        weights(ranks, OUTS, torch.float32, seed)
        for seed, ranks in enumerate(([4] * 3, [4] * 3, [64] * 3))
    )
    layer = layer_of("triton", {0: some}, torch.float32)
    before, x = torch.randn(20, sum(OUTS)), torch.randn(20, SIZE)
    y = before.clone()
    layer.add(x, y, tokens_of([0] * 20))
    for loaded in (others, wider, None, some):
        layer.set(0, loaded)
        y.copy_(before)
        for launch in launched:
            launch()
        wanted = before.double() if loaded is None else formula(x, before, loaded)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def test_other_types_are_left_to_the_reference():
    adapters = {0: weights([4, 4, 4], OUTS, torch.float64, 0)}
    x, y = torch.randn(3, SIZE).double(), torch.zeros(3, sum(OUTS)).double()
    layer_of("triton", adapters, torch.float64).add(x, y, tokens_of([0, -1, 0]))
    close(
        y[[0, 2]].float(), formula(x[[0, 2]], torch.zeros(2, sum(OUTS)), adapters[0]), torch.float32
    )
    assert isinstance(adapters[0], LoraWeights) and not y[1].any()
