"""Unusual configs that their classes allow: equal to transformers, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swell.configs.schema import ModelConfig
from swell.worker.hf_config import load_config
from tests.worker import tiny_models
from tests.worker.models.test_models import MAX_TOKENS, check, refusal

pytestmark = pytest.mark.slow

YARN = {**tiny_models.YARN, "factor": None}
SMALL_TEXT_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_missing_yarn_factor_follows_from_the_lengths(tmp_path: Path, backend: str) -> None:
    """YaRN may derive its factor from the lengths: 256 positions from 64 are a factor of 4."""
    check(tmp_path, tiny_models.make(tmp_path, "llama", rope_parameters=YARN), backend=backend)


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_partial_rotation_uses_the_generic_backend(tmp_path: Path, part: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    tiny_models.make(tmp_path, "llama")
    tiny_models.change_config(tmp_path, rope_parameters=rope)
    text = refusal(tmp_path, backend="native")
    assert f"partial_rotary_factor={part}" in text
    assert "model.backend=transformers" in text


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_longrope_ends_at_the_original_length(tmp_path: Path, backend: str) -> None:
    """Beyond it, all angles change, also those of keys in the cache."""
    tiny_models.make(tmp_path, "phi3-longrope")
    text = refusal(tmp_path, backend=backend, max_model_len=129)
    assert "rope_type='longrope'" in text and "set model.max_model_len=128 or less" in text


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_contradictory_architectures_are_refused(tmp_path: Path, backend: str) -> None:
    tiny_models.make(tmp_path, "qwen2")
    tiny_models.change_config(tmp_path, architectures=["LlamaForCausalLM"])
    text = refusal(tmp_path, backend=backend)
    for word in ("'LlamaForCausalLM'", "'qwen2'", "'Qwen2ForCausalLM'", "config.json"):
        assert word in text


def test_an_architecture_of_more_than_a_language_model(tmp_path: Path) -> None:
    """An architecture of more than a language model is refused, with the names of its published
    config: they do not contradict each other, and the error does not claim it."""
    config = tiny_models.config_of("llama")
    config.save_pretrained(tmp_path)
    tiny_models.change_config(
        tmp_path,
        model_type="mllama",
        architectures=["MllamaForConditionalGeneration"],
        text_config={**SMALL_TEXT_MODEL, "cross_attention_layers": [3]},
    )
    text = refusal(tmp_path, load_format="dummy")
    assert "'MllamaForConditionalGeneration' cannot be served: its layer 3" in text
    assert "contradict" not in text


def test_an_unknown_architecture_falls_back_to_the_model_type(tmp_path: Path) -> None:
    oracle = tiny_models.make(tmp_path, "qwen2")
    tiny_models.change_config(tmp_path, architectures=["InternQwenForCausalLM"])
    check(tmp_path, oracle)


@pytest.mark.parametrize("family", ["bloom", "mpt", "cpmant"])
def test_models_without_a_limit_in_their_config_have_a_limit(tmp_path: Path, family: str) -> None:
    """Models without `max_position_embeddings` in their configs still have a limit."""
    config = tiny_models.config_of(family)
    config.save_pretrained(tmp_path)
    assert "positions" in refusal(tmp_path, max_model_len=MAX_TOKENS, load_format="dummy")


def test_a_config_of_several_text_models_is_refused(tmp_path: Path) -> None:
    tiny_models.config_of("musicgen").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a single text model"):
        load_config(ModelConfig(path=str(tmp_path)))


def test_a_head_may_have_another_input_width(tmp_path: Path) -> None:
    """A head may take another width, as in opt-350m: the last layer's output is projected before
    the head."""
    check(tmp_path, tiny_models.make(tmp_path, "opt", word_embed_proj_dim=64))


def test_scalar_buffers_are_loaded(tmp_path: Path) -> None:
    oracle = tiny_models.make(tmp_path, "apertus")
    for name, buffer in oracle.named_buffers():
        if name.endswith("act_fn.beta"):
            assert buffer.dim() == 0
            buffer.fill_(0.25)  # unlike in a fresh model
    oracle.save_pretrained(tmp_path)
    check(tmp_path, oracle)


def test_a_head_that_reads_token_ids_equals_transformers(tmp_path: Path) -> None:
    check(tmp_path, tiny_models.make(tmp_path, "gemma4"), chunk=7)


@pytest.mark.parametrize("split", [{"pipeline": 2}, {"tensor": 2}])
def test_layers_that_cannot_be_split_refuse_a_split(tmp_path: Path, split: dict[str, Any]) -> None:
    """Layers that cannot be split are refused with a split: those of gemma3n carry four streams,
    and their activations compare all of a layer's values."""
    check(tmp_path, tiny_models.make(tmp_path, "gemma3n"))
    text = refusal(tmp_path, **split)
    assert "Gemma3nForCausalLM" in text
    assert f"parallel.{next(iter(split))}=1" in text
