"""A draft model next to the model. Its cache has all tokens that it needs in every schedule, so
drafts of the same model are always right. A draft model that is always wrong changes no output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.local import LLM
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.configs.schema import load
from swell.configs.section import ConfigError
from swell.engine.scheduling.drafter import Drafter
from swell.worker.sharded import saving
from tests.engine.engine_harness import NANO, EngineHarness, engine
from tests.engine.outputs.features import RequestSpec
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

SAME: dict[str, Any] = {"path": NANO}
RANDOM: dict[str, Any] = {"path": NANO, "load_format": "dummy"}
PROMPTS = ["count from 3 to 12", "upper: abcdefgh", "greet in German: Orozecud", "spell: house"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
DRAWN = SamplingParams(temperature=4.0, seed=11, max_tokens=40)


def drafting(small: dict[str, Any], **overrides: Any) -> LLM:
    return engine(drafts__method="model", drafts__model=small, **overrides)


def answers(llm: LLM, params: SamplingParams = GREEDY, prompts: list[str] = PROMPTS) -> list[Any]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, params)
    llm.check_idle()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[Any]]:
    with engine() as llm:
        return {"greedy": answers(llm), "drawn": answers(llm, DRAWN)}


def drafter_of(llm: LLM) -> Drafter:
    return llm._engine.core.scheduler.drafter


WAYS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "three steps in flight, chunks of 5": {
        "scheduler__steps_in_flight": 3,
        "scheduler__max_chunk_tokens": 5,
    },
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2, two steps": {"parallel__pipeline": 2, "scheduler__steps_in_flight": 2},
    "scarce blocks": {"cache__block_tokens": 2, "cache__memory_bytes": 2 * 4096 * 45},
    "blocks of one token": {"cache__block_tokens": 1},
    "the model of transformers": {"model__backend": "transformers"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model_equal_to_the_model_is_always_right(
    way: str, reference: dict[str, list[Any]]
) -> None:
    with drafting(SAME, **WAYS[way]) as llm:
        for _ in range(2):  # in the second round the prompts are in the cache
            assert answers(llm) == reference["greedy"]
        kv, drafts = llm._engine.core.scheduler.kv, drafter_of(llm)
        assert drafts.num_drafts == drafts.num_accepted > 50
        assert kv.num_hit_tokens
        assert (llm._engine.core.scheduler.num_preemptions > 0) == (way == "scarce blocks")
        assert answers(llm, DRAWN) == reference["drawn"]


@pytest.mark.parametrize("way", WAYS)
def test_another_model_changes_no_answer(way: str, reference: dict[str, list[Any]]) -> None:
    with drafting(RANDOM, **WAYS[way]) as llm:
        assert answers(llm) == reference["greedy"]
        assert answers(llm, DRAWN) == reference["drawn"]
        drafts = drafter_of(llm)
        assert drafts.num_drafts > 2 * drafts.num_accepted


def test_many_seeds_draw_the_same_tokens() -> None:
    """Many seeds draw the same tokens with right and with wrong drafts, so that sampled tokens have
    the model's distribution."""
    seeds = [msgspec.structs.replace(DRAWN, seed=seed) for seed in range(60)]
    chats = [[{"role": "user", "content": PROMPTS[0]}]] * len(seeds)
    found, shares = [], []
    for llm in (engine(), drafting(SAME), drafting(RANDOM)):
        with llm:
            found.append([output.outputs[0].token_ids for output in llm.chat(chats, seeds)])
            shares.append((drafter_of(llm).num_accepted, drafter_of(llm).num_drafts))
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) > 50
    assert all(0 < accepted < drafts for accepted, drafts in shares[1:])


def test_offloaded_blocks_return_for_both_models(reference: dict[str, list[Any]]) -> None:
    scarce = {"cache__block_tokens": 2, "cache__memory_bytes": 2 * 4096 * 45}
    for dtype, share in (("auto", 1.0), ("bfloat16", 0.9)):
        small = SAME | {"dtype": dtype}
        settings = scarce | {"cache__offload_bytes": 8_000_000, "scheduler__steps_in_flight": 1}
        with drafting(small, **settings) as llm:
            for _ in range(3):
                assert answers(llm) == reference["greedy"]
            assert llm._engine.core.scheduler.kv.offload.num_loaded > 20
            drafts = drafter_of(llm)
            assert drafts.num_accepted >= share * drafts.num_drafts > 100


@pytest.mark.parametrize("level", [1, 2])
def test_the_draft_model_sleeps_with_the_engine(
    level: int, reference: dict[str, list[Any]]
) -> None:
    with drafting(SAME) as llm:
        worker = llm._engine.core.executor._worker
        assert answers(llm) == reference["greedy"]
        llm._engine.core.memory.set_sleep(level)
        assert bool(worker.draft_model.modules) == (level == 1)
        for model in worker.draft_model.modules:
            assert not any(layer.k_cache.numel() for layer in model.attention_layers())
        llm._engine.core.memory.set_sleep(0)
        assert answers(llm) == reference["greedy"]
        drafts = drafter_of(llm)
        assert drafts.num_drafts == drafts.num_accepted > 100


def test_the_draft_model_stays_when_the_model_is_updated(
    reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    weights = load_file(str(Path(NANO, "model.safetensors")))
    other = {name: tensor * 1.01 for name, tensor in weights.items()}
    other["model.norm.weight"] = -other["model.norm.weight"]
    with drafting(SAME) as llm:
        llm.update_weights(other)
        answers(llm)
        drafts = drafter_of(llm)
        assert drafts.num_drafts > 2 * drafts.num_accepted, "it is another model now"
        before = drafts.num_drafts - drafts.num_accepted
        llm.update_weights(weights)
        assert answers(llm) == reference["greedy"]
        assert drafter_of(llm).num_drafts - drafter_of(llm).num_accepted == before


def test_the_memory_of_the_draft_model_counts() -> None:
    def blocks(llm: LLM) -> int:
        return llm._engine.core.limits.num_blocks

    with engine() as plain, drafting(SAME) as same, drafting(SAME | {"dtype": "bfloat16"}) as half:
        assert blocks(same) == blocks(plain) // 2
        assert blocks(half) == int(blocks(plain) / 1.5)
        workers = [llm._engine.core.executor._worker for llm in (plain, same)]
        plain_bytes, both_bytes = (worker.load() for worker in workers)
        assert both_bytes == 2 * plain_bytes


def changed(folder: Path, **keys: Any) -> str:
    """Makes a copy of nano with other values in its config.json."""
    shutil.copytree(NANO, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return str(folder)


def without(name: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns(name))
        return str(folder)

    return make


def cut_off(folder: Path) -> str:
    shutil.copytree(NANO, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    return str(folder)


@pytest.mark.parametrize(
    ("make", "load_format", "parts"),
    [
        (str, "auto", ["is not a folder"]),
        (without("config.json"), "auto", ["config.json cannot be read"]),
        (without("*.safetensors"), "auto", ["has no weights"]),
        (cut_off, "auto", ["not a safetensors file"]),
        (lambda path: changed(path, vocab_size=300), "dummy", ["300 tokens", "model's has 320"]),
        (
            lambda path: changed(path, max_position_embeddings=512),
            "auto",
            ["512 positions", "2048 tokens", "set model.max_model_len=512"],
        ),
        (lambda path: changed(path, model_type="bert"), "auto", ["bert"]),
        (lambda path: changed(path, hidden_size=64), "auto", ["tensor", "shape"]),
    ],
)
def test_an_unsuitable_draft_model_is_refused_by_name(
    make: Callable[[Path], str], load_format: str, parts: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path / "small")
    with pytest.raises(ConfigError) as caught:
        drafting({"path": path, "load_format": load_format})
    text = str(caught.value)
    assert text.startswith(f"drafts.model={path!r}"), text
    assert all(part in text for part in parts), text


def test_fewer_positions_are_enough_for_shorter_sequences(tmp_path: Path) -> None:
    path = changed(tmp_path / "small", max_position_embeddings=128)
    with drafting({"path": path}, model__max_model_len=128) as llm:
        answers(llm)
        assert drafter_of(llm).num_accepted


def test_a_model_that_pools_has_no_draft_model() -> None:
    with pytest.raises(ConfigError, match=r"drafts\.model=.* pools"):
        drafting(SAME, model__runner="pooling")


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_up_to_the_longest_sequence(depth: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=61, ignore_eos=True)
    ways = {"model__max_model_len": 64, "scheduler__steps_in_flight": depth}
    prompts = [[5, 6, 7], [80, 81, 82]]
    with engine(**ways) as plain, drafting(SAME, cache__block_tokens=4, **ways) as llm:
        found = [
            [output.outputs[0].token_ids for output in each.generate(prompts, params)]
            for each in (plain, llm)
        ]
        assert found[0] == found[1] and len(found[0][0]) == 61
        assert drafter_of(llm).num_drafts == drafter_of(llm).num_accepted > 0


def spoiled(folder: Path) -> str:
    """Makes a copy of nano whose logits are NaN."""
    shutil.copytree(NANO, folder)
    path = str(folder / "model.safetensors")
    weights = load_file(path)
    save_file({name: tensor * torch.nan for name, tensor in weights.items()}, path)
    return str(folder)


def test_a_draft_model_with_nan_logits_only_proposes_wrong_drafts(
    reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    for overrides in ({}, {"drafts__max_step_tokens": 400, "parallel__tensor": 2}):
        with drafting({"path": spoiled(tmp_path / str(len(overrides)))}, **overrides) as llm:
            assert answers(llm) == reference["greedy"]
            assert answers(llm, DRAWN) == reference["drawn"]
            assert drafter_of(llm).num_drafts


def test_a_migrated_answer_continues_with_correct_drafts(reference: dict[str, list[Any]]) -> None:
    params = msgspec.structs.replace(GREEDY, logprobs=0)
    spec = RequestSpec(PROMPTS[0], params)
    engines = [drafting(SAME), drafting(SAME, cache__block_tokens=4)]
    harness = EngineHarness(engines)
    for cut in range(1, 8):
        harness.ask(spec, RequestOutputKind.DELTA, cuts=[cut])
    for answer in harness.run():
        assert answer.parts[0].token_ids == reference["greedy"][0]
    assert harness.num_moves > 3
    for llm in engines:
        assert drafter_of(llm).num_drafts == drafter_of(llm).num_accepted > 0
        llm.close()


def test_saved_weights_of_a_draft_model(reference: dict[str, list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "saved"
    saving.save_sharded(load(NANO, {"model.device": "cpu"}), out, lambda what, done, total: None)
    with drafting({"path": str(out)}) as llm:
        assert answers(llm) == reference["greedy"]
        assert drafter_of(llm).num_drafts == drafter_of(llm).num_accepted > 0


def test_an_error_names_the_key_of_the_draft_model(tmp_path: Path) -> None:
    path = changed(tmp_path / "small", hidden_act="relu")
    with pytest.raises(ConfigError, match=r"try drafts\.model\.backend=transformers"):
        drafting({"path": path})
    with drafting({"path": path, "backend": "transformers"}) as llm:
        answers(llm)
        assert drafter_of(llm).num_drafts


def test_a_draft_model_of_another_family(tmp_path: Path) -> None:
    """A draft model may be of another family, with sliding windows or through transformers; both
    are as wrong as random weights are."""
    for family in ("mistral", "gpt2"):
        folder = tmp_path / family
        folder.mkdir()
        tiny_models.make(folder, family)
        with drafting({"path": str(folder)}, model__max_model_len=200) as llm, engine() as plain:
            assert answers(llm) == answers(plain)
            assert drafter_of(llm).num_drafts
