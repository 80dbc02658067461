"""A prompt of embeddings has the answer of transformers with `inputs_embeds`; the embeddings of
tokens have the answer of the tokens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.prompt_embeds import EmbedsPrompts
from swell.worker.sample.sampler import Sampler
from swell.worker.sampler_wire import PromptEmbeds, SamplerParams
from swell.worker.step.failed_rows import NON_REQUEST_ERRORS
from swell.worker.step.prompt_embeds import PromptEmbedsTable
from swell.worker.wire import NewRequest, SchedulerOutput
from tests.engine.drafts.planted_drafts import Teacher, plant
from tests.support.device import on_device
from tests.support.embeds import prompt_of
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "llama-tied", "mixtral", "gpt2", "gemma2", "gemma3", "opt", "cohere"]
LENGTHS = (3, 17, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
SPLITS: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler.max_tokens_per_step": 8, "scheduler.max_rows": 4},
    "preemption": {"cache.block_tokens": 8, "cache.memory_bytes": 181_000},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2, "scheduler.max_tokens_per_step": 16},
    "one step in flight": {"scheduler.steps_in_flight": 1, "scheduler.max_tokens_per_step": 16},
    "three steps in flight": {"scheduler.steps_in_flight": 3, "scheduler.max_tokens_per_step": 16},
}


def make(folder: Path, family: str) -> None:
    tiny_models.make(folder, family)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


@contextmanager
def serving(folder: Path, **overrides: Any) -> Iterator[LLM]:
    options = {"model.prompt_embeds": True, "cache.memory_bytes": 1 << 22, **overrides}
    with LLM(str(folder), **on_device(options)) as llm:
        yield llm


def noise(length: int, width: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, width, generator=generator) * scale


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_answers_from_embeddings_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    model = reference(tmp_path)
    table = model.get_input_embeddings()
    scale = float(table.weight.std())
    given = [noise(length, table.weight.shape[1], scale) for length in LENGTHS]
    expected = []
    for embeds in given:
        out = model.generate(
            inputs_embeds=embeds[None],
            attention_mask=torch.ones(1, len(embeds), dtype=torch.long),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        expected.append(out[0].tolist())
    with serving(tmp_path, **{"scheduler.max_tokens_per_step": 16}) as llm:
        assert ids_of(llm.generate(EmbedsPrompts(map(prompt_of, given)), GREEDY)) == expected


@pytest.mark.parametrize(
    ("family", "split"),
    [*(("llama", split) for split in SPLITS), ("gpt_neox", "tensor"), ("gpt_neox", "pipeline")],
)
def test_embeddings_of_tokens_yield_the_same_answer_as_the_tokens(
    tmp_path: Path, family: str, split: str
) -> None:
    """Embeddings of tokens have the answers of the tokens, for every schedule and split, next to
    prompts of tokens, and sampled with a seed."""
    make(tmp_path, family)
    table = reference(tmp_path).get_input_embeddings().weight.detach()
    tokens = [[(7 * i + 3 * length) % 300 + 3 for i in range(length)] for length in LENGTHS]
    with serving(tmp_path, **SPLITS[split]) as llm:
        expected = llm.generate(tokens, DRAWN)
        embeds = EmbedsPrompts(prompt_of(table[ids]) for ids in tokens)
        answers = llm.generate(embeds, DRAWN)
        again = llm.generate(embeds, DRAWN)
        assert ids_of(llm.generate(tokens, DRAWN)) == ids_of(expected)
        if split == "preemption":
            assert llm._engine.core.scheduler.num_preemptions > 0
    assert ids_of(answers) == ids_of(again) == ids_of(expected)
    for one, other in zip(answers, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(
            other.outputs[0].cumulative_logprob, abs=1e-4
        )


def test_rows_with_drafts(tmp_path: Path) -> None:
    """Rows with drafts work, also where a step computes the last embedding and the drafts after
    it."""
    make(tmp_path, "llama")
    embeds = EmbedsPrompts(prompt_of(noise(length, 128, 0.2)) for length in (1, *LENGTHS))
    teacher = Teacher()
    with serving(tmp_path, **{"drafts.method": "ngram", "cache.prefix_caching": False}) as llm:
        teacher.watch(llm._engine.core)
        drafter = plant(llm._engine.core, "mixed", teacher)
        expected = llm.generate(embeds, DRAWN)
        assert drafter.num_drafts == 0, "the answers are not known yet"
        answers = llm.generate(embeds, DRAWN)
        assert 0 < drafter.num_accepted < drafter.num_drafts
    assert ids_of(answers) == ids_of(expected)


def test_rows_with_a_draft_model(tmp_path: Path) -> None:
    """Rows with a draft model work; the draft model sees other tokens in the places of the
    embeddings."""
    make(tmp_path, "llama")
    embeds = EmbedsPrompts(prompt_of(noise(length, 128, 0.2)) for length in (1, *LENGTHS))
    with serving(tmp_path) as plain:
        expected = plain.generate(embeds, DRAWN)
    small = {"path": str(tmp_path)}
    with serving(tmp_path, **{"drafts.method": "model", "drafts.model": small}) as llm:
        assert ids_of(llm.generate(embeds, DRAWN)) == ids_of(expected)
        assert ids_of(llm.generate(embeds, DRAWN)) == ids_of(expected)
        assert llm._engine.core.scheduler.drafter.num_drafts


def test_the_prefix_cache_distinguishes_embeddings(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    first, other = noise(40, 128, 0.2), noise(40, 128, 0.2) + 0.1
    with serving(tmp_path, **{"cache.block_tokens": 8}) as llm:

        def answer(prompt: Any) -> tuple[list[list[int]], int]:
            (output,) = llm.generate(prompt, GREEDY)
            return ids_of([output]), output.num_cached_tokens

        one, cached = answer(EmbedsPrompts([prompt_of(first)]))
        assert cached == 0
        two, cached = answer(EmbedsPrompts([prompt_of(other)]))
        assert cached == 0 and two != one
        three, cached = answer([[0] * 40])
        assert cached == 0 and three != one
        assert answer(EmbedsPrompts([prompt_of(first)])) == (one, 32)
        assert answer(EmbedsPrompts([prompt_of(other)])) == (two, 32)
        assert answer([[0] * 40]) == (three, 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    make(tmp_path, "llama")
    embeds = noise(20, 128, 0.2).to(dtype)
    with serving(tmp_path) as llm:
        half = llm.generate(EmbedsPrompts([prompt_of(embeds)]), GREEDY)
        whole = llm.generate(EmbedsPrompts([prompt_of(embeds.float())]), GREEDY)
    assert ids_of(half) == ids_of(whole)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
    ],
)
def test_parameters_that_need_token_ids_are_refused(
    tmp_path: Path, params: dict[str, Any], name: str
) -> None:
    make(tmp_path, "llama")
    with serving(tmp_path) as llm, pytest.raises(BadRequest, match=name):
        llm.generate(EmbedsPrompts([prompt_of(noise(3, 128))]), SamplingParams(**params))


def test_embeddings_are_accepted_only_if_configured(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    prompt = EmbedsPrompts([prompt_of(noise(3, 128))])
    off = {"model.prompt_embeds": False}
    with serving(tmp_path, **off) as llm, pytest.raises(BadRequest, match="set model"):
        llm.generate(prompt, GREEDY)
    with serving(tmp_path) as llm:
        with pytest.raises(BadRequest, match="128"):
            llm.generate(EmbedsPrompts([prompt_of(noise(3, 64))]), GREEDY)
        with pytest.raises(BadRequest, match="256"):
            llm.generate(EmbedsPrompts([prompt_of(noise(400, 128))]), GREEDY)
        assert len(llm.generate(prompt, GREEDY)) == 1


def row(slot: int, tokens: int, embeds: torch.Tensor | None) -> NewRequest:
    given = None
    if embeds is not None:
        given = PromptEmbeds("F32", embeds.shape[1], embeds.numpy().tobytes())
    return NewRequest(slot, [0] * tokens, tokens, [0], SamplerParams(), prompt_embeds=given)


def test_a_table_returns_the_part_of_each_step_and_keeps_nothing() -> None:
    table = PromptEmbedsTable(4, torch.device("cpu"), is_first_stage=True)
    one, two = noise(6, 4), noise(3, 4)
    table.add_request(row(5, 6, one))
    table.add_request(row(2, 3, two))
    step = SchedulerOutput(1, slots=[0, 5, 2], starts=[9, 0, 0], num_tokens=[1, 4, 3])
    part = table.override(step)
    assert part is not None and part.indices.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert torch.equal(part.values, torch.cat([one[:4], two])) and len(table) == 1
    x = part.put_into(torch.zeros(8, 4))
    assert torch.equal(x[1:5], one[:4]) and not x[0].any()
    part = table.override(SchedulerOutput(2, slots=[5], starts=[4], num_tokens=[7]))
    assert part is not None and part.indices.tolist() == [0, 1] and len(table) == 0
    assert table.override(SchedulerOutput(3, slots=[5], starts=[11], num_tokens=[1])) is None
    table.add_request(row(5, 6, one))
    table.add_request(row(5, 6, None))
    assert len(table) == 0, "another request has the slot"


def test_a_cached_prefix_needs_no_embeddings() -> None:
    embeds = PromptEmbeds("F32", 4, noise(6, 4).numpy().tobytes())
    assert embeds.after(0) == embeds and embeds.after(6) is None
    rest = embeds.after(4)
    assert rest is not None and (rest.first, rest.num_tokens) == (4, 2)
    table = PromptEmbedsTable(4, torch.device("cpu"), is_first_stage=True)
    table.add_request(NewRequest(0, [0] * 6, 6, [0], SamplerParams(), prompt_embeds=rest))
    part = table.override(SchedulerOutput(1, slots=[0], starts=[4], num_tokens=[1]))
    assert part is not None and torch.equal(part.values, noise(6, 4)[4:5])
    part = table.override(SchedulerOutput(2, slots=[0], starts=[5], num_tokens=[1]))
    assert part is not None and torch.equal(part.values, noise(6, 4)[5:]) and len(table) == 0


def test_a_refused_request_changes_no_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused parameter changes no embedding: the hashes of its blocks are those of the
    embeddings, and another request finds them."""
    make(tmp_path, "llama")
    prompt = EmbedsPrompts([prompt_of(noise(40, 128, 0.2))])
    with serving(tmp_path, **{"cache.block_tokens": 8}) as llm:
        expected = ids_of(llm.generate(prompt, GREEDY))
    with serving(tmp_path, **{"cache.block_tokens": 8}) as llm:
        own, refused = Sampler.add_request, []

        def refuse_once(sampler: Sampler, row: NewRequest) -> None:
            if not refused:
                refused.append(row.slot)
                raise ValueError("this one")
            own(sampler, row)

        monkeypatch.setattr(Sampler, "add_request", refuse_once)
        monkeypatch.setattr(llm._engine.core.scheduler.kv, "evict_computed", lambda request: None)
        (failed,) = llm.generate(prompt, GREEDY)
        assert failed.outputs[0].finish_reason == "error" and refused
        (again,) = llm.generate(prompt, GREEDY)
        assert again.num_cached_tokens == 32 and ids_of([again]) == expected


def test_a_lack_of_device_memory_is_not_blamed_on_a_request(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    assert torch.OutOfMemoryError in NON_REQUEST_ERRORS
    table = PromptEmbedsTable(4, torch.device("cpu"), is_first_stage=True)
    table._read = raise_out_of_memory  # type: ignore[method-assign]
    with pytest.raises(NON_REQUEST_ERRORS):
        table.add_request(row(0, 3, noise(3, 4)))


def raise_out_of_memory(given: PromptEmbeds) -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")


def test_every_stage_refuses_the_same_requests() -> None:
    for is_first in (True, False):
        table = PromptEmbedsTable(4, torch.device("cpu"), is_first_stage=is_first)
        for wrong in (row(0, 3, noise(3, 5)), row(0, 4, noise(3, 4))):
            with pytest.raises(ValueError, match="prompt_embeds"):
                table.add_request(wrong)
        table.add_request(row(0, 3, noise(3, 4)))
        assert len(table) == int(is_first)
