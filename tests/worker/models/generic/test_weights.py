"""The stored forms of parameters, with transformers' own conversion as the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from swell.worker.layers.weight_shard import WeightShard, replicated_shard
from swell.worker.models.generic.build import drop_towers, on_meta
from swell.worker.models.generic.weights import WeightsMapper
from tests.zoo import configs, tiny_checkpoint

KINDS = ["ernie4_5_vl_moe", "minimax_m3_vl", "molmo2", "sarvam_moe", "step3p7"]
"""Model types whose checkpoints hold parameters in parts, or several in one tensor."""


def filled(kind: str, stored: dict[str, Tensor], shards: Iterable[WeightShard]) -> int:
    """Reads the shards, with their names in the model, from a checkpoint of published names.
    Returns how many parts it has read."""
    mapper, parts = WeightsMapper(on_meta(configs.shrunk(kind))[0]), 0
    for shard in mapper.in_checkpoint(shards, stored):
        tensor = stored[shard.name]
        part = shard.as_stored(tuple(tensor.shape))
        assert tensor.shape == part.shape
        part.target.copy_(tensor[part.index])
        parts += 1
    return parts


def parameters_of(kind: str) -> dict[str, Tensor]:
    """Returns the shapes of the parameters of the text model and the head, on the meta device."""
    causal, base = on_meta(configs.shrunk(kind))
    drop_towers(causal, base)
    return dict(causal.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_that_transformers_converts(kind: str) -> None:
    model = tiny_checkpoint.build(configs.shrunk(kind), 0)
    state, found = model.state_dict(), {}
    stored = revert_weight_conversion(model, dict(state))
    for name, parameter in parameters_of(kind).items():
        found[name] = torch.full(parameter.shape, torch.nan)
    assert set(found) - set(stored), "nothing is converted"
    assert filled(kind, stored, (replicated_shard(*each) for each in found.items())) > len(found)
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name


def test_a_rank_reads_its_rows_of_a_stored_tensor_of_several_parameters() -> None:
    model = tiny_checkpoint.build(configs.shrunk("sarvam_moe"), 0)
    state = model.state_dict()
    stored = revert_weight_conversion(model, dict(state))
    for layer in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{layer}.weight"
        rows = len(state[name])
        whole = replicated_shard(name, torch.full(state[name].shape, torch.nan))
        lower = replace(whole, target=whole.target[rows // 2 :])
        lower = replace(lower, index=(slice(rows // 2, rows), slice(None)))
        assert filled("sarvam_moe", stored, [lower]) == 1
        assert torch.equal(lower.target, state[name][rows // 2 :])


def test_tokens_beyond_the_vocabulary_have_a_table_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(configs.CHANGES, "molmo2", {"additional_vocab_size": 8})
    (name,) = (n for n in parameters_of("molmo2") if n.endswith("embed_tokens.weight"))
    table = torch.randn(configs.VOCAB + 8, 64)
    old, new = "model.transformer.wte.embedding", "model.transformer.wte.new_embedding"
    stored = {old: table[: configs.VOCAB], new: table[configs.VOCAB :]}
    found = torch.full(table.shape, torch.nan)
    assert filled("molmo2", stored, [replicated_shard(name, found)]) == 2
    assert torch.equal(found, table)
