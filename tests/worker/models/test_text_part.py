"""The text models of wrappers: their names in published checkpoints, with transformers' own mapping
as the oracle, and their answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3VLMoeTextConfig
from transformers.core_model_loading import revert_weight_conversion

from swell.configs.schema import ModelConfig
from swell.worker.hf_config import load_config, resolve_dtype
from swell.worker.memory.new_weights import ModelShape
from swell.worker.models import NATIVE, architecture, backend_of
from swell.worker.models.generic.build import auto_class, body_of, text_body
from swell.worker.models.generic.weights import WeightsMapper
from swell.worker.models.text_part import (
    text_architecture,
    text_config,
    text_names,
    towers,
)
from tests.worker import tiny_models
from tests.worker.models.test_models import check, refusal
from tests.zoo import configs, tiny_checkpoint

WRAPPERS = [
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "gemma3",
    "got_ocr2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "pp_chart2table",
    "qianfan_ocr",
    "shieldgemma2",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
]
"""Wrappers of native text models."""
NOT_BUILT = ["fast_vlm", "perception_lm"]
"""More of them, whose towers need libraries that are not installed."""


def test_every_wrapper_of_a_native_text_model_is_listed() -> None:
    kinds = [kind for kind in configs.kinds() if configs.text_architecture_of(kind) in NATIVE]
    wrapped = [kind for kind in kinds if configs.architecture(kind) not in NATIVE]
    assert wrapped == sorted([*WRAPPERS, *NOT_BUILT])


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("llm.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("llm.lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("model.vision_tower.patch_embed.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("image_newline", None),
    ],
)
def test_names_without_the_wrapper(stored: str, own: str | None) -> None:
    """`model.language_model.norm.weight` shows that the names are those of a wrapper."""
    names = text_names([stored, "lm_head.bias", "model.language_model.norm.bias"])
    assert names.pop("lm_head.bias") == "lm_head.bias"
    assert names.pop("model.norm.bias") == "model.language_model.norm.bias"
    assert names == ({own: stored} if own else {})


def test_names_of_a_text_model_stay() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"]
    assert text_names(names) == {name: name for name in names}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for layout, kinds in {
            # transformers 5.24 reverts names of qianfan_ocr's towers in its text model, too, and
            # builds shieldgemma2 as a wrapper of a wrapper, whose names it does not map
            "published": [k for k in WRAPPERS if k not in ("qianfan_ocr", "shieldgemma2")],
            "transformers 5": ["idefics3", "llava", "ovis2", "qianfan_ocr"],
        }.items()
        for kind in kinds
    ],
)
def test_names_are_those_that_transformers_maps(kind: str, layout: str) -> None:
    config = configs.shrunk(kind)
    assert text_architecture(config) in NATIVE
    with torch.device("meta"):
        wrapper = auto_class(config).from_config(config, dtype=torch.float32)
        separate = auto_class(text_config(config)).from_config(text_config(config))
    state = dict(wrapper.state_dict())
    stored = [*revert_weight_conversion(wrapper, state)] if layout == "published" else [*state]
    base = text_body(body_of(wrapper))
    path = next(path for path, module in wrapper.named_modules() if module is base)
    expected = {}
    for name, (source, *others) in WeightsMapper(wrapper)._sources(stored).items():
        own = f"model.{name.removeprefix(f'{path}.')}" if name.startswith(f"{path}.") else name
        if name.startswith((f"{path}.", "lm_head.")):
            assert not others
            expected[own] = source.name
    assert text_names(stored) == expected
    tied = separate.all_tied_weights_keys
    assert expected.keys() - tied.keys() == dict(separate.named_parameters()).keys() - tied.keys()


def make(folder: Path, kind: str, **changes: Any) -> Any:
    """Saves a small model of the type `kind`; returns the model of transformers."""
    config = configs.shrunk(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    oracle = tiny_checkpoint.make(folder, config)
    assert not isinstance(oracle, Exception), oracle
    return oracle


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("kind", ["mistral3", "gemma3"])
def test_a_native_text_model_equals_its_wrapper(
    tmp_path: Path, kind: str, split: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    oracle = make(tmp_path, kind)
    config = ModelConfig(path=str(tmp_path))
    hf_config = load_config(config)
    expected = {"mistral3": "MistralForCausalLM", "gemma3": "Gemma3ForCausalLM"}[kind]
    assert architecture(hf_config) == expected
    assert backend_of(config, hf_config) == "native"
    with caplog.at_level(logging.INFO, "swell"):
        check(tmp_path, oracle, backend="native", **split)
    logged = [one.fields["skipped"] for one in caplog.records if "only the text" in one.message]
    assert logged == [["vision"]]


@pytest.mark.slow
def test_a_stored_head_unties_a_config_that_ties_by_default(tmp_path: Path) -> None:
    """The config of Mistral 3 ties by default, but checkpoints have a head of their own."""
    oracle = make(tmp_path, "mistral3", tie_word_embeddings=False)
    tiny_models.change_config(tmp_path, tie_word_embeddings=True)
    check(tmp_path, oracle, backend="native")


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_text_model_without_a_class_equals_its_wrapper(
    tmp_path: Path, split: dict[str, int]
) -> None:
    """The text model of Qwen2-VL is a class of transformers without a head."""
    oracle = make(tmp_path, "qwen2_vl")
    check(tmp_path, oracle, backend="transformers", **split)


@pytest.mark.slow
def test_a_causal_model_with_towers_keeps_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MOSS is not in transformers' table of wrappers, but its text model is a part of it."""
    oracle = make(tmp_path, "moss_transcribe_diarize")
    with caplog.at_level(logging.INFO, "swell"):
        check(tmp_path, oracle, backend="auto")
    logged = [one.fields["skipped"] for one in caplog.records if "only the text" in one.message]
    assert logged == [["audio"]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_native_architecture_with_names_of_its_own(tmp_path: Path, backend: str) -> None:
    """EXAONE 3 is a llama whose checkpoints have other names."""
    oracle = make(tmp_path, "exaone")
    assert "transformer.h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    check(tmp_path, oracle, backend=backend)


@pytest.mark.slow
def test_a_native_backend_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make(tmp_path, "qwen2_vl")
    text = refusal(tmp_path, backend="native")
    assert "'Qwen2VLForConditionalGeneration' has no native model" in text
    assert "model.backend=transformers" in text


@pytest.mark.slow
def test_towers_need_no_memory(tmp_path: Path) -> None:
    from swell.configs.schema import ParallelConfig
    from swell.worker.comm.mesh import Mesh
    from swell.worker.models import build_model

    oracle = make(tmp_path, "qwen2_vl")
    config = ModelConfig(path=str(tmp_path), backend="transformers", max_model_len=64)
    mesh = Mesh.build(ParallelConfig(), 0, None, 0, torch.device("cpu"))
    model: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    sizes = sum(shard.target.numel() for shard in model.weight_shards())
    text = [oracle.model.language_model, oracle.lm_head]
    tensors = {id(p): p.numel() for part in text for p in part.parameters()}
    assert sizes == sum(tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_experts_may_be_stored_with_two_dimensions_swapped(tmp_path: Path, swapped: bool) -> None:
    """Qwen3-VL-MoE is published with experts [E, in, out]; transformers reads both orders."""
    text = {**configs.shrunk("qwen3_vl_moe").text_config.to_dict(), "moe_intermediate_size": 40}
    oracle = make(tmp_path, "qwen3_vl_moe", text_config=Qwen3VLMoeTextConfig(**text))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    inner = text["moe_intermediate_size"]
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            is_swapped = tensor.shape[-1] == 2 * inner
        elif name.endswith("experts.down_proj"):
            is_swapped = tensor.shape[-2] == inner
        else:
            continue
        if is_swapped != swapped:
            weights[name] = tensor.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    check(tmp_path, oracle, backend="transformers")


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": tiny_models.VOCAB,
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
}
SIGLIP = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 64,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # the keys of a published config.json, with small sizes; and how its names of tensors begin:
    # name of transformers 5 -> published name
    "Gemma 3": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "mm_tokens_per_image": 1,
            "model_type": "gemma3",
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "max_position_embeddings": 131072,
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 168,
                "rope_local_base_freq": 10000,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "rope_theta": 1000000,
                "sliding_window": 8,
                "torch_dtype": "bfloat16",
            },
            "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0",
            "vision_config": SIGLIP,
        },
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
    ),
    "Qwen2-VL, with the text model's keys at the top": (
        {
            **TEXT,
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "image_token_id": 151655,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2_vl",
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.41.2",
            "use_sliding_window": False,
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "mlp_ratio": 4,
                "num_heads": 2,
                "hidden_size": 64,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "rope_scaling": {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
        },
        {"model.language_model.": "model.", "model.visual.": "visual."},
    ),
    "LLaVA 1.5": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "model_type": "llava",
            "pad_token_id": 1,
            "text_config": {
                **TEXT,
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "torch_dtype": "float16",
            },
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vision_config": {
                **SIGLIP,
                "model_type": "clip_vision_model",
                "projection_dim": 64,
            },
            "vision_feature_layer": -1,
        },
        {
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_served(tmp_path: Path, name: str) -> None:
    values, prefixes = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf_config = AutoConfig.from_pretrained(tmp_path)
    oracle = tiny_checkpoint.build(hf_config, seed=0)
    weights = {}
    for own, tensor in oracle.state_dict().items():
        prefix = next(one for one in [*prefixes, ""] if own.startswith(one))
        weights[prefixes.get(prefix, "") + own.removeprefix(prefix)] = tensor.clone()
    for tied in set(oracle.all_tied_weights_keys) & weights.keys():
        del weights[tied]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(path=str(tmp_path))
    dtype = getattr(torch, str(values["torch_dtype"]))
    assert resolve_dtype(config, load_config(config)) is dtype
    assert towers(hf_config) == ["vision"]
    check(tmp_path, oracle)


def test_the_text_model_has_the_type_of_its_wrapper(tmp_path: Path) -> None:
    """transformers reads only the type at the top of config.json."""
    values, _ = PUBLISHED["LLaVA 1.5"]
    text = {**values["text_config"], "torch_dtype": "bfloat16"}
    for top, expected in (("float16", torch.float16), (None, torch.bfloat16)):
        changed = {**values, "text_config": text, "torch_dtype": top}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        config = ModelConfig(path=str(tmp_path))
        assert resolve_dtype(config, load_config(config)) is expected


def test_new_weights_may_have_another_tower(tmp_path: Path) -> None:
    values, _ = PUBLISHED["Gemma 3"]
    config = ModelConfig(path=str(tmp_path))
    shapes = []
    for tower in (SIGLIP, {**SIGLIP, "torch_dtype": "bfloat16", "image_size": 56}):
        (tmp_path / "config.json").write_text(json.dumps({**values, "vision_config": tower}))
        shapes.append(ModelShape(load_config(config), torch.bfloat16, None))
    shapes[0].refuse_other(shapes[1], "new")
    text = {**values["text_config"], "sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": text}))
    with pytest.raises(ValueError, match="sliding_window=9"):
        shapes[0].refuse_other(ModelShape(load_config(config), torch.bfloat16, None), "new")


def test_prompts_that_are_read_in_both_directions_are_refused(tmp_path: Path) -> None:
    configs.shrunk("paligemma").save_pretrained(tmp_path)
    tiny_models.change_config(tmp_path, architectures=["PaliGemmaForConditionalGeneration"])
    assert "in both directions" in refusal(tmp_path, load_format="dummy")
