"""Draft heads that read the model's hidden states. Their proposals equal those of the same head in
plain torch, in every schedule; and no proposal changes an output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM
from swell.configs.section import ConfigError
from swell.engine.request import RequestStatus
from tests.engine.drafts.test_draft_model import DRAWN, GREEDY, answers, drafter_of
from tests.engine.engine_harness import NANO, engine
from tests.support.weights.eagle_heads import PlainHead, make, plain_head
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

MOE = str(Path(NANO).parent / "nano-moe")
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle with biases, an embedding and a head of its own": {
        "method": "eagle",
        "bias": True,
        "own": ("embed_tokens", "lm_head"),
    },
    "eagle of two layers": {"method": "eagle", "layers": 2},
    "eagle3": {"method": "eagle3"},
    "eagle3 that knows some tokens": {"method": "eagle3", "vocab": 150},
    "eagle3 that reads other layers": {
        "method": "eagle3",
        "aux": [-1, 0, 2],
        "own": ("embed_tokens",),
    },
    "eagle3 that names the layers that read": {
        "method": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 2],
        "norm_before_residual": True,
    },
}
# Nothing is found in the cache, because a block may have been computed before another token.
WAYS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "three steps in flight, chunks of 5": {
        "scheduler__steps_in_flight": 3,
        "scheduler__max_chunk_tokens": 5,
    },
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2, two steps": {"parallel__pipeline": 2, "scheduler__steps_in_flight": 2},
    "scarce blocks": {"cache__block_tokens": 2, "cache__memory_bytes": 5120 * 45},
    "blocks of one token": {"cache__block_tokens": 1},
}


def drafting(head: str, method: str, **overrides: Any) -> LLM:
    return engine(
        **{
            "drafts__method": method,
            "drafts__model": {"path": head},
            "cache__prefix_caching": False,
            **overrides,
        }
    )


class Proposals:
    """Records what an engine receives: the tokens of a row, and the proposals after them."""

    def __init__(self, llm: LLM) -> None:
        self.found: list[tuple[tuple[int, ...], list[int]]] = []
        drafter = drafter_of(llm)
        receive = drafter.on_proposals

        def on_proposals(rows: Any, proposals: dict[int, list[int]]) -> None:
            for row, proposed in proposals.items():
                if proposed and rows[row].status is not RequestStatus.FINISHED:
                    self.found.append((tuple(rows[row].token_ids), proposed))
            receive(rows, proposals)

        drafter.on_proposals = on_proposals  # type: ignore[method-assign]

    @property
    def longest_first(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """The order that costs least in plain torch, which computes beginnings of rows once."""
        return sorted(self.found, key=lambda found: len(found[0]), reverse=True)

    def assert_those_of(self, head: PlainHead, least: int) -> None:
        assert len(self.found) >= least
        assert max(len(proposed) for _, proposed in self.found) > 1
        for tokens, proposed in self.longest_first:
            assert head.propose(list(tokens), len(proposed)) == proposed


def answer_around_a_sleep(llm: LLM, level: int) -> Proposals:
    """Asserts that the proposer sleeps with the engine, and that the answers are the same before
    and after."""
    worker = llm._engine.core.executor._worker
    proposals = Proposals(llm)
    first = answers(llm)
    llm._engine.core.memory.set_sleep(level)
    assert bool(worker.draft_model.modules) == (level == 1)
    llm._engine.core.memory.set_sleep(0)
    assert answers(llm) == first
    return proposals


def assert_same_up_to_64_tokens(plain: LLM, llm: LLM) -> None:
    """Asserts equal answers up to the longest sequence that both engines allow."""
    params = GREEDY.__class__(temperature=0.0, max_tokens=61, ignore_eos=True)
    prompts = [[5, 6, 7], [80, 81, 82]]
    found = [
        [output.outputs[0].token_ids for output in each.generate(prompts, params)]
        for each in (plain, llm)
    ]
    assert found[0] == found[1] and len(found[0][0]) == 61
    assert drafter_of(llm).num_drafts > 0


def assert_memory_counts(plain: LLM, llm: LLM, least: int) -> None:
    """Asserts that the memory of the head counts: one layer next to four, and more than `least`
    bytes of weights."""
    blocks = [each._engine.core.limits.num_blocks for each in (plain, llm)]
    assert blocks[1] == blocks[0] * 4 // 5
    workers = [each._engine.core.executor._worker for each in (plain, llm)]
    own = workers[1].draft_model.nbytes
    assert own > least
    assert workers[1].load() == workers[0].load() + own


@pytest.fixture(scope="module")
def reference() -> dict[str, list[Any]]:
    with engine() as llm:
        return {"greedy": answers(llm), "drawn": answers(llm, DRAWN)}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the head of a name; each is made once."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("heads") / "head"
            made[name] = make(folder, model=NANO, **HEADS[name])
        return made[name]

    return find


@pytest.mark.parametrize("name", HEADS)
def test_proposals_equal_those_of_the_head(
    name: str, head: Any, reference: dict[str, list[Any]]
) -> None:
    path = head(name)
    with drafting(path, HEADS[name]["method"]) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference["greedy"]
        assert answers(llm, DRAWN) == reference["drawn"]
    proposals.assert_those_of(plain_head(path, NANO), 40)


@pytest.mark.parametrize("name", ["eagle", "eagle3 that knows some tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_the_same_in_every_configuration(
    way: str, name: str, head: Any, reference: dict[str, list[Any]]
) -> None:
    path = head(name)
    with drafting(path, HEADS[name]["method"], **WAYS[way]) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference["greedy"]
        assert answers(llm, DRAWN) == reference["drawn"]
        assert (llm._engine.core.scheduler.num_preemptions > 0) == (way == "scarce blocks")
    proposals.assert_those_of(plain_head(path, NANO), 25)


@pytest.mark.parametrize("name", ["eagle3 that reads other layers", "eagle3"])
def test_each_stage_passes_on_the_inputs_of_its_layers(
    name: str, head: Any, reference: dict[str, list[Any]]
) -> None:
    split = {"parallel__pipeline": 4, "scheduler__steps_in_flight": 3}
    with drafting(head(name), "eagle3", **split) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference["greedy"]
    proposals.assert_those_of(plain_head(head(name), NANO), 20)


@pytest.mark.parametrize(("name", "stages"), [("eagle", 1), ("eagle3", 1), ("eagle3", 2)])
def test_eagle_works_with_a_model_of_the_transformers_backend(
    name: str, stages: int, head: Any, reference: dict[str, list[Any]]
) -> None:
    ways = {"model__backend": "transformers", "parallel__pipeline": stages}
    with drafting(head(name), name, **ways) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference["greedy"]
    proposals.assert_those_of(plain_head(head(name), NANO), 20)


def test_a_head_borrows_the_embedding_of_the_text_model_in_a_wrapper(
    head: Any, reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    wrapper = str(shutil.copytree(NANO, tmp_path / "wrapper"))
    text = json.loads(Path(NANO, "config.json").read_text())
    parts = {"text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    named = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    Path(wrapper, "config.json").write_text(json.dumps({**named, **parts, **tied}))
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(Path(NANO, "model.safetensors")).items()
    }
    save_file(weights, Path(wrapper, "model.safetensors"), metadata={"format": "pt"})
    path = head("eagle")
    changes = {"drafts__method": "eagle", "drafts__model": {"path": path}}
    changes |= {"model__backend": "transformers", "cache__prefix_caching": False}
    with engine(wrapper, **changes) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == reference["greedy"]
    proposals.assert_those_of(plain_head(path, NANO), 20)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_works_with_a_model_with_experts(method: str, tmp_path: Path) -> None:
    path = make(tmp_path / "head", method, MOE)
    with engine(MOE) as plain:
        expected = answers(plain)
    changes = {"drafts__method": method, "drafts__model": {"path": path}}
    with engine(MOE, cache__prefix_caching=False, **changes) as llm:
        proposals = Proposals(llm)
        assert answers(llm) == expected
    proposals.assert_those_of(plain_head(path, MOE), 20)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_drafts_of_a_head_that_copies_are_accepted(name: str, tmp_path: Path) -> None:
    """Drafts of a head that copies are all accepted: it proposes the token that it reads, and the
    model, whose layers add nothing, repeats that token."""
    served = copying_model(tmp_path / "model")
    path = make(tmp_path / "head", name, served)
    spoil(path, lambda key, tensor: tensor * 0 if "o_proj" in key or "down" in key else tensor)
    weights = load_file(str(Path(path, "model.safetensors")))
    size = len(weights["fc.weight"])
    if name == "eagle":
        weights["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    else:
        weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, 2 * size)], 1)
        weights["lm_head.weight"] = load_file(str(Path(served, "model.safetensors")))[
            "model.embed_tokens.weight"
        ]
        weights["d2t"] = torch.zeros_like(weights["d2t"])
        weights["norm.weight"] = torch.ones_like(weights["norm.weight"])
    save_file(weights, str(Path(path, "model.safetensors")))
    with engine(served) as plain:
        expected = answers(plain)
    with engine(served, drafts__method=name, drafts__model={"path": path}) as llm:
        for _ in range(2):  # in the second round the prompts are in the cache
            assert answers(llm) == expected
        drafts = drafter_of(llm)
        assert drafts.num_drafts == drafts.num_accepted > 100


def copying_model(folder: Path) -> str:
    """Makes a nano whose layers add nothing: the most likely token is the one that it has read."""
    shutil.copytree(NANO, folder)
    spoil(
        str(folder), lambda key, tensor: tensor * 0 if "o_proj" in key or "down" in key else tensor
    )
    return str(folder)


def spoil(folder: str, change: Any) -> None:
    path = str(Path(folder, "model.safetensors"))
    weights = load_file(path)
    save_file({key: change(key, tensor) for key, tensor in weights.items()}, path)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_the_head_sleeps_with_the_engine(level: int, name: str, head: Any) -> None:
    with drafting(head(name), name) as llm:
        proposals = answer_around_a_sleep(llm, level)
    proposals.assert_those_of(plain_head(head(name), NANO), 40)


def test_tensors_shared_with_the_model_follow_new_weights(head: Any, tmp_path: Path) -> None:
    weights = load_file(str(Path(NANO, "model.safetensors")))
    turned = {key: -tensor if "embed" in key else tensor for key, tensor in weights.items()}
    shutil.copytree(NANO, tmp_path / "other")
    save_file(turned, str(tmp_path / "other" / "model.safetensors"), metadata={"format": "pt"})
    with drafting(head("eagle"), "eagle") as llm:
        proposals = Proposals(llm)
        llm.update_weights(turned)
        answers(llm)
    proposals.assert_those_of(PlainHead(head("eagle"), str(tmp_path / "other")), 20)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_answers_up_to_the_longest_sequence(depth: int, name: str, head: Any) -> None:
    ways = {"model__max_model_len": 64, "scheduler__steps_in_flight": depth}
    with engine(**ways) as plain, drafting(head(name), name, cache__block_tokens=4, **ways) as llm:
        assert_same_up_to_64_tokens(plain, llm)


def test_the_memory_of_the_head_counts(head: Any) -> None:
    stored = load_file(f"{head('eagle')}/model.safetensors").values()
    with engine() as plain, drafting(head("eagle"), "eagle") as llm:
        assert_memory_counts(plain, llm, sum(tensor.nbytes for tensor in stored))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("options", "lacks", "parts"),
    [
        ({"vocab_size": 300}, "", ["300 tokens", "model's has 320"]),
        ({"hidden_size": 64}, "", ["64", "128"]),
        ({}, "fc.weight", ["have no tensor 'fc.weight'"]),
        ({}, "post_attention_layernorm", ["have no tensor", "post_attention_layernorm"]),
        ({"intermediate_size": 100}, "", ["mlp", "shape"]),
    ],
)
def test_an_unsuitable_head_is_refused_by_name(
    method: str, options: dict[str, Any], lacks: str, parts: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path / "head", method, NANO, **options)
    if lacks:
        weights = load_file(f"{path}/model.safetensors")
        kept = {key: tensor for key, tensor in weights.items() if lacks not in key}
        save_file(kept, f"{path}/model.safetensors")
    with pytest.raises(ConfigError) as caught:
        drafting(path, method)
    text = str(caught.value)
    assert text.startswith(f"drafts.model={path!r}"), text
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("aux", [[1, 2], [0, 1, 3], [-2, 1, 2]])
def test_eagle3_with_layers_that_the_model_lacks_is_refused(aux: list[int], tmp_path: Path) -> None:
    path = make(tmp_path / "head", "eagle3", NANO, aux=aux)
    with pytest.raises(ConfigError, match=r"layers .* but the model has 4"):
        drafting(path, "eagle3")


def test_tokens_outside_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "head", "eagle3", NANO, vocab=100)
    spoil(path, lambda key, tensor: tensor + 300 if key == "d2t" else tensor)
    with pytest.raises(
        ConfigError, match=r"'d2t' names the tokens .* but the model's vocabulary has 320"
    ):
        drafting(path, "eagle3")


def test_a_family_without_a_token_embedding_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    tiny_models.make(folder, "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(NANO, name), folder)
    config = json.loads((folder / "config.json").read_text())
    size, vocab = config.get("n_embd", config.get("hidden_size")), config["vocab_size"]
    served = json.loads(Path(NANO, "config.json").read_text())
    like = tmp_path / "like"
    shutil.copytree(NANO, like)
    shape = {"hidden_size": size, "vocab_size": vocab, "head_dim": size // 4}
    (like / "config.json").write_text(json.dumps(served | shape))
    path = make(tmp_path / "head", "eagle", str(like))
    settings = {"drafts__method": "eagle", "drafts__model": {"path": path}}
    with pytest.raises(ConfigError, match=r"drafts\.model=.*have no tensor"):
        engine(str(folder), model__max_model_len=64, **settings)
    path = make(tmp_path / "own", "eagle", str(like), own=("embed_tokens", "lm_head"))
    settings = {"drafts__method": "eagle", "drafts__model": {"path": path}}
    with engine(str(folder), model__max_model_len=64, **settings) as llm:
        params = GREEDY.__class__(temperature=0.0, max_tokens=20, ignore_eos=True)
        llm.generate([[5, 6, 7]], params)
        assert drafter_of(llm).num_drafts
