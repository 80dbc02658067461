"""Experts of transformers models, whose matrices are loaded one by one and packed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from swell.kernels.linear import PackedTensor, pack
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.models.generic.experts import Experts, use_expert_kernels
from tests.worker.models.generic.test_products import loaded

pytestmark = pytest.mark.slow
packs = pytest.mark.skipif(
    not isinstance(pack(torch.zeros(1, 1)), PackedTensor), reason="no compiler: nothing is packed"
)

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, TOP_K, SIZE = 4, 2, 16
AT_LEAST = 50
"""How many of transformers' classes have the formula of `kernels/moe.py`."""


class SmallConfig:
    """Any key of a config that a class of experts reads."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name:
            return "silu"
        if "expert" in name and "size" not in name:
            return EXPERTS
        if "limit" in name or "alpha" in name:
            return 0.5
        return SIZE


def decorated_classes() -> list[type[nn.Module]]:
    """Returns transformers' classes of experts whose function can be replaced."""
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if line.startswith("@use_experts_implementation"):
                name = next(each for each in lines[i:] if each.startswith("class "))
                name = name.removeprefix("class ").partition("(")[0]
                module = importlib.import_module(
                    f"transformers.models.{path.parent.name}.{path.stem}"
                )
                found.append(getattr(module, name))
    return found


def routes(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    weights, choices = torch.randn(7, EXPERTS).softmax(-1).topk(TOP_K)
    return torch.randn(7, SIZE).to(dtype), choices, weights.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_experts_that_are_replaced_compute_the_same(dtype: torch.dtype) -> None:
    """Every class of transformers either computes what our kernels compute, or is not replaced."""
    replaced = []
    for cls in decorated_classes():
        module = cls(SmallConfig()).to(dtype).requires_grad_(False)
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
        given = routes(dtype)
        before = dict(module.named_parameters())
        expected = module(*given)
        parent = nn.Sequential(module)
        use_expert_kernels(parent)
        module = parent[0]
        if not isinstance(module, Experts):
            assert torch.equal(module(*given), expected), cls
            continue
        replaced.append(cls.__name__)
        for shard in module.weight_shards("experts"):
            shard.target.copy_(before[shard.name.removeprefix("experts.")][shard.index])
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        close = {"rtol": tolerance, "atol": tolerance, "msg": lambda m, n=cls.__name__: f"{n}: {m}"}
        torch.testing.assert_close(module(*given), expected, **close)
        pack_weights(module)
        torch.testing.assert_close(module(*given), expected, **close)
    assert len(replaced) >= AT_LEAST, replaced


@packs
def test_each_matrix_of_a_loaded_model_is_packed(tmp_path: Path) -> None:
    model = loaded(tmp_path, "mixtral", "transformers", torch.float32)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(layers) == 4
    for layer in layers:
        matrices = [*layer.gate_up, *layer.down]
        assert len(matrices) == 8
        assert all(isinstance(matrix.weight, PackedTensor) for matrix in matrices)
        assert not layer._parameters
