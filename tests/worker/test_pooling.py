"""The vectors of pooling models equal those of transformers, for any split of the work into
steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swell.configs.schema import ConfigError, load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import Activation, PooledValues, PoolingParams, SamplerParams
from tests.support.device import is_enough, on_device
from tests.support.weights.pooled_models import ENCODERS, VOCABULARY, make, pooled

pytestmark = pytest.mark.slow

LENGTHS = (1, 7, 30, 100, 16, 17, 40, 128, 3)
TOLERANCE = 1e-5
MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}


def prompts(seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(5, len(VOCABULARY), size=n).tolist() for n in LENGTHS]


def start(folder: Path, **settings: Any) -> EngineCore:
    settings = on_device({"cache.memory_bytes": 2_000_000, **settings})
    config = load(str(folder), {"parallel.executor": "inproc", **settings})
    executor = build_executor(config)
    return EngineCore(config, executor, executor.start())


def run(
    core: EngineCore, texts: list[list[int]], params: PoolingParams | None = None, **fields: Any
) -> list[Any]:
    """Returns the vectors of all texts, each with the cached tokens of its request."""
    sampler = SamplerParams(pooling=params or PoolingParams())
    for index, text in enumerate(texts):
        request = EngineCoreRequest(str(index), text, sampler, 0, **fields)
        assert core.add_request(request, b"client") is None
    found = {}
    while core.has_work:
        for outputs in core.step().values():
            for output in outputs:
                assert output.finish_reason is FinishReason.STOP, output
                assert not output.new_token_ids
                (extra,) = output.extras
                assert isinstance(extra, PooledValues)
                vector = torch.tensor(np.frombuffer(extra.values, dtype="<f4"))
                found[output.request_id] = vector, output.num_cached_tokens
    core.check_idle()
    return [found[str(index)] for index in range(len(texts))]


def close(got: list[Any], wanted: list[torch.Tensor]) -> None:
    for (vector, _), right in zip(got, wanted, strict=True):
        torch.testing.assert_close(vector, right, rtol=1e-5, atol=TOLERANCE)


SPLITS = {
    "whole": {},
    "chunks": {"scheduler.max_tokens_per_step": 48, "scheduler.max_chunk_tokens": 11},
    "few rows": {"scheduler.max_rows": 2, "scheduler.steps_in_flight": 4},
    "tensor": {"parallel.tensor": 2, "scheduler.max_tokens_per_step": 130},
}
DECODER_SPLITS = {
    "pipeline": {"parallel.pipeline": 2, "scheduler.max_tokens_per_step": 48},
    "no prefix cache": {"cache.prefix_caching": False, "scheduler.max_tokens_per_step": 48},
}


@pytest.mark.parametrize("method", MODES)
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen3", "llama"])
def test_vectors_equal_those_of_transformers(tmp_path, family, method):
    """Vectors equal those of transformers for every split; where blocks are scarce, some requests
    are preempted, too."""
    model = make(tmp_path, family, modes={f"pooling_mode_{MODES[method]}": True})
    texts = prompts()
    wanted = [pooled(model, method, text) for text in texts]
    splits = SPLITS if family in ENCODERS else {**SPLITS, **DECODER_SPLITS}
    for name, settings in splits.items():
        if not is_enough(settings):
            continue
        if family in ENCODERS and name == "chunks":  # a text of an encoder must fit into a step
            settings = {**settings, "scheduler.max_tokens_per_step": 128}
        core = start(tmp_path, **settings)
        try:
            close(run(core, texts, skip_prefix_cache=method != "last"), wanted)
        finally:
            core.shutdown()


def test_a_prefix_is_computed_once(tmp_path):
    model = make(tmp_path, "qwen3", modes={"pooling_mode": "lasttoken"})
    prefix, texts = prompts()[7][:64], prompts(1)[:3]
    texts = [prefix + text for text in texts]
    wanted = [pooled(model, "last", text) for text in texts]
    core = start(tmp_path)
    try:
        first, again = run(core, texts), run(core, texts)
    finally:
        core.shutdown()
    close(first, wanted)
    close(again, wanted)
    assert [cached for _, cached in again] == [64, 64, 80]
    assert [cached for _, cached in first] == [0, 64, 64]


def test_preempted_requests_return_the_same_vectors(tmp_path):
    """Preempted requests have the same vectors: sums of earlier steps are not counted twice."""
    model = make(tmp_path, "qwen3", modes={"pooling_mode": "mean"})
    texts = [prompts(seed)[3] for seed in range(6)]
    layers, kv_heads, head_dim = 3, 2, 16
    block_bytes = 2 * layers * kv_heads * head_dim * 16 * 4
    core = start(
        tmp_path,
        **{"cache.memory_bytes": 15 * block_bytes, "scheduler.max_tokens_per_step": 24},
    )
    wanted = [pooled(model, "mean", text) for text in texts]
    scheduler = core.scheduler
    try:
        sampler = SamplerParams(pooling=PoolingParams())
        for index, text in enumerate(texts):
            request = EngineCoreRequest(str(index), text, sampler, 0, skip_prefix_cache=True)
            core.add_request(request, b"client")
        found: dict[str, Any] = {}
        steps = 0
        while core.has_work:
            steps += 1
            if steps == 4:  # a chunk of the first request has been read
                core.discard_steps_in_flight()
            for outputs in core.step().values():
                for output in outputs:
                    values = np.frombuffer(output.extras[0].values, dtype="<f4")
                    found[output.request_id] = torch.tensor(values), 0
        assert scheduler.num_preemptions > 0
    finally:
        core.shutdown()
    close([found[str(index)] for index in range(len(texts))], wanted)


@pytest.mark.parametrize("activation", Activation)
def test_dimensions_and_activations(tmp_path, activation):
    model = make(tmp_path, "bert", modes={"pooling_mode": "cls"}, dense=(24, "Tanh"))
    texts = prompts()
    core = start(tmp_path)
    try:
        got = run(core, texts, PoolingParams(activation, dimensions=10))
        whole = run(core, texts, PoolingParams(activation))
    finally:
        core.shutdown()
    apply = {
        Activation.NONE: lambda x: x,
        Activation.NORMALIZE: lambda x: x / x.norm(),
        Activation.SIGMOID: torch.sigmoid,
        Activation.SOFTMAX: lambda x: torch.softmax(x, -1),
    }[activation]
    with torch.no_grad():
        values = [torch.tanh(model.dense(pooled(model, "cls", text))) for text in texts]
    close(whole, [apply(value) for value in values])
    close(got, [apply(value[:10]) for value in values])


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3", "llama"])
@pytest.mark.parametrize("tensor", [1, 2])
@torch.no_grad()
def test_classifiers_equal_transformers(tmp_path, family, tensor):
    model = make(tmp_path, family, head="ForSequenceClassification", num_labels=3)
    texts = prompts()
    core = start(tmp_path, **{"parallel.tensor": tensor})
    try:
        got = run(core, texts)
    finally:
        core.shutdown()
    close(got, [model(torch.tensor([text])).logits[0] for text in texts])


@torch.no_grad()
def test_segments_of_pairs_are_computed_with_single_texts_in_a_batch(tmp_path):
    """Segments of pairs work next to single texts: a slot has a pair, then a text, then a pair with
    another boundary."""
    model = make(tmp_path, "bert", head="ForSequenceClassification", num_labels=2)
    core = start(tmp_path, **{"scheduler.max_rows": 3})
    texts = prompts() * 2
    starts = [0, 3, 11, 50, 0, 0, 20, 127, 1, 1, 0, 29, 0, 9, 9, 0, 1, 0]
    starts[0] = starts[9] = 0  # texts of one token
    try:
        for index, (text, at) in enumerate(zip(texts, starts, strict=True)):
            sampler = SamplerParams(pooling=PoolingParams(segment_start=at))
            core.add_request(EngineCoreRequest(str(index), text, sampler, 0), b"client")
        found: dict[str, Any] = {}
        while core.has_work:
            for outputs in core.step().values():
                for output in outputs:
                    values = np.frombuffer(output.extras[0].values, dtype="<f4")
                    found[output.request_id] = torch.tensor(values), 0
    finally:
        core.shutdown()
    wanted = []
    for text, at in zip(texts, starts, strict=True):
        types = torch.zeros(1, len(text), dtype=torch.long)
        types[0, at or len(text) :] = 1
        wanted.append(model(torch.tensor([text]), token_type_ids=types).logits[0])
    close([found[str(index)] for index in range(len(texts))], wanted)


def test_unsupported_pooling_requests_are_refused(tmp_path):
    make(tmp_path, "bert", modes={"pooling_mode": "cls"})
    core = start(tmp_path, **{"scheduler.max_tokens_per_step": 100})

    def refusal(sampler: SamplerParams, ids: list[int], max_tokens: int) -> str:
        output = core.add_request(EngineCoreRequest("x", ids, sampler, max_tokens), b"client")
        assert output is not None and output.finish_reason is FinishReason.ERROR
        return str(output.stop_reason)

    pools = SamplerParams(pooling=PoolingParams())
    try:
        assert core.limits.max_model_len == 100, "a text is computed in one step"
        assert "pooling is missing" in refusal(SamplerParams(), [7], 3)
        assert "max_tokens=3" in refusal(pools, [7], 3)
        assert "101 prompt tokens" in refusal(pools, [7] * 101, 0)
        late = SamplerParams(pooling=PoolingParams(segment_start=3))
        assert "segment_start=3" in refusal(late, [7], 0)
        wide = SamplerParams(pooling=PoolingParams(dimensions=65))
        core.add_request(EngineCoreRequest("wide", [7], wide, 0), b"client")
        outputs = [o for _ in range(3) for of in core.step().values() for o in of]
        assert "dimensions=65 is above the model's 64" in str(outputs[0].stop_reason)
        core.check_idle()
    finally:
        core.shutdown()


def test_nan_vectors_fail_only_their_request(tmp_path):
    model = make(tmp_path, "qwen3", modes={"pooling_mode": "mean"})
    model.embed_tokens.weight.data[40] = float("nan")
    model.save_pretrained(tmp_path)
    core = start(tmp_path)
    sampler = SamplerParams(pooling=PoolingParams())
    try:
        for name, ids in (("bad", [6, 40, 7]), ("good", [6, 7, 8])):
            core.add_request(EngineCoreRequest(name, ids, sampler, 0), b"client")
        ended = {}
        while core.has_work:
            for outputs in core.step().values():
                ended.update({output.request_id: output for output in outputs})
        assert ended["bad"].finish_reason is FinishReason.ERROR
        assert "NaN or infinite" in str(ended["bad"].stop_reason)
        assert ended["good"].finish_reason is FinishReason.STOP
        # The sums of a slot do not outlive its request.
        close(run(core, [[6, 7, 8]]), [pooled(model, "mean", [6, 7, 8])])
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {"parallel.pipeline": 2}, "an encoder is not split into stages"),
        ({}, {"model.backend": "transformers"}, "pools only with model.backend=native"),
        ({}, {"model.max_model_len": 129}, "model.max_model_len=129 is above the model's"),
        (
            {},
            {"scheduler.max_tokens_per_step": 64, "model.max_model_len": 100},
            "above 64, scheduler.max_tokens_per_step",
        ),
        ({"hidden_act": "relu"}, {}, "hidden_act='relu' is not supported for an encoder"),
    ],
)
def test_features_without_encoder_support_are_refused(tmp_path, changes, settings, reason):
    make(tmp_path, "bert", modes={"pooling_mode": "cls"}, **changes)
    with pytest.raises((ConfigError, ValueError), match=reason):
        start(tmp_path, **settings).shutdown()
