"""Mixture of experts: routing, grouped products, and their sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from swell.cluster.local import LLM, SamplingParams
from swell.kernels import backends
from swell.kernels.host.host_reads import RefuseHostReads
from swell.kernels.linear import Weight
from swell.kernels.moe import ExpertTable
from swell.kernels.reference import linear as reference_linear
from swell.kernels.reference import moe as reference
from swell.kernels.triton import moe
from swell.kernels.triton.linear import pack, pack_quantized
from swell.kernels.triton.moe import combine_experts, expert_outputs, route
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor
from swell.worker.step import buckets
from tests.kernels.test_quantized import random_weight
from tests.kernels.triton.oracle import TYPES, close, rounds_like
from tests.kernels.triton.test_quantized import COMPILED, empty_weight
from tests.worker import tiny_models
from tests.worker.fixed_graphs import fixed_graphs
from tests.worker.step.test_buckets import make

__all__ = ["fixed_graphs"]

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


MODELS = (128, 8, 2048, 768), (8, 2, 4096, 14336)
"""Experts, experts per token, and sizes of Qwen3-30B-A3B and Mixtral."""


def launches(dtype: torch.dtype) -> Iterator[object]:
    """Launches the kernels in sizes of models, for few and many tokens."""
    for count, top_k, hidden, size in MODELS:
        expert = torch.empty(2 * size, hidden, dtype=dtype), torch.empty(hidden, size, dtype=dtype)
        table = ExpertTable(count, CPU, {0: expert})
        exact = ExpertTable(count, CPU, {0: packed(expert)})
        for tokens, slots in ((1, torch.empty(1, dtype=torch.int64)), (4096, None)):
            x = torch.empty(tokens, hidden, dtype=dtype)
            yield route(torch.empty(tokens, count, dtype=dtype), top_k, True, slots)
            out = torch.empty(tokens, top_k, hidden, dtype=dtype)
            experts = torch.empty(tokens, top_k, dtype=torch.int64)
            yield expert_outputs(x, experts, table, out)
            yield expert_outputs(x, experts, exact, out)
            yield combine_experts(out, torch.empty(tokens, top_k))


def quantized_launches(dtype: torch.dtype) -> Iterator[object]:
    """Launches the product with quantized weights, for one token."""
    for count, top_k, hidden, size in MODELS:
        x, out = torch.empty(1, hidden, dtype=dtype), torch.empty(1, top_k, hidden, dtype=dtype)
        experts = torch.empty(1, top_k, dtype=torch.int64)
        for form in (COMPILED[1], *COMPILED[-2:]):
            pair = (empty_weight(2 * size, hidden, dtype, form),)
            pair += (empty_weight(hidden, size, dtype, form),)
            yield expert_outputs(x, experts, ExpertTable(count, CPU, {0: pair}), out)


def packed(expert: tuple[Tensor, Tensor]) -> tuple[Weight, Weight]:
    gate_up, down = (pack(weight, exact=True) for weight in expert)
    return gate_up, down


# ---------------------------------------------------------------- routing


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k"), [(0, 4, 2), (1, 1, 1), (3, 6, 6), (5, 128, 8), (2, 300, 3)]
)
def test_the_largest_are_chosen_in_order(tokens, count, top_k, dtype, renormalize):
    wide = (torch.randn(tokens, count + 3) * 3).to(dtype)
    logits = wide[:, :count]
    weights, experts = route(logits, top_k, renormalize)
    assert experts.dtype == torch.int64
    assert all(len(set(row)) == top_k for row in experts.tolist())
    p = torch.softmax(logits.double(), -1)
    largest = p.topk(top_k).values
    assert torch.equal(p.gather(1, experts), largest), "equal probabilities may be exchanged"
    wanted = largest / largest.sum(1, keepdim=True) if renormalize else largest
    close(weights, wanted, torch.float32)


@pytest.mark.parametrize(
    "row",
    [
        [float("nan")] * 5,
        [float("nan"), 1.0, float("inf"), -float("inf"), float("nan")],
        [-float("inf")] * 5,
        [2.0] * 5,
    ],
    ids=str,
)
def test_any_logits_choose_different_experts(row):
    """A failed row must not read the weights of an expert that does not exist."""
    _, experts = route(torch.tensor([row]), 3, True)
    assert len({*experts[0].tolist()} & {*range(5)}) == 3


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 7.0])
def test_padded_tokens_choose_no_expert(poison):
    logits = torch.randn(4, 6)
    logits[[1, 3]] = poison
    slots = torch.tensor([5, -1, 0, -1])
    weights, experts = route(logits, 2, True, slots)
    plain = route(logits[[0, 2]], 2, True)
    assert experts[[1, 3]].eq(-1).all() and weights[[1, 3]].eq(0).all()
    assert torch.equal(weights[[0, 2]], plain[0]) and torch.equal(experts[[0, 2]], plain[1])
    found = reference.route(logits, 2, True, slots)
    assert torch.equal(found[1], experts)
    close(weights, found[0].double(), torch.float32)


# ---------------------------------------------------------------- products


class Layer:
    """A layer of random experts."""

    def __init__(self, count: int, hidden: int, size: int, dtype: torch.dtype) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.weights = {
            expert: (
                (torch.randn(2 * size, hidden) / hidden**0.5).to(dtype),
                (torch.randn(hidden, size) / size**0.5).to(dtype),
            )
            for expert in range(count)
        }
        self.table = ExpertTable(count, CPU, self.weights)

    def outputs(self, x: Tensor, experts: Tensor) -> Tensor:
        """Returns the kernel's outputs; 9 where it writes nothing."""
        out = torch.full((*experts.shape, self.hidden), 9.0).to(self.dtype)
        with RefuseHostReads():
            expert_outputs(x, experts, self.table, out)
        return out

    def by_definition(self, x: Tensor, experts: Tensor) -> Tensor:
        """Returns the outputs by the formula, in float64; 9 for experts that are not held."""
        wanted = torch.full((*experts.shape, self.hidden), 9.0, dtype=torch.float64)
        for t, choices in enumerate(experts.tolist()):
            for j, expert in enumerate(choices):
                if expert in self.table:
                    gate_up, down = map(floats_of, self.table[expert])
                    gate, up = self._round(gate_up.double() @ x[t].double()).chunk(2)
                    silu = self._round(gate / (1 + torch.exp(-gate)))
                    wanted[t, j] = down.double() @ self._round(silu * up)
        return wanted

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()


def floats_of(weight: Weight) -> Tensor:
    if isinstance(weight, PackedQuantizedTensor):
        return weight.unpack().dequantize(weight.dtype)
    return weight if isinstance(weight, Tensor) else weight.unpack()


def choose(tokens: int, count: int, top_k: int) -> Tensor:
    return torch.rand(tokens, count).topk(top_k).indices


@pytest.fixture(params=[16, 64], ids=["few pairs", "many pairs"])
def _tiles(request, monkeypatch) -> None:
    """Lets a test compute with small blocks, and with large ones."""
    monkeypatch.setattr(moe, "MANY_PAIRS", 0 if request.param == 64 else 1 << 20)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "size"),
    [(0, 4, 2, 8, 8), (1, 6, 2, 40, 24), (1, 1, 1, 1, 1), (23, 5, 3, 33, 19), (7, 3, 3, 130, 71)],
)
def test_definition(tokens, count, top_k, hidden, size, dtype):
    layer, experts = Layer(count, hidden, size, dtype), choose(tokens, count, top_k)
    x = torch.randn(tokens, hidden).to(dtype)
    rounds_like(layer.outputs(x, experts), layer.by_definition(x, experts), dtype)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("tokens", [16, 17, 65])
def test_all_tokens_choose_one_expert(tokens):
    """Blocks of an expert are full, or the last one has one pair. The others compute nothing."""
    layer = Layer(4, 20, 12, torch.float32)
    x, experts = torch.randn(tokens, 20), torch.full((tokens, 1), 2)
    close(layer.outputs(x, experts), layer.by_definition(x, experts), torch.float32)


@pytest.mark.usefixtures("_tiles")
def test_every_expert_has_one_pair_more_than_full_blocks(monkeypatch):
    """No choices need more blocks; pairs are counted and placed in several parts."""
    monkeypatch.setattr(moe, "PAIRS", 8)
    layer = Layer(3, 9, 5, torch.bfloat16)
    experts = torch.arange(3).repeat(65)[torch.randperm(3 * 65)].unsqueeze(1)
    x = torch.randn(len(experts), 9).bfloat16()
    rounds_like(layer.outputs(x, experts), layer.by_definition(x, experts), torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch_with_packed_experts(dtype, monkeypatch):
    """A token without others, and at several places among 39, with which its experts have enough
    pairs for large blocks; some of the others have failed."""
    monkeypatch.setattr(moe, "MANY_PAIRS", 8)
    tiles, choose_tile = set(), moe._tile
    monkeypatch.setattr(moe, "_tile", lambda *sizes: tiles.add(choose_tile(*sizes)) or max(tiles))
    layer = Layer(3, 130, 40, dtype)
    x, experts = torch.randn(40, 130).to(dtype), choose(40, 3, 2)
    wanted = layer.by_definition(x[:1], experts[:1])
    layer.table = ExpertTable(3, CPU, {e: packed(both) for e, both in layer.weights.items()})
    first = layer.outputs(x[:1], experts[:1])[0]
    rounds_like(first[None], wanted, dtype)
    x[20:23] = float("nan")
    for place in (0, 17, 39):
        order = [*range(1, 40)]
        order.insert(place, 0)
        found = layer.outputs(x[order], experts[order])
        assert torch.equal(found[place], first), place
        wide = torch.cat([x[order], torch.zeros(40, 3).to(dtype)], 1)
        assert torch.equal(layer.outputs(wide[:, :130], experts[order])[place], first), place
    assert len(tiles) == 1, "a GPU may add the terms of another tile in another order"


def test_experts_of_other_ranks_and_padding_compute_nothing():
    """The table changes in place. Padded tokens may contain anything."""
    layer = Layer(5, 16, 8, torch.float32)
    addresses = layer.table.addresses
    del layer.table[1], layer.table[4]
    layer.table[3] = layer.weights[0]
    experts = choose(12, 5, 3)
    experts[[2, 7]] = -1
    x = torch.randn(12, 16)
    x[[2, 7]] = float("nan")
    got = layer.outputs(x, experts)
    assert got[[2, 7]].eq(9).all()
    close(got, layer.by_definition(x, experts), torch.float32)
    layer.table.clear()
    assert layer.outputs(x, experts).eq(9).all() and addresses is layer.table.addresses
    assert not addresses.any()


def test_weights_may_move_without_other_tensors():
    layer, experts = Layer(2, 8, 4, torch.float32), choose(3, 2, 1)
    x = torch.randn(3, 8)
    before = layer.outputs(x, experts)
    storages = [weight.untyped_storage() for both in layer.weights.values() for weight in both]
    kept = [storage.clone() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    taken = [torch.full((len(copy) // 4,), 1e9) for copy in kept]  # the memory of the weights
    for storage, copy in zip(storages, kept, strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    layer.table.refresh()
    assert taken and torch.equal(layer.outputs(x, experts), before)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype):
    """A row has the same bits for any contents and any experts of the other rows."""
    layer, experts = Layer(4, 24, 16, dtype), choose(30, 4, 2)
    x = torch.randn(30, 24).to(dtype)
    before = layer.outputs(x, experts)
    own = torch.arange(30) % 7 == 0
    x[~own], experts[~own] = float("nan"), experts[~own].flip(0) % 2
    assert torch.equal(layer.outputs(x, experts)[own], before[own])


def test_rows_may_be_parts_of_wider_ones():
    layer, experts = Layer(4, 24, 16, torch.float32), choose(6, 4, 2)
    wide = torch.randn(6, 30)
    x = wide[:, :24]
    assert torch.equal(layer.outputs(x, experts), layer.outputs(x.contiguous(), experts))


def test_other_types_are_left_to_the_reference():
    layer, experts = Layer(4, 24, 16, torch.float64), choose(6, 4, 2)
    out = torch.full((6, 2, 24), 9.0, dtype=torch.float64)
    x = torch.randn(6, 24, dtype=torch.float64)
    expert_outputs(x, experts, layer.table, out)
    torch.testing.assert_close(out, layer.by_definition(x, experts))
    logits = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(route(logits, 2, True)[1], reference.route(logits, 2, True)[1])


Form = dict[str, Any]
"""Arguments of `random_weight`."""
FORMS: list[tuple[Form, Form]] = [
    ({"bits": 4}, {"bits": 8, "mins": True, "wide": True}),
    ({"bits": 4, "group": 64, "mins": True}, {"bits": 4, "group": 128}),
    ({"bits": 4, "numbers": Numbers.E2M1}, {"bits": 4, "numbers": Numbers.E2M1, "wide": True}),
    ({"bits": 8, "group": 64, "numbers": Numbers.E4M3}, {"bits": 8, "numbers": Numbers.E4M3}),
]
"""The forms of gate over up, and of down."""
SMALL = [
    ({"bits": 4, "group": 16}, {"bits": 4, "group": 16, "mins": True}),
    ({"bits": 4, "group": 16, "numbers": Numbers.E2M1}, {"bits": 8, "group": 16}),
]
"""Groups with which the outputs need not be multiples of a panel."""


def quantize_experts(layer: Layer, *forms: Form) -> None:
    """Replaces the experts of a layer by quantized ones of the same sizes."""
    for expert, pair in layer.weights.items():
        layer.table[expert] = tuple(
            pack_quantized(random_weight(*weight.shape, **form), layer.dtype)
            for weight, form in zip(pair, forms, strict=True)
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("forms", "tokens", "hidden", "size"),
    [*((forms, 23, 192, 128) for forms in FORMS), *((forms, 7, 80, 48) for forms in SMALL)],
    ids=str,
)
def test_quantized_experts(
    forms: tuple[Form, Form], tokens: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    """Outputs of a token do not depend on the other tokens, and experts may be replaced."""
    layer, experts = Layer(4, hidden, size, dtype), choose(tokens, 4, 3)
    quantize_experts(layer, *forms)
    del layer.table[1]
    experts[2] = -1
    x = (torch.randn(tokens, hidden) / hidden**0.5).to(dtype)
    found = layer.outputs(x, experts)
    close(found, layer.by_definition(x, experts), dtype)
    alone = layer.outputs(x[5:6], experts[5:6])
    assert torch.equal(alone[0], found[5])
    quantize_experts(layer, *forms)
    close(layer.outputs(x, experts), layer.by_definition(x, experts), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_weight_of_an_expert_may_be_quantized(dtype: torch.dtype) -> None:
    layer, experts = Layer(3, 64, 32, dtype), choose(9, 3, 2)
    x = (torch.randn(9, 64) / 8).to(dtype)
    for part in range(2):
        for expert, pair in layer.weights.items():
            both: list[Weight] = [*pair]
            both[part] = pack_quantized(random_weight(*pair[part].shape, 4), dtype)
            layer.table[expert] = (both[0], both[1])
        rounds_like(layer.outputs(x, experts), layer.by_definition(x, experts), dtype)


# ---------------------------------------------------------------- sum


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "size"), [(0, 2, 8), (1, 1, 1), (3, 8, 1030)])
@pytest.mark.parametrize("rounds", [False, True])
def test_terms_are_added_in_the_order_of_the_choices(tokens, top_k, size, dtype, rounds):
    outputs, weights = torch.randn(tokens, top_k, size).to(dtype), torch.rand(tokens, top_k)
    weights = weights.to(dtype) if rounds else weights
    got = combine_experts(outputs, weights)
    assert torch.equal(got, reference.combine_experts(outputs, weights))
    close(got, (outputs.double() * weights.double()[:, :, None]).sum(1), dtype)


# ---------------------------------------------------------------- steps


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """Lets CPU tensors be computed by these kernels, with weights that are not packed. Returns the
    experts of each call of `expert_outputs`."""
    modules, get, found = {"moe": moe, "linear": reference_linear}, backends.get, []

    def recorded(x: Tensor, experts: Tensor, table: ExpertTable, out: Tensor) -> None:
        found.append(experts.clone())
        expert_outputs(x, experts, table, out)

    monkeypatch.setattr(moe, "expert_outputs", recorded)
    monkeypatch.setattr(
        backends, "get", lambda name, device: modules.get(name) or get(name, device)
    )
    return found


def test_padded_steps_are_captured_and_have_the_same_answers(tmp_path, request, calls, monkeypatch):
    """Steps of three rows are padded to four. The prompts have four tokens, padded to eight; the
    last layer continues with three of them."""
    monkeypatch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, "num_hidden_layers": 2})
    monkeypatch.setattr(buckets, "_ROWS", (4,))
    monkeypatch.setattr(buckets, "_TOKENS", (8,))
    make(tmp_path, "qwen3_moe")
    options = {"scheduler.max_rows": 4, "cache.memory_bytes": 1 << 20}
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1, ignore_eos=True)

    def answers() -> list:
        with LLM(str(tmp_path), **options) as llm:
            calls.clear()
            return [output.outputs[0] for output in llm.generate([[5, 6], [7], [8]], params)]

    expected = answers()
    assert [len(experts) for experts in calls] == [4, 3, 3, 3, 3, 3]
    replays = request.getfixturevalue("fixed_graphs").replays
    for got, wanted in zip(answers(), expected, strict=True):
        assert got.token_ids == wanted.token_ids
        of_both = zip(got.logprobs.logprobs, wanted.logprobs.logprobs, strict=True)
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in of_both)
    assert [*replays.values()] == [[(8, 4, 4), (4, 4, 4), (4, 4, 4)]]
    has_expert = [experts.ge(0).all(1).tolist() for experts in calls[-4:]]
    assert has_expert == [[True, True, True, False]] * 4
