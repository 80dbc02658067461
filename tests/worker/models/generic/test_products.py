"""Products of generic models, which are computed with packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.kernels.linear import PackedTensor, pack
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.packed_weight import (
    PackedWeight,
    Packing,
    pack_weights,
    refuse_unquantizable,
)
from swell.worker.loader import load_weights
from swell.worker.models import build_model
from swell.worker.models.generic.products import packing_unless_read, use_kernels
from tests.worker import tiny_models
from tests.worker.models.test_models import BLOCK_TOKENS, MAX_TOKENS, Part, batch_of

pytestmark = pytest.mark.slow
packs = pytest.mark.skipif(
    not isinstance(pack(torch.zeros(1, 1)), PackedTensor), reason="no compiler: nothing is packed"
)


class Scaled(nn.Embedding):
    """An embedding as that of Gemma 3."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(3).to(self.weight.dtype)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Scaled(40, 8)
        self.alone, self.read, self.shares = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.shares.weight = self.read.weight
        self.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.shares(self.read(self.alone(self.embed(ids))))
        return self.head(x @ self.read.weight)


@packs
def test_weights_that_only_their_products_read_are_packed() -> None:
    """The weight of an embedding and of a head is packed once; hooks and own forwards stay."""
    torch.manual_seed(0)
    model, ids = Body(), torch.tensor([[3, 39, 0]])
    calls: list[nn.Module] = []
    model.embed.register_forward_hook(lambda module, *_: calls.append(module))
    expected = model(ids)
    use_kernels(model)
    with packing_unless_read(model.modules()):
        assert torch.equal(model(ids), expected)
    pack_weights(model)
    packed = {
        name
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight) and isinstance(module.weight, PackedTensor)
    }
    assert packed == {"embed", "alone", "head"}
    assert model.head.weight is model.embed.weight
    assert isinstance(model.read.weight, Tensor) and model.read.weight is model.shares.weight
    torch.testing.assert_close(model(ids), expected)
    assert len(calls) == 3


@packs
def test_a_transposed_weight_is_packed() -> None:
    """The bits of a row do not depend on its batch."""
    torch.manual_seed(0)
    own = Conv1D(48, 32).requires_grad_(False)
    model = nn.Sequential(own)
    x = torch.randn(9, 32)
    use_kernels(model)
    (shard, _) = model[0].weight_shards("0")
    assert shard.shape == own.weight.shape and torch.equal(shard.target, own.weight)
    pack_weights(model)
    torch.testing.assert_close(model(x), own(x))
    assert torch.equal(model(x)[4:5], model(x[4:5]))


class ReadsAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alone, self.read = nn.Linear(32, 48), nn.Linear(48, 32)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.alone(x), self.read.weight)


def test_only_weights_that_are_quantized_need_whole_groups() -> None:
    """A weight of 48 inputs that the model reads stays plain."""
    model = ReadsAWeight()
    use_kernels(model)
    with pytest.raises(ValueError, match="the matrix of read has 48 inputs"):
        refuse_unquantizable(model, Packing(bits=8))
    with packing_unless_read(model.modules()):
        model(torch.zeros(1, 32))
    refuse_unquantizable(model, Packing(bits=8))


def loaded(folder: Path, family: str, backend: str, dtype: torch.dtype) -> Any:
    tiny_models.make(folder, family)
    config = ModelConfig(path=str(folder), backend=backend, max_model_len=MAX_TOKENS)
    mesh = Mesh.build(ParallelConfig(), 0)
    model = build_model(config, load_config(config), mesh, "cpu", dtype)
    load_weights(model, config)
    pack_weights(model)
    return model


@packs
@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama-tied", "native"), ("llama-tied", "transformers"), ("gemma3", "transformers")],
)
def test_a_tied_head_is_packed_once(tmp_path: Path, family: str, backend: str) -> None:
    model = loaded(tmp_path, family, backend, torch.float32)
    if backend == "native":
        embedding, head = model.embed, model.head
    else:
        embedding, head = model.base.get_input_embeddings(), model.head.get_output_embeddings()
    assert isinstance(head.weight, PackedTensor) and head.weight is embedding.weight


@pytest.fixture(params=["llama", "gemma3", "gemma2", "phi3", "gpt_neox"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = loaded(tmp_path, request.param, "transformers", torch.bfloat16)
    for layer in made.attention_layers():
        shape = (2 * MAX_TOKENS // BLOCK_TOKENS, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
        layer.bind_cache(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
    return made


@packs
@torch.no_grad()
def test_a_row_has_the_same_bits_next_to_others(model: Any) -> None:
    """All products of a model are packed, with its head, and so they are exact."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) > 8
    assert all(isinstance(module.weight, PackedTensor) for module in linears)
    prompts = [[5, 9, 77, 30, 8], [4, 60, 11]]

    def logits(parts: list[Part]) -> Tensor:
        found: Tensor = model.compute_logits(model(batch_of(prompts, parts)))
        return found

    both = logits([Part(0, 0, 5), Part(1, 0, 3)])
    assert torch.equal(logits([Part(0, 0, 5)]), both[:5])
    assert torch.equal(logits([Part(1, 0, 3)]), both[5:])
