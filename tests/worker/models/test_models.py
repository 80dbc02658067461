"""Every model computes the logits of transformers, for every split of the model and of its prompts.

The oracle is transformers' own model on one row at a time, without a cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.kernels.inputs import Inputs, Sizes
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import load_weights
from swell.worker.models import build_model
from swell.worker.models.generic.causal_lm import refuse_config
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.intermediate import IntermediateTensors, stage_layers
from swell.worker.wire import SchedulerOutput
from tests.support.deadlines import HANG_S
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 4
MAX_TOKENS = 64
LENGTHS = (1, 21, 9, 30)
SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@dataclass
class Part:
    """The work of one row in a step: positions start .. start + count - 1."""

    row: int
    start: int
    count: int


def batch_of(
    prompts: Sequence[Sequence[int]], parts: Sequence[Part], wanted: list[int] | None = None
) -> InputBatch:
    """Returns a flat batch of the parts; each row has its own blocks, in descending order.
    `wanted`: the tokens whose hidden states are read (None: all)."""
    blocks = MAX_TOKENS // BLOCK_TOKENS
    table = torch.arange(len(prompts) * blocks, dtype=torch.int32).flip(0).view(-1, blocks)
    ids, positions, slots, starts = [], [], [], [0]
    for part in parts:
        for p in range(part.start, part.start + part.count):
            ids.append(prompts[part.row][p])
            positions.append(p)
            block = int(table[part.row, p // BLOCK_TOKENS])
            slots.append(block * BLOCK_TOKENS + p % BLOCK_TOKENS)
        starts.append(len(ids))
    context = [part.start + part.count for part in parts]
    indices = torch.tensor(wanted or [], dtype=torch.int64)
    return InputBatch(
        plan=SchedulerOutput(0),
        inputs=Inputs(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_tokens=torch.tensor(context, dtype=torch.int32),
            block_table=table[[part.row for part in parts]].contiguous(),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            samples=indices.expand(3, -1),
        ),
        sizes=Sizes(
            tokens=len(ids),
            rows=len(parts),
            samples=len(indices),
            max_query_tokens=max((part.count for part in parts), default=0),
            max_context_tokens=max(context, default=0),
        ),
        block_tokens=BLOCK_TOKENS,
        all_hidden=wanted is None,
    )


def steps_of(chunk: int) -> list[list[Part]]:
    """Returns the steps of all prompts in parts of at most `chunk` tokens; finished rows leave the
    batch."""
    steps = []
    for start in range(0, max(LENGTHS), chunk):
        steps.append(
            [
                Part(row, start, min(chunk, length - start))
                for row, length in enumerate(LENGTHS)
                if start < length
            ]
        )
    return steps


@torch.no_grad()
def run_rank(
    folder: Path, backend: str, mesh: Mesh, prompts: list[list[int]], chunk: int
) -> list[torch.Tensor]:
    """Runs one worker; on last stages it returns the logits [tokens, vocab] of each prompt."""
    config = ModelConfig(path=str(folder), backend=backend, max_model_len=MAX_TOKENS)
    hf = load_config(config)
    model: Any = build_model(config, hf, mesh, "cpu", torch.float32)
    load_weights(model, config)
    pack_weights(model)
    for layer in model.attention_layers():
        shape = (len(prompts) * MAX_TOKENS // BLOCK_TOKENS, layer.kv_heads, BLOCK_TOKENS)
        layer.bind_cache(*(torch.zeros(*shape, layer.head_dim) for _ in range(2)))
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for parts in [[], *steps_of(chunk)]:
        batch = batch_of(prompts, parts)
        tokens = len(batch.input_ids)
        arrived = None
        if not mesh.is_first_stage:
            arrived = model.make_empty_intermediate(tokens)
            for t in arrived.tensors():
                mesh.pipeline.recv(t, mesh.stage - 1)
        out = model(batch, arrived)
        if isinstance(out, IntermediateTensors):
            assert not mesh.is_last_stage
            for t in out.tensors():
                mesh.pipeline.send(t, mesh.stage + 1).wait()
            continue
        logits = model.compute_logits(out)
        assert logits.dtype == torch.float32
        for part, piece in zip(parts, logits.split([p.count for p in parts]), strict=True):
            rows[part.row].append(piece)
    return [torch.cat(row) for row in rows] if mesh.is_last_stage else []


def run_split(
    folder: Path, tensor: int, pipeline: int, backend: str = "auto", chunk: int = MAX_TOKENS
) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """Returns the prompts, and the logits of each rank of the last stage. Ranks are threads."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, tiny_models.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS
    ]
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    store = dist.HashStore()
    results: list[Any] = [None] * parallel.world

    def work(rank: int) -> None:
        mesh = None
        try:
            mesh = Mesh.build(parallel, rank, store, timeout_s=HANG_S)
            results[rank] = run_rank(folder, backend, mesh, prompts, chunk)
        except BaseException as error:
            results[rank] = error
        finally:
            if mesh is not None:
                mesh.close()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(parallel.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        raise next((e for e in errors if isinstance(e, ValueError)), errors[0])
    return prompts, results[-tensor:]


def check(
    folder: Path,
    oracle: Any,
    tensor: int = 1,
    pipeline: int = 1,
    backend: str = "auto",
    chunk: int = MAX_TOKENS,
) -> None:
    prompts, ranks = run_split(folder, tensor, pipeline, backend, chunk)
    seen = set()
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            want = oracle(torch.tensor([prompt])).logits[0]
        for logits in ranks:
            assert logits[row].shape == want.shape
            scale = max(1.0, float(want.std()))  # the logits of some families are in the hundreds
            torch.testing.assert_close(logits[row], want, rtol=1e-4, atol=1e-4 * scale)
            assert torch.equal(logits[row].argmax(-1), want.argmax(-1))
        seen |= set(want.argmax(-1).tolist())
    assert len(seen) > 5, "the oracle's answers are all alike: nothing was tested"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function: family -> (its folder, transformers' model); each is made once."""

    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (folder, tiny_models.make(folder, family))
        return made[family]

    return get


NATIVE = [
    "llama",
    "llama-tied",
    "llama-bias",
    "llama-llama3",
    "llama-linear",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "phi3",
    "phi3-partial",
    "phi3-longrope",
    "gemma2",
    "gemma2-caps",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-mixed",
]


@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
@pytest.mark.parametrize("family", NATIVE)
def test_native_models_equal_transformers(
    tiny: Any, family: str, tensor: int, pipeline: int
) -> None:
    check(*tiny(family), tensor, pipeline, "native")


GENERIC = ["gpt_neox", "starcoder2", "smollm3", "gemma2-caps", "olmo2", "phi3"]


@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
@pytest.mark.parametrize("family", GENERIC)
def test_generic_models_equal_transformers(
    tiny: Any, family: str, tensor: int, pipeline: int
) -> None:
    check(*tiny(family), tensor, pipeline, "transformers")


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("llama", 1, 1),
        ("gemma3", 2, 2),
        ("cohere", 2, 1),
        ("granite", 2, 2),
        ("gpt2", 1, 1),
        ("opt", 1, 1),
        ("stablelm", 1, 1),
        ("mixtral", 1, 2),
        ("qwen3_moe", 1, 2),
    ],
)
def test_generic_breadth(tiny: Any, family: str, tensor: int, pipeline: int) -> None:
    check(*tiny(family), tensor, pipeline, "transformers")


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize(
    ("family", "backend", "tensor", "pipeline"),
    [
        ("llama", "native", 1, 1),
        ("mistral", "native", 2, 2),
        ("qwen2-window", "native", 1, 1),
        ("qwen3", "native", 1, 2),
        ("gemma2-caps", "native", 2, 2),
        ("phi3-longrope", "native", 1, 1),
        ("gemma3", "native", 2, 2),
        ("mixtral", "native", 2, 1),
        ("gpt_neox", "transformers", 2, 2),
        ("gemma2", "transformers", 1, 1),
    ],
)
def test_chunks_change_nothing(
    tiny: Any, family: str, backend: str, tensor: int, pipeline: int, chunk: int
) -> None:
    check(*tiny(family), tensor, pipeline, backend, chunk)


@pytest.mark.parametrize(("kv_heads", "tensor"), [(1, 2), (2, 4), (1, 4)])
def test_few_kv_heads_are_replicated(tmp_path: Path, kv_heads: int, tensor: int) -> None:
    oracle = tiny_models.make(tmp_path, "qwen2", num_key_value_heads=kv_heads)
    check(tmp_path, oracle, tensor)


def test_the_last_rank_may_have_no_vocabulary(tmp_path: Path) -> None:
    """The last rank may hold an empty part of the vocabulary: five words on four ranks are two
    each, and none for the last."""
    oracle = tiny_models.make(tmp_path, "llama", vocab_size=5)
    prompts = [[3, 4, 1, 2, 0, 3, 3, 1]]
    store, results = dist.HashStore(), {}

    def work(rank: int) -> None:
        mesh = Mesh.build(ParallelConfig(tensor=4), rank, store, timeout_s=HANG_S)
        with torch.no_grad():
            config = ModelConfig(path=str(tmp_path), max_model_len=MAX_TOKENS)
            model: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
            load_weights(model, config)
            for layer in model.attention_layers():
                shape = (16, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
                layer.bind_cache(torch.zeros(shape), torch.zeros(shape))
            hidden = model(batch_of(prompts, [Part(0, 0, 8)]), None)
            results[rank] = model.compute_logits(hidden)
            assert model.compute_logits(hidden[:0]).shape == (0, 5)
        mesh.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = oracle(torch.tensor(prompts)).logits[0]
    for rank in range(4):
        torch.testing.assert_close(results[rank], want, rtol=1e-4, atol=1e-4)


def refusal(folder: Path, tensor: int = 1, pipeline: int = 1, **model: Any) -> str:
    """Returns the one-line error of a refused model."""
    config = ModelConfig(path=str(folder), **model)
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    mesh = Mesh.build(parallel, 0)
    with pytest.raises(ValueError) as refused:
        build_model(config, load_config(config), mesh, "cpu", torch.float32)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("family", "split", "model", "words"),
    [
        ("llama", {"tensor": 3}, {}, ["parallel.tensor=3", "num_attention_heads=4", "1"]),
        ("llama", {"tensor": 8}, {}, ["parallel.tensor=8", "num_attention_heads=4", "1, 2, 4"]),
        ("llama", {"pipeline": 5}, {}, ["parallel.pipeline=5", "num_hidden_layers=4"]),
        ("llama", {}, {"max_model_len": 512}, ["model.max_model_len=512", "256 positions"]),
        (
            "gpt_neox",
            {},
            {"backend": "native"},
            ["GPTNeoXForCausalLM", "LlamaForCausalLM", "model.backend=transformers"],
        ),
        ("starcoder2", {"tensor": 4}, {}, ["parallel.tensor=4", "num_key_value_heads=2", "1, 2"]),
        ("gpt2", {"tensor": 2}, {}, ["GPT2LMHeadModel", "plan", "parallel.tensor=1"]),
        ("gpt2", {"pipeline": 2}, {}, ["GPT2LMHeadModel", "plan", "parallel.pipeline=1"]),
        (
            "mixtral",
            {"tensor": 2},
            {"backend": "transformers"},
            ["MixtralForCausalLM", "experts", "parallel.tensor=1"],
        ),
        ("mamba", {}, {"max_model_len": 64}, ["MambaForCausalLM", "linear_attention"]),
        ("falcon", {}, {}, ["FalconForCausalLM", "attention interface"]),
        ("bloom", {}, {"max_model_len": 64}, ["BloomForCausalLM", "positions"]),
        ("t5", {}, {"max_model_len": 64}, ["T5ForConditionalGeneration", "encoder-decoder"]),
    ],
)
def test_refusals(
    tiny: Any, family: str, split: dict[str, int], model: dict[str, Any], words: list[str]
) -> None:
    text = refusal(tiny(family)[0], **split, **model)
    for word in words:
        assert word in text


def test_an_indivisible_intermediate_size_is_refused(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, "llama", intermediate_size=191)
    for backend in ("native", "transformers"):
        assert "=191" in refusal(tmp_path, tensor=2, backend=backend)


def test_unsupported_rope_types_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    oracle = tiny_models.make(tmp_path, "llama", rope_parameters=rope)
    text = refusal(tmp_path, backend="native")
    assert "'dynamic'" in text
    assert "model.backend=transformers" in text
    check(tmp_path, oracle, backend="transformers")  # within the trained length nothing changes
    config = load_config(ModelConfig(path=str(tmp_path)))
    config.max_position_embeddings = 32
    with pytest.raises(ValueError, match=r"'dynamic'.*model.max_model_len=32"):
        refuse_config(config, 64)


@pytest.mark.parametrize(("layers", "stages"), [(4, 1), (4, 4), (7, 3), (32, 5)])
def test_stages_cover_the_layers(layers: int, stages: int) -> None:
    parts = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [i for part in parts for i in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_bfloat16_agrees_with_float32(tiny: Any, backend: str) -> None:
    """A model in bfloat16 mostly agrees with the same model in float32."""
    folder, oracle = tiny("llama")
    config = ModelConfig(path=str(folder), backend=backend, max_model_len=MAX_TOKENS)
    mesh = Mesh.build(ParallelConfig(), 0)
    model: Any = build_model(config, load_config(config), mesh, "cpu", torch.bfloat16)
    load_weights(model, config)
    prompt = list(range(10, 40))
    for layer in model.attention_layers():
        shape = (16, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
        layer.bind_cache(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
    with torch.no_grad():
        got = model.compute_logits(model(batch_of([prompt], [Part(0, 0, 30)]), None))
        want = oracle(torch.tensor([prompt])).logits[0]
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.98


@pytest.mark.parametrize("wanted", [[], [29], [0, 7, 8, 37]])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt_neox"])
def test_hidden_indices_select_unchanged_states(tiny: Any, family: str, wanted: list[int]) -> None:
    """Hidden indices select unchanged states, and later steps still see what the other tokens left
    in the cache."""
    folder, _ = tiny(family)
    config = ModelConfig(path=str(folder), max_model_len=MAX_TOKENS)
    mesh = Mesh.build(ParallelConfig(), 0)
    model: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    load_weights(model, config)
    pack_weights(model)
    prompts = [list(range(10, 40)), list(range(50, 60))]
    second = batch_of(prompts, [Part(1, 8, 2)])

    def hidden(rows: list[int] | None) -> list[torch.Tensor]:
        first = batch_of(prompts, [Part(0, 0, 30), Part(1, 0, 8)], rows)
        for layer in model.attention_layers():
            shape = (32, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
            layer.bind_cache(*(torch.zeros(shape) for _ in range(2)))
        with torch.no_grad():
            return [model(first, None), model(second, None)]

    (every, later), (some, later_too) = hidden(None), hidden(wanted)
    assert some.shape == (len(wanted), every.shape[1])
    torch.testing.assert_close(some, every[wanted], rtol=1e-5, atol=1e-5)
    assert torch.equal(later, later_too)
