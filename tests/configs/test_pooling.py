"""The pooling of a model, as the files of its folder define it."""

from __future__ import annotations

from typing import Any

import pytest

from swell.configs.pooling import DenseSpec, PoolingSpec, read_pooling
from swell.configs.section import ConfigError

POOLING = [
    {"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""},
    {"idx": 1, "type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]
NORMALIZE = {"idx": 2, "type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def read(files: dict[str, Any], runner: str = "auto", method: str = "auto") -> PoolingSpec | None:
    return read_pooling(runner, method, files.get)


def config(architecture: str, **values: Any) -> dict[str, Any]:
    return {"config.json": {"architectures": [architecture], "hidden_size": 64, **values}}


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "GPT2LMHeadModel",
        "MixtralForCausalLM",
        "BertLMHeadModel",
    ],
)
def test_a_causal_language_model_samples(architecture):
    assert read(config(architecture)) is None


@pytest.mark.parametrize(
    ("architecture", "method", "task"),
    [
        ("BertModel", "cls", "embed"),
        ("XLMRobertaForMaskedLM", "cls", "embed"),
        ("ModernBertForSequenceClassification", "cls", "classify"),
        ("Qwen3Model", "last", "embed"),
        ("LlamaForSequenceClassification", "last", "classify"),
    ],
)
def test_a_pooling_architecture_is_recognised(architecture, method, task):
    spec = read(config(architecture))
    assert spec is not None
    assert (spec.method, spec.task, spec.normalize) == (method, task, task == "embed")
    assert read(config(architecture), runner="generate") is None


def test_a_folder_or_the_configuration_enables_pooling_of_a_causal_model():
    qwen = config("Qwen3ForCausalLM")
    spec = read(
        {**qwen, "modules.json": POOLING, "1_Pooling/config.json": {"pooling_mode": "mean"}}
    )
    assert spec is not None and (spec.method, spec.normalize) == ("mean", False)
    spec = read(qwen, runner="pooling")
    assert spec is not None and (spec.method, spec.normalize) == ("last", True)
    spec = read(qwen, runner="pooling", method="mean")
    assert spec is not None and spec.method == "mean"


@pytest.mark.parametrize(
    ("file", "method"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_pooling_modes(file, method):
    files = {**config("BertModel"), "modules.json": POOLING, "1_Pooling/config.json": file}
    spec = read(files)
    assert spec is not None and spec.method == method


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"pooling_mode": "max"}, r"pooling modes \['max'\] are not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "'mean', 'cls'"),
        ({}, r"pooling modes \[\] are not supported"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt=false"),
    ],
)
def test_other_pooling_modes_are_refused(file, reason):
    files = {**config("BertModel"), "modules.json": POOLING, "1_Pooling/config.json": file}
    with pytest.raises(ConfigError, match=reason):
        read(files)


def test_the_files_of_sentence_transformers():
    dense = {"idx": 2, "type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    sizes = {"in_features": 64, "out_features": 16, "bias": False}
    files = {
        **config("BertModel"),
        "modules.json": [*POOLING, dense, NORMALIZE],
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "2_Dense/config.json": {**sizes, "activation_function": "torch.nn.modules.linear.Identity"},
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "tokenizer_config.json": {"model_max_length": 50},
        "config_sentence_transformers.json": {
            "prompts": {"query": "q: "},
            "default_prompt_name": "query",
        },
    }
    spec = read(files)
    assert spec is not None
    assert spec.dense == (DenseSpec("2_Dense", 64, 16, False, "Identity"),)
    assert (spec.size, spec.max_tokens, spec.lower_case, spec.normalize) == (16, 40, True, True)
    assert (spec.prompts, spec.default_prompt) == ({"query": "q: "}, "query")
    del files["sentence_bert_config.json"]
    files["tokenizer_config.json"] = {"model_max_length": int(1e30)}
    spec = read(files)
    assert spec is not None and spec.max_tokens is None
    files["2_Dense/config.json"]["activation_function"] = "torch.nn.modules.activation.ReLU"
    with pytest.raises(ConfigError, match="activation_function='ReLU'"):
        read(files)
    files["modules.json"] = [*POOLING, {"type": "sentence_transformers.models.LSTM", "path": "2"}]
    with pytest.raises(ConfigError, match="the module 'LSTM', which is not supported"):
        read(files)


def test_classes_and_activations_are_read():
    labels = {"0": "bad", "1": "good"}
    spec = read(
        config(
            "BertForSequenceClassification",
            id2label=labels,
            problem_type="multi_label_classification",
            sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
        )
    )
    assert spec is not None
    assert (spec.labels, spec.size, spec.problem) == (
        ("bad", "good"),
        2,
        "multi_label_classification",
    )
    assert spec.score_activation == "Identity"
    spec = read(config("ModernBertForSequenceClassification", classifier_pooling="mean"))
    assert spec is not None and (spec.method, spec.labels) == ("mean", ("LABEL_0", "LABEL_1"))


@pytest.mark.parametrize("architecture", ["GemmaForSequenceClassification", "T5Model", ""])
def test_other_families_are_refused_by_name(architecture):
    with pytest.raises(
        ConfigError, match=f"architecture '{architecture}' cannot be served for pooling"
    ):
        read(config(architecture), runner="pooling")
