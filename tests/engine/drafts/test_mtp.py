"""The multi-token prediction layer of a model. Its proposals equal those of the same layer in
transformers, for every model and every schedule; and no proposal changes an output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from swell.cluster.local import LLM
from swell.configs.schema import load
from swell.configs.section import ConfigError
from swell.worker.model_interfaces import moe_layers
from swell.worker.sharded import saving
from tests.engine.drafts.test_draft_model import DRAWN, answers, drafter_of
from tests.engine.drafts.test_eagle import (
    WAYS,
    Proposals,
    answer_around_a_sleep,
    assert_memory_counts,
    assert_same_up_to_64_tokens,
)
from tests.engine.engine_harness import NANO, engine
from tests.support.weights.eagle_heads import PlainHead
from tests.support.weights.eagle_heads import make as make_head
from tests.support.weights.mtp_layers import TYPES, PlainLayer, make, plain_layer
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(MtpModel, "forward_layer"),
        reason="the installed transformers has no MtpModel.forward_layer: update it",
    ),
]

OWN = "deepseek_v3 with an embedding and a head of its own"


def drafting(model: str, **overrides: Any) -> LLM:
    return engine(model, **{"drafts__method": "mtp", "cache__prefix_caching": False, **overrides})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a model by name; each is made once."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("mtp") / "model"
            made[name] = make(folder, name.partition(" ")[0], own=name == OWN)
        return made[name]

    return find


@pytest.fixture(scope="module")
def reference(served: Any) -> Any:
    """Returns the answers of a model without drafts."""
    found: dict[str, list[Any]] = {}

    def find(name: str) -> list[Any]:
        if name not in found:
            with engine(served(name)) as plain:
                found[name] = [answers(plain), answers(plain, DRAWN)]
        return found[name]

    return find


@pytest.mark.parametrize("name", [*TYPES, OWN])
def test_proposals_equal_those_of_transformers(name: str, served: Any, reference: Any) -> None:
    with drafting(served(name)) as llm:
        proposals = Proposals(llm)
        assert [answers(llm), answers(llm, DRAWN)] == reference(name)
    proposals.assert_those_of(plain_layer(served(name)), 40)


WAYS_OF = {
    "llama": {
        **WAYS,
        "the model of transformers": {"model__backend": "transformers"},
    },
    "qwen3_moe": {"tensor 2": WAYS["tensor 2"]},
    "glm4_moe": {"scarce blocks": WAYS["scarce blocks"], "pipeline 2": {"parallel__pipeline": 2}},
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in WAYS_OF for way in WAYS_OF[name]]
)
def test_proposals_are_the_same_in_every_configuration(
    name: str, way: str, served: Any, reference: Any
) -> None:
    with drafting(served(name), **WAYS_OF[name][way]) as llm:
        proposals = Proposals(llm)
        assert [answers(llm), answers(llm, DRAWN)] == reference(name)
        assert (llm._engine.core.scheduler.num_preemptions > 0) == (way == "scarce blocks")
    proposals.assert_those_of(plain_layer(served(name)), 25)


@pytest.mark.parametrize("level", [1, 2])
def test_the_mtp_layer_sleeps_with_the_engine(level: int, served: Any) -> None:
    with drafting(served("llama")) as llm:
        proposals = answer_around_a_sleep(llm, level)
    proposals.assert_those_of(plain_layer(served("llama")), 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_up_to_the_longest_sequence(depth: int, served: Any) -> None:
    model = served("glm4_moe")
    ways = {"model__max_model_len": 64, "scheduler__steps_in_flight": depth}
    with engine(model, **ways) as plain, drafting(model, cache__block_tokens=4, **ways) as llm:
        assert_same_up_to_64_tokens(plain, llm)


def test_the_memory_of_the_mtp_layer_counts(served: Any) -> None:
    with engine(served("llama")) as plain, drafting(served("llama")) as llm:
        assert_memory_counts(plain, llm, 0)


def test_the_layer_may_come_from_another_folder(
    served: Any, reference: Any, tmp_path: Path
) -> None:
    """The layer may be in another folder, as if the model had been saved without it. It shares the
    model's own embedding and head."""
    plain = _without_layer(served("llama"), tmp_path / "plain")
    carrier = make(tmp_path / "carrier", "llama", seed=7)
    with drafting(plain, drafts__model={"path": carrier}) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference("llama")[0]
    proposals.assert_those_of(PlainLayer(carrier, model=plain), 20)


def test_new_weights_include_their_mtp_layer(served: Any, tmp_path: Path) -> None:
    """New weights bring their own layer. If they have none, the layer must come from a folder of
    its own, which it keeps."""
    other, path = make(tmp_path / "other", "llama", seed=5), served("llama")
    bare = _without_layer(other, tmp_path / "bare")
    with drafting(path) as llm, drafting(path, drafts__model={"path": path}) as with_folder:
        before = answers(llm)
        with pytest.raises(ValueError, match="no layer for multi-token prediction"):
            llm.update_weights(bare)
        assert answers(llm) == before
        for each, weights, oracle in (
            (llm, other, PlainLayer(other)),
            (with_folder, bare, PlainLayer(path, model=bare)),
        ):
            each.update_weights(weights)
            proposals = Proposals(each)
            assert answers(each) != before
            proposals.assert_those_of(oracle, 20)


def test_a_layer_may_have_random_weights(served: Any, reference: Any) -> None:
    with drafting(
        served("llama"), drafts__model={"path": served("llama"), "load_format": "dummy"}
    ) as llm:
        assert answers(llm) == reference("llama")[0]
        assert drafter_of(llm).num_drafts > 20


def test_the_checkpoint_decides_which_weights_are_tied(served: Any, tmp_path: Path) -> None:
    """The checkpoint decides whether the head is tied, not config.json: here it stores a head of
    its own. The same holds for EAGLE."""
    folder = tmp_path / "untied"
    shutil.copytree(served("llama"), folder)
    weights = load_file(str(folder / "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    plain = PlainLayer(str(folder))
    assert plain._logits(torch.ones(1, 128)).shape == (1, 320)
    head = make_head(tmp_path / "head", "eagle", str(folder))
    for changes, oracle in (
        ({}, plain),
        (
            {"drafts__method": "eagle", "drafts__model": {"path": head}},
            PlainHead(head, str(folder)),
        ),
    ):
        with drafting(str(folder), **changes) as llm:
            proposals = Proposals(llm)
            answers(llm)
        proposals.assert_those_of(oracle, 20)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_the_checkpoint_decides_whether_the_layer_has_experts(kind: str, tmp_path: Path) -> None:
    """The checkpoint decides whether the layer has experts, not the model's own layers."""
    own = {"sparse": [0, 1, 2, 3], "dense": [4]}[kind]
    path = make(tmp_path / "model", "qwen3_moe", mlp_only_layers=own)
    tiny_models.change_config(Path(path), mlp_only_layers=[] if kind == "dense" else own)
    with drafting(path) as llm:
        proposals = Proposals(llm)
        answers(llm)
    assert len(proposals.found) > 20
    stored = load_file(f"{path}/model.safetensors")
    assert any("layers.4.mlp.experts" in name for name in stored) == (kind == "sparse")


def test_a_norm_after_the_layer_may_have_another_name(
    served: Any, reference: Any, tmp_path: Path
) -> None:
    folder = _renamed(served("llama"), tmp_path / "model", "shared_head.norm", "final_layernorm")
    with drafting(str(folder)) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference("llama")[0]
    proposals.assert_those_of(plain_layer(served("llama")), 20)


def test_the_experts_of_the_layer_are_found(served: Any) -> None:
    """The layer's experts are found, as an engine that goes to sleep finds them."""
    with drafting(served("qwen3_moe")) as llm:
        [layer] = llm._engine.core.executor._worker.draft_model.modules
        assert len(moe_layers(layer)) == 1


# ---------------------------------------------------------------- refusals


def test_a_model_without_such_a_layer_is_refused(served: Any, tmp_path: Path) -> None:
    plain = _without_layer(served("llama"), tmp_path / "plain")
    with pytest.raises(ConfigError) as caught:
        drafting(plain)
    text = str(caught.value)
    assert text.startswith("drafts.method=mtp: the weights have no layer for multi-token")
    assert "'model.layers.4.eh_proj.weight'" in text and "'mtp.fc.weight'" in text
    with pytest.raises(ConfigError, match=r"drafts\.model=.* have no layer for multi-token"):
        drafting(served("llama"), drafts__model={"path": plain})


def test_a_missing_weight_is_named(served: Any, tmp_path: Path) -> None:
    for lost in ("hnorm", "post_attention_layernorm", "shared_head.norm"):
        folder = tmp_path / lost
        _without(served("llama"), folder, f"layers.4.{lost}")
        with pytest.raises(
            ConfigError, match=rf"drafts\.method=mtp: .*have no tensor.*layers\.4\.{lost}"
        ):
            drafting(str(folder))


def test_a_layer_of_another_model_is_refused(served: Any, tmp_path: Path) -> None:
    for key, value in (("vocab_size", 384), ("hidden_size", 64), ("num_hidden_layers", 3)):
        folder = tmp_path / key
        shutil.copytree(served("llama"), folder)
        tiny_models.change_config(folder, **{key: value})
        with pytest.raises(ConfigError, match=rf"drafts\.model=.*with {key}={value}"):
            drafting(served("llama"), drafts__model={"path": str(folder)})
    with pytest.raises(ConfigError, match=r"drafts\.model=.*model_type='qwen3'"):
        drafting(served("llama"), drafts__model={"path": served("qwen3")})
    folder = tmp_path / "more"
    shutil.copytree(served("llama"), folder)
    weights = load_file(str(folder / "model.safetensors"))
    weights["model.layers.4.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"'model.layers.4.self_attn.q_proj.bias'.*another model"):
        drafting(str(folder))


@pytest.mark.parametrize("family", ["gemma2", "stablelm", "gpt2"])
def test_a_model_with_unsupported_norms_is_refused(family: str, tmp_path: Path) -> None:
    tiny_models.make(tmp_path, family)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(NANO, name), tmp_path)
    with pytest.raises(ConfigError, match=r"drafts\.method=mtp: .*not plain"):
        drafting(str(tmp_path), model__load_format="dummy")


def test_sharded_saved_weights_have_no_mtp_layer(served: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    config = load(served("llama"), {"model.device": "cpu"})
    saving.save_sharded(config, saved, lambda what, done, total: None)
    with pytest.raises(ConfigError, match=r"drafts\.method=mtp: .*saved by `swell save-sharded`"):
        drafting(str(saved))


def _without_layer(model: str, folder: Path) -> str:
    return _without(model, folder, "layers.4.")


def _renamed(model: str, folder: Path, part: str, name: str) -> str:
    shutil.copytree(model, folder)
    weights = load_file(str(folder / "model.safetensors"))
    renamed = {key.replace(part, name): tensor for key, tensor in weights.items()}
    save_file(renamed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)


def _without(model: str, folder: Path, part: str) -> str:
    shutil.copytree(model, folder)
    weights = load_file(str(folder / "model.safetensors"))
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)
