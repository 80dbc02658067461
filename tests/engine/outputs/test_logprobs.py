"""Log probabilities of the whole path against log_softmax of transformers' float32 logits.

Each sampled token and each prompt position is reported once, for every way to split, schedule,
cache or interrupt the work. The values are from the model's own logits, or from the logits that are
sampled, which `processed` computes from transformers' logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from msgspec.structs import replace

from swell.cluster.text.params.sampling_params import SamplingParams
from swell.engine.wire import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from swell.worker.sample import logprobs as module
from swell.worker.sampler_wire import PromptLogprobs, SamplerParams, TokenLogprobs
from swell.worker.wire import ModelRunnerOutput, WorkerMessage
from tests.engine.engine_harness import engine
from tests.engine.outputs.test_token_exact import PROMPTS, SPLITS, Engine, tokens
from tests.pages.blocks import blocks
from tests.support.paths import ROOT
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

NEW_TOKENS = 9
TOLERANCE = 1e-4
WHOLE = tiny_models.VOCAB
"""Every token of the vocabulary."""
BIAS = {7: 30.0, 11: 30.0, 300: -100.0}
PARAMS = [
    SamplerParams(logprobs=3, prompt_logprobs=2),
    SamplerParams(temperature=0.9, seed=1),
    SamplerParams(temperature=0.9, seed=2, logprobs=0, logit_bias=BIAS),
    SamplerParams(temperature=1.2, seed=3, prompt_logprobs=0, repetition_penalty=1.4),
    SamplerParams(temperature=0.7, seed=4, logprobs=5, prompt_logprobs=4, presence_penalty=1.5),
    SamplerParams(prompt_logprobs=WHOLE),
    SamplerParams(temperature=1.0, seed=5, logprobs=1, top_k=3, allowed_token_ids=[5, 6, 7, 8]),
]
"""One set of parameters for each of `PROMPTS`."""
FILTERED = [
    SamplerParams(logprobs=3, prompt_logprobs=2, frequency_penalty=0.7),
    SamplerParams(temperature=0.9, seed=1, logprobs=4, top_p=0.8),
    SamplerParams(temperature=0.9, seed=2, logprobs=0, logit_bias=BIAS, min_p=0.05),
    SamplerParams(temperature=1.2, seed=3, logprobs=1, repetition_penalty=1.4),
    SamplerParams(
        temperature=0.7, seed=4, logprobs=5, prompt_logprobs=4, presence_penalty=1.5, top_k=20,
        top_p=0.9, min_p=0.01,
    ),
    SamplerParams(
        logprobs=20, prompt_logprobs=0, bad_words=[[5], [9]], allowed_token_ids=[*range(12)]
    ),
    SamplerParams(temperature=1.0, seed=5, logprobs=6, top_k=3, allowed_token_ids=[5, 6, 7, 8]),
]  # fmt: skip
"""The same for the modes in which processors change the values."""
CRAMPED = {"cache__memory_bytes": 8192 * 16, "cache__block_tokens": 4}
SETTINGS = {
    "depth 1": {"scheduler__steps_in_flight": 1},
    "depth 2": {"scheduler__steps_in_flight": 2},
    "depth 3, chunks of 7": {"scheduler__steps_in_flight": 3, "scheduler__max_chunk_tokens": 7},
    "chunks of 1": {"scheduler__max_chunk_tokens": 1},
    "a budget of 7": {"scheduler__max_tokens_per_step": 7},
    "preemption": {**CRAMPED, "scheduler__steps_in_flight": 2},
    "tensor 2": SPLITS["tensor 2"],
    "pipeline 2, chunks of 7": {**SPLITS["pipeline 2"], "scheduler__max_chunk_tokens": 7},
    "tensor 2 x pipeline 2": SPLITS["tensor 2 x pipeline 2"],
}


class Model:
    """A small model: its folder, and the log probabilities that transformers computes."""

    def __init__(self, folder: Path, family: str) -> None:
        tiny_models.make(folder, family)
        self.folder = folder
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns [T, V] float32: row i holds those of the token after the first i + 1 tokens."""
        return self._model(torch.tensor([token_ids])).logits[0].float()

    def values(self, request: EngineCoreRequest, answer: list[int], mode: str) -> torch.Tensor:
        """Returns [T, V]: the values of a mode, for the tokens of the prompt and of the answer."""
        known = [*request.prompt_token_ids, *request.output_token_ids, *answer]
        values = self.logits(known)
        if mode.startswith("processed_"):
            prompt_len = len(request.prompt_token_ids)
            values = torch.stack(
                [
                    row if position < prompt_len else processed(row, request, known[:position])
                    for position, row in enumerate(values, 1)
                ]
            )
        return values if mode.endswith("_logits") else values.log_softmax(-1)


def processed(logits: torch.Tensor, request: EngineCoreRequest, known: list[int]) -> torch.Tensor:
    """Returns logits [V] after penalties, bias, masks, temperature and filters, one after the
    other; `known` are the tokens before the sampled one."""
    params, x = request.sampler, logits.double()
    for token in set(known):
        x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
    for token, count in Counter(known[len(request.prompt_token_ids) :]).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x[[word[0] for word in params.bad_words if len(word) == 1]] = -math.inf
    if params.allowed_token_ids:
        kept = x[params.allowed_token_ids].clone()
        x[:] = -math.inf
        x[params.allowed_token_ids] = kept
    if not params.temperature:
        return x.float()
    x /= params.temperature
    x[x.softmax(0) < params.min_p * x.softmax(0).max()] = -math.inf
    order = x.argsort(descending=True, stable=True)
    if params.top_k:
        x[order[params.top_k :]] = -math.inf
    probabilities = x.softmax(0)[order]
    if params.top_p < 1:
        x[order[probabilities.cumsum(0) - probabilities >= params.top_p]] = -math.inf
    return x.float()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("models") / "llama", "llama-llama3")


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("models") / "gpt_neox", "gpt_neox")


def requests(prefix: str = "") -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            f"{prefix}{i}",
            prompt,
            params,
            NEW_TOKENS,
            skip_prefix_cache=params.prompt_logprobs is not None,
        )
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


def of_tokens(outputs: list[EngineCoreOutput]) -> list[TokenLogprobs]:
    return [e for output in outputs for e in output.extras if isinstance(e, TokenLogprobs)]


def of_prompt(outputs: list[EngineCoreOutput]) -> dict[int, TokenLogprobs]:
    """Returns the reported tokens of the prompt by position; values that are reported twice must be
    equal up to rounding."""
    found: dict[int, TokenLogprobs] = {}
    for output in outputs:
        for extra in output.extras:
            if not isinstance(extra, PromptLogprobs):
                continue
            columns = zip(extra.token_ids, extra.logprobs, extra.ranks, strict=True)
            for position, (ids, values, rank) in enumerate(columns, extra.start):
                first = found.setdefault(position, TokenLogprobs(ids, values, rank))
                assert (first.token_ids[0], len(first.token_ids)) == (ids[0], len(ids))
                assert first.logprobs == pytest.approx(values, abs=TOLERANCE)
    return found


def check_token(reported: TokenLogprobs, truth: torch.Tensor, token_id: int, top: int) -> None:
    """Checks a reported token; `truth` [V] are the log probabilities at the token's position."""
    assert reported.token_ids[0] == token_id
    assert len(reported.token_ids) == len(reported.logprobs) == 1 + top
    assert len(set(reported.token_ids[1:])) == top
    assert truth[reported.token_ids].tolist() == pytest.approx(reported.logprobs, abs=TOLERANCE)
    assert truth.topk(top).values.tolist() == pytest.approx(reported.logprobs[1:], abs=TOLERANCE)
    surely, maybe = ((truth > reported.logprobs[0] + sign * TOLERANCE).sum() for sign in (1, -1))
    assert 1 + surely <= reported.rank <= 1 + maybe


def check_answer(
    model: Model,
    request: EngineCoreRequest,
    outputs: list[EngineCoreOutput],
    mode: str = "raw_logprobs",
) -> list[int]:
    """Checks every token of the prompt and of the answer; returns the answer."""
    prompt, params, drawn = request.prompt_token_ids, request.sampler, tokens(outputs)
    known = [*prompt, *request.output_token_ids]
    truth = model.values(request, drawn, mode)
    reported = of_tokens(outputs)
    assert len(reported) == (0 if params.logprobs is None else len(drawn))
    for position, one in enumerate(reported, len(known)):
        check_token(one, truth[position - 1], drawn[position - len(known)], params.logprobs or 0)
    positions = of_prompt(outputs)
    wanted = range(1, 1 if params.prompt_logprobs is None else len(prompt))
    assert sorted(positions) == list(wanted)
    for position, one in positions.items():
        check_token(one, truth[position - 1], prompt[position], params.prompt_logprobs or 0)
    return drawn


def check_all(
    model: Model,
    submitted: Sequence[EngineCoreRequest],
    given: dict[str, list[EngineCoreOutput]],
    mode: str = "raw_logprobs",
) -> list[list[int]]:
    return [check_answer(model, request, given[request.request_id], mode) for request in submitted]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_token_is_reported_with_the_models_own_probability(
    setting: str, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is reported with the model's own probability; slices are smaller than prompts, so
    that each prompt has several."""
    monkeypatch.setattr(module, "SLICE_POSITIONS", 16)
    with Engine(llama.folder, **SETTINGS[setting]) as engine:
        answers = check_all(llama, requests(), engine.answer(requests()))
        assert all(len(answer) == NEW_TOKENS for answer in answers)
        assert (engine.core.scheduler.num_preemptions > 0) == (setting == "preemption")
        depth = SETTINGS[setting].get("scheduler__steps_in_flight")
        assert depth is None or max(engine.depths) == depth


@pytest.mark.parametrize("setting", ["depth 2", "tensor 2"])
def test_logprobs_of_a_model_of_the_transformers_backend(setting: str, generic: Model) -> None:
    with Engine(generic.folder, **SETTINGS[setting]) as engine:
        check_all(generic, requests(), engine.answer(requests()))


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        ("processed_logprobs", "depth 3, chunks of 7"),
        ("processed_logprobs", "tensor 2 x pipeline 2"),
        ("processed_logits", "preemption"),
        ("raw_logits", "depth 2"),
    ],
)
def test_the_mode_decides_which_values_are_reported(mode: str, setting: str, llama: Model) -> None:
    with Engine(llama.folder, **SETTINGS[setting], model__logprobs_mode=mode) as engine:
        check_modes(engine, llama, mode)


def test_processed_logprobs_of_a_model_of_the_transformers_backend(generic: Model) -> None:
    with Engine(generic.folder, model__logprobs_mode="processed_logprobs") as engine:
        check_modes(engine, generic, "processed_logprobs")


def check_modes(engine: Engine, model: Model, mode: str) -> None:
    submitted = [
        replace(request, sampler=params)
        for request, params in zip(requests(), FILTERED, strict=True)
    ]
    check_all(model, submitted, engine.answer(submitted), mode)


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each position, the probabilities of two tokens add up to 1."""
    monkeypatch.chdir(ROOT)
    (block,) = (b for b in blocks() if (b.page, b.language) == ("docs/guide/logprobs.md", "python"))
    names: dict[str, Any] = {}
    exec(block.code, names)
    answer = names["output"].outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) > 3
    for of_one in answer.logprobs:
        values = [token.logprob for token in of_one.values()]
        assert len(values) == 3
        assert sum(map(math.exp, values)) == pytest.approx(1)
        assert sorted(values)[0] == -math.inf
    assert answer.cumulative_logprob == pytest.approx(
        sum(of_one[t].logprob for t, of_one in zip(answer.token_ids, answer.logprobs, strict=True))
    )


def test_answers_are_not_ranked_by_logits() -> None:
    with engine(model__logprobs_mode="processed_logits") as llm:
        with pytest.raises(ValueError, match=r"best_of=2 .*model\.logprobs_mode=processed_logits"):
            llm.generate("count", SamplingParams(best_of=2))
        assert llm.generate("count", SamplingParams(n=2, best_of=2))


def test_prompts_in_the_prefix_cache_are_reported_too(llama: Model) -> None:
    with Engine(llama.folder) as engine:
        cold = check_all(llama, requests("cold"), engine.answer(requests("cold")))
        hits = engine.core.scheduler.kv.num_hit_tokens
        warm = check_all(llama, requests("warm"), engine.answer(requests("warm")))
        assert engine.core.scheduler.kv.num_hit_tokens > hits
        assert cold == warm


def test_requesting_logprobs_changes_no_token(llama: Model) -> None:
    silent = [
        EngineCoreRequest(
            str(i),
            prompt,
            SamplerParams(temperature=params.temperature, seed=params.seed),
            NEW_TOKENS,
        )
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    with_logprobs = [
        EngineCoreRequest(
            request.request_id,
            request.prompt_token_ids,
            SamplerParams(
                temperature=request.sampler.temperature,
                seed=request.sampler.seed,
                logprobs=2,
                prompt_logprobs=1,
            ),
            NEW_TOKENS,
            skip_prefix_cache=True,
        )
        for request in silent
    ]
    with Engine(llama.folder) as engine:
        quiet, loud = engine.answer(silent), engine.answer(with_logprobs)
    assert {i: tokens(outputs) for i, outputs in quiet.items()} == {
        i: tokens(outputs) for i, outputs in loud.items()
    }
    assert not any(output.extras for outputs in quiet.values() for output in outputs)


@pytest.mark.parametrize("setting", ["depth 2", "pipeline 2, chunks of 7"])
def test_a_resumed_answer_reports_its_own_tokens(setting: str, llama: Model) -> None:
    """A resumed answer reports its own tokens, and the whole prompt again."""
    with Engine(llama.folder, **SETTINGS[setting]) as engine:
        whole = check_all(llama, requests(), engine.answer(requests()))
        rest = [
            EngineCoreRequest(
                request.request_id,
                request.prompt_token_ids,
                request.sampler,
                NEW_TOKENS,
                output_token_ids=answer[:4],
                skip_prefix_cache=request.skip_prefix_cache,
            )
            for request, answer in zip(requests(), whole, strict=True)
        ]
        assert check_all(llama, rest, engine.answer(rest)) == [answer[4:] for answer in whole]


def test_logprobs_survive_encoding() -> None:
    """Log probabilities survive encoding: two kinds for one token, an impossible token, and an
    output without tokens."""
    reported = [
        PromptLogprobs(1, [[4, 5], [6, 7]], [[-0.5, -math.inf], [-1.0, -0.25]], [9, 2]),
        TokenLogprobs([8], [-math.inf], 320),
    ]
    of_worker = ModelRunnerOutput(3, [8], extras={0: reported, 4: reported[:1]})
    of_engine = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput("a", [8], extras=reported),
            EngineCoreOutput("b", [], extras=reported),
        ]
    )
    for message, kind in ((of_worker, WorkerMessage), (of_engine, EngineCoreOutputs)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
