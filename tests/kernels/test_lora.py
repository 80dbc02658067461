"""Adapters of one layer: every backend against the formula, and each token by itself."""

from __future__ import annotations

import pytest
import torch

from swell.kernels.lora import LoraLayer, LoraTokens, LoraWeights
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

BACKENDS = ["reference", "cpu"]
SIZE = 75


def weights(ranks: list[int], outs: list[int], dtype: torch.dtype, seed: int) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(sum(ranks), SIZE, generator=generator) / SIZE**0.5
    ups = [
        torch.randn(out, rank, generator=generator).to(dtype) / rank if rank else None
        for out, rank in zip(outs, ranks, strict=True)
    ]
    return LoraWeights(down.to(dtype), ups)


def tokens_of(adapters: list[int]) -> LoraTokens:
    """`adapters`: the adapter of each token; negative: none."""
    found = LoraTokens(len(adapters), 7, torch.device("cpu"))
    found.set(
        {
            number: [token for token, other in enumerate(adapters) if other == number]
            for number in adapters
            if number >= 0
        }
    )
    return found


def formula(x: torch.Tensor, y: torch.Tensor, one: LoraWeights) -> torch.Tensor:
    added, rank = [], 0
    for up, out in zip(one.ups, OUTS, strict=True):
        if up is None:
            added.append(torch.zeros(len(x), out, dtype=torch.float64))
            continue
        down = one.down[rank : rank + up.shape[1]]
        added.append(x.double() @ down.double().T @ up.double().T)
        rank += up.shape[1]
    return y.double() + torch.cat(added, -1)


OUTS, MAX_RANK = [64, 33, 7], 64
RANKS = {0: [4, 4, 4], 1: [16, 0, 3], 3: [0, 0, 1], 4: [64, 64, 64]}


def layer_of(name: str, adapters: dict[int, LoraWeights], dtype: torch.dtype) -> LoraLayer:
    module, device = load_backend(name, "lora"), torch.device("cpu")
    layer: LoraLayer = module.make_layer(SIZE, OUTS, 7, MAX_RANK, dtype, device)
    for number, one in adapters.items():
        layer.set(number, weights([5, 5, 5], OUTS, dtype, 50))
        layer.set(number, one)
    layer.set(6, weights([1, 2, 3], OUTS, dtype, 51))
    layer.set(6, None)
    return layer


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_formula(name: str, dtype: torch.dtype) -> None:
    adapters = {n: weights(ranks, OUTS, dtype, n) for n, ranks in RANKS.items()}
    layer = layer_of(name, adapters, dtype)
    # -1: no adapter; 2, 5 and 6 do not adapt the layer
    of_token = [(11 * token) % 8 - 1 for token in range(90)]
    generator = torch.Generator().manual_seed(9)
    wide = torch.randn(90, SIZE + 5, generator=generator).to(dtype)
    x, y = wide[:, :SIZE], torch.randn(90, sum(OUTS), generator=generator).to(dtype)
    expected = y.double()
    for number, one in adapters.items():
        own = torch.tensor([other == number for other in of_token])
        expected[own] = formula(x[own], y[own], one)
    before = y.clone()
    layer.add(x, y, tokens_of(of_token))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    plain = torch.tensor([number in (-1, 2, 5, 6) for number in of_token])
    assert torch.equal(y[plain], before[plain])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    adapters = {n: weights(ranks, OUTS, dtype, n) for n, ranks in RANKS.items()}
    layer = layer_of("cpu", adapters, dtype)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(200, SIZE, generator=generator).to(dtype)
    y = torch.randn(200, sum(OUTS), generator=generator).to(dtype)
    of_token = [[0, 1, 3, 4][token % 4] for token in range(200)]
    together = y.clone()
    layer.add(x, together, tokens_of(of_token))
    for count in (1, 2, 5, 8, 9):
        some = y[:count].clone()
        layer.add(x[:count], some, tokens_of(of_token[:count]))
        assert torch.equal(some, together[:count]), count
