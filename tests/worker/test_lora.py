"""A request with an adapter has the answer of a model into which the adapter was merged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.errors import BadRequest
from swell.engine.executor import ExecutorError
from swell.engine.wire import EngineCoreRequest
from swell.worker.lora import AdapterNotLoaded, AdapterSlots, NoAdapters
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step.captured_forward import CapturedForward
from swell.worker.wire import NewRequest, SchedulerOutput
from tests.engine.drafts.planted_drafts import plant
from tests.kernels.load import load_backend
from tests.support.device import DEVICE, on_device
from tests.support.weights import adapters
from tests.worker import tiny_models
from tests.worker.fixed_graphs import FixedGraphs

pytestmark = pytest.mark.slow

NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * length) % 300 + 3 for i in range(length)] for length in (3, 17, 40, 9)]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8, "alpha": 16},
    "attention": {"rank": 3, "alpha": 9, "targets": ["q_proj", "v_proj"]},
    "mixed": {
        "rank": 5,
        "alpha": 4,
        "targets": [*adapters.ATTENTION, *adapters.MLP],
        "rank_pattern": {"k_proj": 2, "down_proj": 16},
        "alpha_pattern": {"up_proj": 7.5},
        "use_rslora": True,
    },
    "mlp": {"rank": 1, "alpha": 1, "targets": ["down_proj", "gate_proj"]},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "llama-bias", "qwen3")},
    # With tied embeddings, a random model of these repeats its last token with each adapter.
    **{name: {"tie_word_embeddings": False} for name in ("gemma2", "gemma3")},
}
"""Families -> changes of their configs."""
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"scheduler.max_tokens_per_step": 8, "scheduler.max_rows": 4},
    "preemption": {"cache.block_tokens": 8, "cache.memory_bytes": 181_000},
    "tensor": {"parallel.tensor": 2},
    "tensor above the heads of K and V": {"parallel.tensor": 4},
    "pipeline": {"parallel.pipeline": 2, "scheduler.max_tokens_per_step": 16},
    "one step in flight": {"scheduler.steps_in_flight": 1, "scheduler.max_tokens_per_step": 16},
}


class Folders:
    """A model, its adapters, and the answers of the model with each of them merged into it."""

    def __init__(self, top: Path, family: str, **changes: Any) -> None:
        self.model = top / "model"
        model = tiny_models.make(self.model, family, **changes)
        for file in NANO.glob("tokenizer*"):
            shutil.copy(file, self.model)
        shapes = adapters.module_shapes(model)
        self.adapters = {
            name: str(adapters.make_adapter(top / name, shapes, seed=seed, **kind))
            for seed, (name, kind) in enumerate(KINDS.items())
        }
        self.reference = {"": greedy(model)}
        for name, folder in self.adapters.items():
            merged = transformers.AutoModelForCausalLM.from_pretrained(
                self.model, dtype=torch.float32
            ).eval()
            adapters.merge(merged, Path(folder))
            self.reference[name] = greedy(merged)

    def serve(self, **overrides: Any) -> LLM:
        options = {"lora.adapters": self.adapters, "cache.memory_bytes": 1 << 22, **overrides}
        return LLM(str(self.model), **on_device(options))


@torch.no_grad()
def greedy(model: Any) -> list[list[int]]:
    """Returns twelve greedy tokens for each of the prompts."""
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    top = tmp_path_factory.mktemp(request.param)
    return Folders(top, request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("llama"), "llama")


def test_adapters_equal_merged_weights(folders: Folders) -> None:
    """Answers equal those of merged weights: each adapter by itself, the plain model, and all of
    them in one batch."""
    assert len({str(answers) for answers in folders.reference.values()}) == 5, "all differ"
    with folders.serve() as llm:
        for name, expected in folders.reference.items():
            assert ids_of(llm.generate(PROMPTS, GREEDY, adapter=name)) == expected, name


@pytest.mark.parametrize("split", ["whole", "chunks", "tensor", "pipeline"])
@pytest.mark.parametrize("targets", ["all-linear", ["qkv_proj", "down_proj"]])
def test_adapters_of_matrices_that_are_stored_as_one(
    tmp_path: Path, targets: Any, split: str
) -> None:
    """phi3 stores queries, keys and values as one matrix, and so gate and up: an adapter has one
    pair of matrices for them."""
    model = tiny_models.make(tmp_path / "model", "phi3")
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    plain = greedy(model)
    shapes = adapters.module_shapes(model)
    folder = adapters.make_adapter(tmp_path / "adapter", shapes, seed=3, targets=targets)
    adapters.merge(model, folder)
    expected = greedy(model)
    assert expected != plain
    options = {"lora.adapters": {"one": str(folder)}, "cache.memory_bytes": 1 << 22}
    with LLM(str(tmp_path / "model"), **on_device({**options, **SPLITS[split]})) as llm:
        assert ids_of(llm.generate(PROMPTS, GREEDY, adapter="one")) == expected
        assert ids_of(llm.generate(PROMPTS, GREEDY)) == plain


@pytest.mark.parametrize("split", SPLITS)
def test_a_mixed_batch_equals_separate_batches(llama: Folders, split: str) -> None:
    names = [name for name in llama.reference for _ in PROMPTS]
    prompts = PROMPTS * len(llama.reference)
    expected = [answer for answers in llama.reference.values() for answer in answers]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(1)).tolist()
    with llama.serve(**SPLITS[split]) as llm:
        answers = llm.generate(
            [prompts[i] for i in order], GREEDY, adapter=[names[i] for i in order]
        )
        assert ids_of(answers) == [expected[i] for i in order]
        if split == "preemption":
            assert llm._engine.core.scheduler.num_preemptions > 0
        llm.check_idle()


@pytest.mark.skipif(DEVICE != "cpu", reason="steps are captured on CPU")
def test_steps_with_and_without_adapters_are_captured_separately(llama: Folders) -> None:
    load_backend("cpu", "graph")
    with llama.serve() as llm:
        names = ["all", "", "mlp", ""]
        expected = [llama.reference[name][at] for at, name in enumerate(names)]
        assert ids_of(llm.generate(PROMPTS, GREEDY, adapter=names)) == expected
        forward = llm._engine.core.executor._worker.runner._model_step
        assert isinstance(forward, CapturedForward)
        assert True in [key.has_adapters for key in forward._captured]
        before = forward.progress
        assert ids_of(llm.generate(PROMPTS, GREEDY)) == llama.reference[""]
        assert ids_of(llm.generate(PROMPTS, GREEDY, adapter=names)) == expected
        assert sorted(key.has_adapters for key in forward._captured) == [False, True]
        assert forward.progress > before


@pytest.mark.skipif(DEVICE != "cpu", reason="the graphs of the fixture are those of a CPU")
def test_padded_steps_with_adapters_are_captured(llama: Folders, fixed_graphs: FixedGraphs) -> None:
    """While three rows decode, the longest prompt is computed token by token: a step has four
    tokens but only three samples, and its bucket has four of both."""
    names = ["all", "mixed", "mlp", "attention"]
    with llama.serve(**{"scheduler.max_tokens_per_step": 4, "scheduler.max_rows": 4}) as llm:
        expected = [llama.reference[name][at] for at, name in enumerate(names)]
        assert ids_of(llm.generate(PROMPTS, GREEDY, adapter=names)) == expected
        short = [llama.reference[name][0] for name in names[:3]]
        assert ids_of(llm.generate(PROMPTS[:1] * 3, GREEDY, adapter=names[:3])) == short
        forward = llm._engine.core.executor._worker.runner._model_step
        buckets = [key.bucket for key in forward._captured if key.has_adapters]
    assert (4, 4, 4, 1) in buckets, "steps of three rows are padded to four"


def name_of(core: EngineCoreRequest) -> str:
    return core.adapter.name if core.adapter else ""


def test_rows_with_drafts(llama: Folders) -> None:
    """A row with drafts has several samples, and its adapter applies to each."""
    names = [name for name in llama.reference for _ in PROMPTS]
    expected = [answer for answers in llama.reference.values() for answer in answers]
    known = {
        (name, *prompt): answer
        for name, prompt, answer in zip(
            names, PROMPTS * len(llama.reference), expected, strict=True
        )
    }
    options = {"drafts.method": "ngram", "drafts.max_step_tokens": 256}
    with llama.serve(**options) as llm:
        drafter = plant(
            llm._engine.core, "mixed", lambda core: known[name_of(core), *core.prompt_token_ids]
        )
        answers = llm.generate(PROMPTS * len(llama.reference), GREEDY, adapter=names)
        assert ids_of(answers) == expected
        assert 0 < drafter.num_accepted < drafter.num_drafts


def test_rows_with_a_draft_model(llama: Folders) -> None:
    """A draft model runs without adapters: it is right where the request has none, and changes no
    answer."""
    names = [name for name in llama.reference for _ in PROMPTS]
    expected = [answer for answers in llama.reference.values() for answer in answers]
    small = {"path": str(llama.model)}
    options = {"drafts.method": "model", "drafts.model": small, "drafts.max_step_tokens": 256}
    with llama.serve(**options) as llm:
        drafter = llm._engine.core.scheduler.drafter
        assert ids_of(llm.generate(PROMPTS, GREEDY)) == llama.reference[""]
        assert 0 < drafter.num_accepted == drafter.num_drafts
        answers = llm.generate(PROMPTS * len(llama.reference), GREEDY, adapter=names)
        assert ids_of(answers) == expected
        assert drafter.num_accepted < drafter.num_drafts


def test_the_prefix_cache_distinguishes_adapters(llama: Folders) -> None:
    with llama.serve(**{"cache.block_tokens": 8}) as llm:
        for again in (0, 32):
            for name, expected in llama.reference.items():
                (output,) = llm.generate([PROMPTS[2]], GREEDY, adapter=name)
                assert ids_of([output]) == [expected[2]], (name, again)
                assert output.num_cached_tokens == again, name


def test_drawn_answers_and_logprobs_equal_those_of_merged_weights(llama: Folders) -> None:
    """The log probabilities of tokens and of the prompt are those of merged weights."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, prompt_logprobs=2)
    merged = transformers.AutoModelForCausalLM.from_pretrained(llama.model, dtype=torch.float32)
    adapters.merge(merged.eval(), Path(llama.adapters["mixed"]))
    with torch.no_grad():
        expected = merged(torch.tensor([PROMPTS[1]])).logits[0].log_softmax(-1)
    with llama.serve() as llm:
        (output,) = llm.generate([PROMPTS[1]], params, adapter="mixed")
        plain = llm.generate([PROMPTS[1]], params)[0]
    for position, found in enumerate((output.prompt_logprobs or [])[1:], 1):
        assert found is not None
        for token, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-3)
    assert output.prompt_logprobs != plain.prompt_logprobs


@pytest.mark.skipif(DEVICE != "cpu", reason="the backend of the CPU computes rows apart")
def test_the_output_of_an_adapter_has_the_same_bits_in_every_batch(llama: Folders) -> None:
    """An adapter's contribution has the same bits in every batch, so that a request has the same
    answer if it continues elsewhere among other requests."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    with llama.serve(**{"cache.prefix_caching": False}) as llm:
        names = [name for name in llama.reference for _ in PROMPTS]
        together = llm.generate(PROMPTS * len(llama.reference), params, adapter=names)
        for index, name in enumerate(names):
            (alone,) = llm.generate([PROMPTS[index % len(PROMPTS)]], params, adapter=name)
            got, own = together[index].outputs[0], alone.outputs[0]
            assert got.token_ids == own.token_ids
            assert got.cumulative_logprob == own.cumulative_logprob


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_adapters_equal_merged_weights(
    llama: Folders, dtype: str, tmp_path: Path
) -> None:
    """Adapters are converted to the model's dtype; stored ones may have 16 bits."""
    shapes = adapters.module_shapes(transformers.AutoModelForCausalLM.from_pretrained(llama.model))
    stored = adapters.make_adapter(tmp_path / "half", shapes, dtype=torch.bfloat16)
    folders = {"half": str(stored), **llama.adapters}
    with llama.serve(**{"model.dtype": dtype, "lora.adapters": folders}) as llm:
        names = ["half", "all", ""]
        answers = ids_of(llm.generate([PROMPTS[2]] * 3, GREEDY, adapter=names))
        assert len({str(answer) for answer in answers}) == 3
        for name, answer in zip(names, answers, strict=True):
            assert ids_of(llm.generate([PROMPTS[2]], GREEDY, adapter=name)) == [answer]


def test_only_adapters_of_the_configuration_answer(llama: Folders) -> None:
    with llama.serve() as llm:
        with pytest.raises(BadRequest, match=r"'none' is not loaded; loaded: 'all'"):
            llm.generate([PROMPTS[0]], GREEDY, adapter="none")
        with pytest.raises(ValueError, match="2 adapters for 1 prompts"):
            llm.generate([PROMPTS[0]], GREEDY, adapter=["all", "mlp"])


def altered(shapes: dict[str, tuple[int, int]], **changes: Any) -> dict[str, tuple[int, int]]:
    return {name: changes.get(name.rpartition(".")[2], shape) for name, shape in shapes.items()}


def test_an_adapter_that_does_not_fit_is_refused_at_start(llama: Folders, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.model)
    shapes = adapters.module_shapes(model)
    more = {name.replace("layers.3", "layers.4"): shape for name, shape in shapes.items()}
    wrong = {
        "has 128 inputs and 64 outputs": altered(shapes, q_proj=(64, 128)),
        "has 96 inputs and 128 outputs": altered(shapes, down_proj=(128, 96)),
        "it adapts 'model.layers.4": {**shapes, **more},
        "the weights have no 'model.layers.3": {
            name: shape for name, shape in shapes.items() if "layers.3" not in name
        },
        "it adapts 'lm_head'": {**shapes, "lm_head": (tiny_models.VOCAB, 128)},
    }
    for split in ({}, {"parallel.pipeline": 2}):
        for number, (text, other) in enumerate(wrong.items()):
            folder = adapters.make_adapter(tmp_path / str(number), other)
            with pytest.raises((ValueError, ExecutorError), match=text) as caught:
                llama.serve(**{"lora.adapters": {"mine": str(folder)}, **split})
            assert "'mine'" in str(caught.value)


def test_nan_weights_are_refused_at_start(llama: Folders, tmp_path: Path) -> None:
    shapes = adapters.module_shapes(transformers.AutoModelForCausalLM.from_pretrained(llama.model))
    folder = adapters.make_adapter(tmp_path, shapes)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises((ValueError, ExecutorError), match="contain NaN or infinity"):
        llama.serve(**{"lora.adapters": {"mine": str(folder)}})


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_models_without_lora_support_refuse_adapters(tmp_path: Path, family: str) -> None:
    model = tiny_models.make(tmp_path / "model", family)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    shapes = {name: s for name, s in adapters.module_shapes(model).items() if "attn" in name}
    folder = adapters.make_adapter(tmp_path / "mine", shapes or {"h.0.attn": (4, 4)})
    with pytest.raises((ValueError, ExecutorError), match="does not support adapters"):
        LLM(str(tmp_path / "model"), **{"lora.adapters": {"mine": str(folder)}})


def row(slot: int, adapter: str) -> NewRequest:
    return NewRequest(slot, [0], 1, [0], SamplerParams(), adapter=adapter)


class Loaded(NoAdapters):
    """An `Adapters` stub with two adapters without layers."""

    count = 2

    def number_of(self, digest: str) -> int | None:
        return {"a": 0, "b": 1}[digest] if digest in ("a", "b") else super().number_of(digest)


def plan(slots: list[int], num_tokens: list[int], samples: list[bool]) -> SchedulerOutput:
    starts = [0] * len(slots)
    return SchedulerOutput(1, slots=slots, starts=starts, num_tokens=num_tokens, samples=samples)


def test_slots_have_the_adapters_of_their_requests() -> None:
    slots = AdapterSlots(Loaded(), 8, torch.device("cpu"))
    slots.add_request(row(3, "b"))
    slots.add_request(row(0, "a"))
    slots.add_request(row(1, ""))
    found = slots.tokens(plan([0, 1, 3], [1, 2, 3], [False, True, True]))
    assert found is not None and found.num_tokens == 6
    everything, sampled = found.among(6), found.among(2)
    assert everything.groups == [(0, 0, 1), (1, 1, 4)]
    assert everything.tokens[:4].tolist() == [0, 3, 4, 5]
    assert everything.groups_tensor.tolist() == [2, 0, 0, 1, 1, 1, 4]
    assert sampled.groups == [(1, 0, 1)] and sampled.tokens[0] == 1
    assert sampled.groups_tensor[0] == 1
    none = slots.tokens(plan([3], [4], [False]))
    assert none is not None and none.among(0).groups == [] and none.among(4).groups == [(1, 0, 4)]
    assert slots.tokens(plan([1], [1], [True])) is None
    with pytest.raises(AdapterNotLoaded, match="the adapter c is not loaded"):
        slots.add_request(row(3, "c"))
    assert slots.tokens(plan([3], [1], [True])) is None
