"""The layer for multi-token prediction that comes with a model: its guesses are those of the same
layer in transformers, whatever the model and the way; and no guess changes an answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM
from swell.configs.schema import load
from swell.configs.section import ConfigError
from swell.worker.sharded import saving
from tests.engine.engine_harness import engine
from tests.engine.test_draft_model import DRAWN, GREEDY, answers, drafter_of
from tests.engine.test_eagle import WAYS, Guesses
from tests.mtp_layers import TYPES, PlainLayer, make

pytestmark = pytest.mark.slow

OWN = "deepseek_v3 with an embedding and a head of its own"


def drafting(model: str, **overrides: Any) -> LLM:
    return engine(model, **{"drafts__method": "mtp", "cache__prefix_caching": False, **overrides})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name; made once."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("mtp") / "model"
            made[name] = make(folder, name.partition(" ")[0], own=name == OWN)
        return made[name]

    return find


@pytest.fixture(scope="module")
def wanted(served: Any) -> Any:
    """The answers of a model without drafts."""
    found: dict[str, list[Any]] = {}

    def find(name: str) -> list[Any]:
        if name not in found:
            with engine(served(name)) as plain:
                found[name] = [answers(plain), answers(plain, DRAWN)]
        return found[name]

    return find


@pytest.mark.parametrize("name", [*TYPES, OWN])
def test_guesses_are_those_of_transformers(name: str, served: Any, wanted: Any) -> None:
    with drafting(served(name)) as llm:
        guesses = Guesses(llm)
        assert [answers(llm), answers(llm, DRAWN)] == wanted(name)
    guesses.assert_those_of(PlainLayer(served(name)), 40)


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
def test_guesses_are_the_same_on_every_way(name: str, way: str, served: Any, wanted: Any) -> None:
    with drafting(served(name), **WAYS_OF[name][way]) as llm:
        guesses = Guesses(llm)
        assert [answers(llm), answers(llm, DRAWN)] == wanted(name)
        assert (llm._engine.core.scheduler.num_preemptions > 0) == (way == "scarce blocks")
    guesses.assert_those_of(PlainLayer(served(name)), 25)


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_with_the_engine(level: int, served: Any) -> None:
    with drafting(served("llama")) as llm:
        worker = llm._engine.core.executor._worker
        guesses = Guesses(llm)
        first = answers(llm)
        llm._engine.core.set_sleep(level)
        assert bool(worker.draft_model.modules) == (level == 1)
        llm._engine.core.set_sleep(0)
        assert answers(llm) == first
    guesses.assert_those_of(PlainLayer(served("llama")), 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_up_to_the_longest_sequence(depth: int, served: Any) -> None:
    params = GREEDY.__class__(temperature=0.0, max_tokens=61, ignore_eos=True)
    ways = {"model__max_model_len": 64, "scheduler__steps_in_flight": depth}
    prompts, model = [[5, 6, 7], [80, 81, 82]], served("glm4_moe")
    with engine(model, **ways) as plain, drafting(model, cache__block_tokens=4, **ways) as llm:
        found = [
            [output.outputs[0].token_ids for output in each.generate(prompts, params)]
            for each in (plain, llm)
        ]
        assert found[0] == found[1] and len(found[0][0]) == 61
        assert drafter_of(llm).num_drafts > 0


def test_its_memory_counts(served: Any) -> None:
    with engine(served("llama")) as plain, drafting(served("llama")) as llm:
        blocks = [each._engine.core.limits.num_blocks for each in (plain, llm)]
        assert blocks[1] == blocks[0] * 4 // 5  # five layers in place of four
        workers = [each._engine.core.executor._worker for each in (plain, llm)]
        own = workers[1].draft_model.nbytes
        assert own > 0
        assert workers[1].load().weight_bytes == workers[0].load().weight_bytes + own


def test_another_folder_may_have_the_layer(served: Any, wanted: Any, tmp_path: Path) -> None:
    """As where a model was saved without it. What the layer shares is the model's."""
    plain = _without_layer(served("llama"), tmp_path / "plain")
    carrier = make(tmp_path / "carrier", "llama", seed=7)
    with drafting(plain, drafts__model={"path": carrier}) as llm:
        guesses = Guesses(llm)
        assert answers(llm) == wanted("llama")[0]
    guesses.assert_those_of(PlainLayer(carrier, model=plain), 20)


def test_random_weights_of_a_layer(served: Any, wanted: Any) -> None:
    with drafting(
        served("llama"), drafts__model={"path": served("llama"), "load_format": "dummy"}
    ) as llm:
        assert answers(llm) == wanted("llama")[0]
        assert drafter_of(llm).num_drafts > 20


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


def test_a_part_that_is_missing_is_named(served: Any, tmp_path: Path) -> None:
    for lost in ("hnorm", "post_attention_layernorm", "shared_head.norm"):
        folder = tmp_path / lost
        _without(served("llama"), folder, f"layers.4.{lost}")
        with pytest.raises(ConfigError, match=rf"drafts\.method=mtp: .*lack.*layers\.4\.{lost}"):
            drafting(str(folder))


def test_weights_that_are_saved_sharded_have_none(served: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    config = load(served("llama"), {"model.device": "cpu"})
    saving.save_sharded(config, saved, lambda what, done, total: None)
    with pytest.raises(ConfigError, match=r"drafts\.method=mtp: .*saved as workers hold them"):
        drafting(str(saved))


def _without_layer(model: str, folder: Path) -> str:
    return _without(model, folder, "layers.4.")


def _without(model: str, folder: Path, part: str) -> str:
    shutil.copytree(model, folder)
    weights = load_file(str(folder / "model.safetensors"))
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)
