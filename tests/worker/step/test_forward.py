"""Steps of few tokens are replayed from a recording, with the same answers."""

from __future__ import annotations

import shutil
from operator import ge, le, ne

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM, SamplingParams
from swell.worker.comm import connect
from swell.worker.step import captured_forward
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.captured_steps import capture_sizes
from swell.worker.step.forward import HeadOutput
from swell.worker.step.input_batch import BatchBuilder
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput
from tests.kernels.load import load_backend
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled() -> None:
    load_backend("cpu", "graph")


def make(folder, family, **changes) -> None:
    tiny_models.make(folder, family, **changes)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.fixture
def replayed(monkeypatch) -> set[tuple[int, ...]]:
    """Records the tokens, rows and samples of the steps that were replayed."""
    from swell.kernels.cpu.capture.recording import Recording

    seen: set[tuple[int, ...]] = set()
    replay = Recording.replay

    def watched(self, *sizes: int) -> None:
        seen.add(sizes)
        replay(self, *sizes)

    monkeypatch.setattr(Recording, "replay", watched)
    return seen


def answers(folder, **overrides) -> list:
    """Returns ids and log probabilities of requests of different lengths."""
    options = {
        "scheduler.max_rows": 4,
        "scheduler.max_tokens_per_step": 16,
        "cache.memory_bytes": 1 << 22,
        **overrides,
    }
    with LLM(str(folder), **options) as llm:
        prompts = [[5, 6, 7], [8, 9], list(range(10, 40)), [11, 12, 13, 14]]
        params = [
            SamplingParams(
                temperature=0.8, seed=i, max_tokens=6 + 9 * i, ignore_eos=True, logprobs=2
            )
            for i in range(4)
        ]
        outputs = [llm.generate(prompts, params)]
        progress_counter = llm._engine.core.executor.progress_counter
        outputs.append(llm.generate(prompts[:1], params[3]))
        assert (
            llm._engine.core.executor.progress_counter >= progress_counter + params[3].max_tokens
        )  # the replayed steps count as progress
    parts = [output.outputs[0] for some in outputs for output in some]
    return [(part.token_ids, part.logprobs) for part in parts]


@pytest.mark.parametrize("limit", [2, 128])
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "qwen2", "gemma2-caps", "phi3-partial", "mixtral", "qwen3_moe-mixed"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_answers_are_the_same_bit_for_bit(
    tmp_path, monkeypatch, replayed, family, dtype, limit
):
    make(tmp_path, family)
    monkeypatch.setattr(captured_forward, "MAX_SAMPLES", limit)
    found = answers(tmp_path, **{"model.dtype": dtype})
    most = min(limit, 4)
    assert {samples for _, _, samples in replayed} == set(range(1, most + 1))
    assert {(rows, rows, rows) for rows in range(1, most + 1)} < replayed
    # some steps hold parts of prompts
    assert any(tokens > rows > samples for tokens, rows, samples in replayed)
    replayed.clear()
    assert found == answers(tmp_path, **{"model.dtype": dtype, "model.enforce_eager": True})
    assert not replayed


@pytest.mark.parametrize(
    "family", ["gemma3", "gemma2-caps", "qwen2", "llama-tied", "mixtral", "qwen3_moe"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_answers_of_tensor_parallel_workers_are_the_same_bit_for_bit(
    tmp_path, monkeypatch, replayed, family, dtype
):
    """Through shared memory, sums are replayed; through gloo, no step is. The last worker has fewer
    tokens of the vocabulary."""
    make(tmp_path, family, vocab_size=321)
    options = {"model.dtype": dtype, "parallel.tensor": 2}
    found = answers(tmp_path, **options)
    assert {(rows, rows, rows) for rows in range(1, 5)} < replayed
    replayed.clear()
    assert found == answers(tmp_path, **options, **{"model.enforce_eager": True})
    monkeypatch.setattr(connect, "connect_shared_memory", lambda formation: None)
    assert found == answers(tmp_path, **options)
    assert not replayed


def test_tensor_parallel_workers_of_another_type_run_eagerly(tmp_path, replayed):
    """A capture that fails must not read results of recorded operations, which are undefined."""
    make(tmp_path, "llama-tied", vocab_size=321)
    options = {"model.dtype": "float16", "parallel.tensor": 2}
    found = answers(tmp_path, **options)
    assert found == answers(tmp_path, **options, **{"model.enforce_eager": True})
    assert not replayed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_are_the_same_with_logits_and_without(tmp_path, replayed, dtype):
    """Greedy tokens are the same with and without logits: for rows by themselves and next to a row
    that needs logits; both kinds of steps are replayed."""
    make(tmp_path, "llama")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    other = SamplingParams(temperature=1, seed=1, max_tokens=5, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(10, 40)), [8, 9]]

    def tokens(*params: SamplingParams) -> list[list[int]]:
        outputs = llm.generate(prompts[: len(params)], list(params))
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(str(tmp_path), **{"model.dtype": dtype, "scheduler.max_rows": 4}) as llm:
        alone = tokens(greedy, greedy)
        assert replayed
        assert tokens(greedy, greedy, other)[:2] == alone
        assert tokens(greedy, greedy) == alone
        with_logprobs = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        assert tokens(with_logprobs, with_logprobs) == alone
        worker = llm._engine.core.executor._worker
        assert {key.head for key in worker.runner._model_step._captured} == set(HeadOutput)
    replayed.clear()
    eager = {"model.enforce_eager": True, "scheduler.max_rows": 4}
    with LLM(str(tmp_path), **{"model.dtype": dtype, **eager}) as llm:
        assert tokens(greedy, greedy) == alone and not replayed


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "phi3", "stablelm"])
def test_steps_of_transformers_models_are_replayed(tmp_path, replayed, family):
    """Steps of transformers models are replayed, too. Our kernels round some of torch's operations
    differently, so probabilities are only close."""
    make(tmp_path, family)
    own = {"model.backend": "transformers"}
    found = answers(tmp_path, **own)
    assert {(rows, rows, rows) for rows in range(1, 5)} < replayed
    assert any(tokens > rows > samples for tokens, rows, samples in replayed)
    replayed.clear()
    eager = answers(tmp_path, **own, **{"model.enforce_eager": True})
    assert not replayed
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in eager]
    for (_, logprobs), (_, expected) in zip(found, eager, strict=True):
        if expected is not None:
            torch.testing.assert_close(
                torch.tensor(logprobs.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=1e-4
            )


@pytest.mark.parametrize("tokens", [127, 191])
def test_a_dimension_of_the_model_may_be_the_largest_number_of_tokens(tmp_path, replayed, tokens):
    """The hidden size or the size of the MLP."""
    make(tmp_path, "gpt_neox")
    options = {"scheduler.max_tokens_per_step": tokens}
    found = answers(tmp_path, **options)
    assert {(rows, rows, rows) for rows in range(1, 5)} < replayed
    eager = answers(tmp_path, **options, **{"model.enforce_eager": True})
    assert [ids for ids, _ in found] == [ids for ids, _ in eager]


@given(
    rows=st.integers(1, 300),
    drafts=st.integers(0, 200),
    tokens=st.integers(1, 600),
    most=st.sampled_from([1, 2, 128]),
)
def test_a_capture_has_room_for_the_largest_step(
    rows: int, drafts: int, tokens: int, most: int
) -> None:
    """Tokens, rows and samples differ from one another and from those of the probe, and the
    input tensors are large enough for both."""
    cpu = torch.device("cpu")
    blocks = BlockTables(rows, 64, 16, cpu)
    builder = BatchBuilder(RequestStates(rows, 64, cpu), blocks, tokens, drafts)
    batch = builder.build(SchedulerOutput(0))
    room = len(batch.inputs.input_ids), len(batch.inputs.block_table), batch.inputs.samples.shape[1]
    samples = rows + drafts
    found = [*capture_sizes(batch, most)]
    assert len({sizes for sizes, _ in found}) == len(found) == 3
    for sizes, other in found:
        needed = max(tokens, samples), rows, min(most, samples)
        assert all(map(ge, sizes[:3], needed)) and all(map(le, sizes[:3], room))
        assert len({*sizes[:3]}) == len({*other[:3]}) == 3
        assert all(map(ne, sizes[:3], other[:3])) and all(map(le, other[:3], room))


def test_steps_that_report_their_experts_run_eagerly(tmp_path, caplog, replayed):
    make(tmp_path, "qwen3_moe")
    with caplog.at_level("INFO"):
        tried = answers(tmp_path, **{"model.routed_experts": True})
    assert not replayed
    assert caplog.text.count("steps are computed without captures") == 1
    assert tried == answers(tmp_path, **{"model.enforce_eager": True})


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_replayed_answers_of_quantized_experts_are_the_same_bit_for_bit(
    tmp_path, replayed, form, activations
):
    make(tmp_path, "mixtral")
    options = {"model.quantize": form, "model.activations": activations}
    found = answers(tmp_path, **options)
    assert {(rows, rows, rows) for rows in range(1, 5)} < replayed
    replayed.clear()
    assert found == answers(tmp_path, **options, **{"model.enforce_eager": True})
    assert not replayed


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe-mixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_transformers_experts_are_replayed(tmp_path, caplog, replayed, family, dtype):
    """Nearly equal logits are rounded differently by a replay and by torch, which chooses other
    experts, and nevertheless the two are compared."""
    make(tmp_path, family, num_hidden_layers=8, num_local_experts=32, num_experts=32)
    options = {"model.backend": "transformers", "model.dtype": dtype, "scheduler.max_rows": 32}
    prompts = [[5 + (i + 3 * k) * 7 % 300 for k in range(8)] for i in range(32)]
    with caplog.at_level("INFO"), LLM(str(tmp_path), **options) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert {(32, 32, 32), (256, 32, 32)} <= replayed
    assert "without captures" not in caplog.text


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy_tokens(folder, **options) -> list[list[int]]:
    with LLM(str(folder), **{"scheduler.max_rows": 4, **options}) as llm:
        outputs = llm.generate([[5, 6, 7], list(range(10, 40)), [8, 9]], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "cohere", "granite"])
def test_greedy_tokens_of_transformers_models_have_the_largest_logits(tmp_path, replayed, family):
    """A head may scale or cap the outputs of its matrix."""
    make(tmp_path, family)
    own = {"model.backend": "transformers"}
    found = greedy_tokens(tmp_path, **own)
    assert replayed
    replayed.clear()
    assert found == greedy_tokens(tmp_path, **own, **{"model.enforce_eager": True})
    assert not replayed
    assert len({tuple(tokens) for tokens in found}) == 3


@pytest.mark.parametrize("wrong", ["relu", "gelu_tanh"])
def test_captures_with_another_operation_than_the_model_are_not_used(
    tmp_path, monkeypatch, caplog, replayed, wrong
):
    """`gelu_tanh` differs from gelu by less than a thousandth."""
    from swell.kernels.cpu.capture import torch_operations

    make(tmp_path, "gpt_neox")
    expected = greedy_tokens(tmp_path, **{"model.enforce_eager": True})
    monkeypatch.setitem(torch_operations.POINTWISE, "gelu", lambda a, **_: (wrong, a))
    with caplog.at_level("WARNING"):
        found = greedy_tokens(tmp_path)
    assert found == expected
    assert not replayed
    assert "replayed steps differ from the model's (torch's gelu)" in caplog.text


def test_captures_that_omit_an_operation_are_not_used(tmp_path, monkeypatch, caplog, replayed):
    from swell.kernels.cpu.capture.recording import Recording

    make(tmp_path, "qwen3_moe")
    options = {"model.backend": "transformers"}
    expected = greedy_tokens(tmp_path, **options, **{"model.enforce_eager": True})
    finish = Recording.finish

    def finish_without_one(self, made, results) -> None:
        at = [i for i, call in enumerate(self.calls) if call.function.name == "swell_reduction"]
        del self.calls[at[-1]]
        finish(self, made, results)

    monkeypatch.setattr(Recording, "finish", finish_without_one)
    with caplog.at_level("WARNING"):
        found = greedy_tokens(tmp_path, **options)
    assert found == expected
    assert len(replayed) == 1, "one replay is compared"
    assert "replayed steps differ from the model's (the replay)" in caplog.text


def test_a_capture_that_chooses_nearly_as_good_experts_is_not_used(
    tmp_path, monkeypatch, caplog, replayed
):
    """All experts have nearly equal logits, so a wrong choice is as small as a rounding."""
    from swell.kernels.cpu.capture import torch_operations

    make(tmp_path, "qwen3_moe")
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name] *= 1e-3
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"model.backend": "transformers"}
    expected = answers(tmp_path, **options, **{"model.enforce_eager": True})
    topk = torch_operations.CHOICES["topk"]

    def second_best(step, func, x, k, *args):
        values, indices = topk(step, func, x, k + 1, *args)
        return values[..., 1:], indices[..., 1:]

    monkeypatch.setitem(torch_operations.CHOICES, "topk", second_best)
    with caplog.at_level("WARNING"):
        found = answers(tmp_path, **options)
    assert "replayed steps differ from the model's (torch's topk)" in caplog.text
    assert not replayed
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
