"""Attention masks of transformers and the windows that they describe; our layers compute what the
replaced layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.models import build_model
from swell.worker.models.generic import probe
from swell.worker.models.generic.masks import UnsupportedMaskError, sliding_window_of
from swell.worker.models.generic.probe import constant_weights, mixes_tokens
from tests.worker import tiny_models
from tests.worker.models.test_models import MAX_TOKENS, check, refusal

pytestmark = pytest.mark.slow

CAUSAL = masking_utils.causal_mask_function


def windowed(window: int) -> Any:
    return masking_utils.sliding_window_causal_mask_function(window)


def chunked(chunk: int) -> Any:
    return masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("function", "positions", "window"),
    [
        (CAUSAL, 1, 0),
        (CAUSAL, 4096, 0),
        (windowed(8), 4096, 8),
        (windowed(1), 64, 1),
        (windowed(63), 64, 63),
        (windowed(64), 64, 0),  # no token is far enough back to leave the window
        (windowed(4096), 64, 0),
        (chunked(64), 64, 0),
    ],
)
def test_windows(function: Any, positions: int, window: int) -> None:
    assert sliding_window_of(function, positions) == window


BLOCKS = torch.tensor([[0, 0, 1, 1]])


@pytest.mark.parametrize(
    "function",
    [
        chunked(8),  # the last of 64 positions sees exactly one chunk, like a window
        chunked(48),
        chunked(63),
        masking_utils.bidirectional_mask_function,
        masking_utils.or_masks(CAUSAL, windowed(3), lambda b, h, q, k: k == q + 1),
        masking_utils.and_masks(CAUSAL, lambda b, h, q, k: (q - k) % 2 == 0),
        # the first five tokens see each other, as in a prefix LM
        masking_utils.or_masks(CAUSAL, lambda b, h, q, k: (q < 5) & (k < 5)),
        lambda b, h, q, k: k < q,
    ],
)
def test_masks_without_a_window(function: Any) -> None:
    with pytest.raises(UnsupportedMaskError, match="does not attend to"):
        sliding_window_of(function, 64)


def test_masks_of_tokens_are_not_masks_of_positions() -> None:
    function = masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(BLOCKS))
    with pytest.raises(UnsupportedMaskError, match="more than the positions"):
        sliding_window_of(function, 64)


def windows(folder: Path, **model: Any) -> list[int]:
    config = ModelConfig(path=str(folder), backend="transformers", **model)
    mesh = Mesh.build(ParallelConfig(), 0)
    built: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    return [layer.window for layer in built.attention_layers()]


def test_a_window_of_none_means_no_window(tmp_path: Path) -> None:
    """A keyword of None is not a window. The layers of exaone4 all have an attribute
    `sliding_window`, which is None in every second layer."""
    oracle = tiny_models.make(tmp_path, "exaone4")
    assert windows(tmp_path, max_model_len=MAX_TOKENS) == [8, 0, 8, 0]
    assert windows(tmp_path, max_model_len=8) == [0, 0, 0, 0]
    check(tmp_path, oracle, backend="transformers")
    check(tmp_path, oracle, 2, 2, backend="transformers", chunk=7)


def test_a_window_that_only_the_mask_has(tmp_path: Path) -> None:
    oracle = tiny_models.make(tmp_path, "phimoe")
    assert windows(tmp_path, max_model_len=MAX_TOKENS) == [8, 8, 8, 8]
    check(tmp_path, oracle, backend="transformers")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("roberta", ["position_embeddings", "does not use the positions"]),
        ("bert", ["layer 0", "does not attend to"]),
        ("doge", ["layer 0", "bias of its own"]),
        ("gpt_oss", ["s_aux"]),
        ("diffllama", ["layer 0 calls attention twice"]),
        ("xglm", ["layer 0 does not call", "attention of its own"]),
        ("lfm2", ["layer_types", "'conv'"]),
    ],
)
def test_unsupported_masks_are_refused(tmp_path: Path, family: str, words: list[str]) -> None:
    tiny_models.make(tmp_path, family)
    text = refusal(tmp_path, backend="transformers", max_model_len=MAX_TOKENS)
    for word in words:
        assert word in text


def test_layers_that_mix_tokens_outside_attention_are_detected() -> None:
    """Layers that mix tokens outside of attention are detected: the convolutions of lfm2 use
    earlier tokens, which neither a mask nor a position shows."""
    kind = {"num_hidden_layers": 2, "layer_types": ["conv"] * 2, "hidden_size": 32}
    config = transformers.Lfm2Config(**kind, vocab_size=16, intermediate_size=32)
    model: Any = transformers.Lfm2Model(config).eval()

    def run(ids: torch.Tensor, positions: torch.Tensor, incoming: torch.Tensor | None) -> Any:
        if incoming is not None:
            return model(inputs_embeds=incoming[None], use_cache=False).last_hidden_state[0]
        return model(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    own = {name: parameter.clone() for name, parameter in model.named_parameters()}
    two = torch.tensor([1, 2]), torch.arange(2)
    with torch.no_grad(), constant_weights(list(model.modules()), torch.device("cpu")):
        assert mixes_tokens(model, run, *two, None)
        assert mixes_tokens(model, run, *two, torch.zeros(2, 32))
        for layer in model.layers:
            layer.conv.forward = lambda hidden_states, **_: hidden_states
        assert not mixes_tokens(model, run, *two, None)
    assert all(torch.equal(own[name], p) for name, p in model.named_parameters())


def test_tracing_allocates_no_tables_or_experts() -> None:
    """Tracing allocates no embedding tables or experts. A model is traced when its weights are
    already in memory; a vocabulary, or all experts of a layer, would need gigabytes more."""
    model = torch.nn.Module()
    model.table, model.linear = torch.nn.Embedding(5000, 16), torch.nn.Linear(16, 32)
    model.experts = torch.nn.Parameter(torch.zeros(64, 16, 16))
    with probe.constant_weights(list(model.modules()), torch.device("cpu")):
        parts = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        assert sum(part.nbytes() for part in parts.values()) == 4 * 16 * 32
        assert all((p == probe.WEIGHT).all() for p in model.parameters())
    assert model.table.weight.shape == (5000, 16) and not model.experts.any()
