"""Routing, the products of experts and their sum, against the modules of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swell.kernels.graph import NotCapturableError, capture
from swell.kernels.linear import Weight, linear, pack, pack_quantized, panel
from swell.kernels.moe import ExpertTable, combine_experts, expert_outputs, route
from swell.kernels.reference import moe as reference
from swell.kernels.weights.quantized import quantize
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

HIDDEN, SIZE, EXPERTS, TOP_K = 16, 24, 6, 2
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-2}


def block(kind: str, dtype: torch.dtype, renormalize: bool = True) -> Any:
    """Returns transformers' block of a router and its experts."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "intermediate_size": SIZE,
    }
    torch.manual_seed(0)
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        made = Block(transformers.MixtralConfig(**values))
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        values.update(moe_intermediate_size=SIZE, norm_topk_prob=renormalize)
        made = Block(transformers.Qwen3MoeConfig(**values))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.to(dtype).eval()


def weights_of(made: Any) -> ExpertTable:
    both = zip(made.experts.gate_up_proj.data, made.experts.down_proj.data, strict=True)
    return table_of(dict(enumerate(both)))


def table_of(weights: Mapping[int, tuple[Weight, Weight]], count: int = EXPERTS) -> ExpertTable:
    return ExpertTable(count, torch.device("cpu"), weights)


@pytest.mark.parametrize("tokens", [0, 1, 7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "renormalize"), [("mixtral", True), ("qwen3", True), ("qwen3", False)]
)
@torch.no_grad()
def test_the_layer_equals_that_of_transformers(
    kind: str, renormalize: bool, dtype: torch.dtype, tokens: int
) -> None:
    made = block(kind, dtype, renormalize)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    weights, experts = route(x @ made.gate.weight.T, TOP_K, renormalize)
    assert weights.dtype == torch.float32
    outputs = torch.zeros(tokens, TOP_K, HIDDEN, dtype=dtype)
    expert_outputs(x, experts, weights_of(made), outputs)
    got = combine_experts(outputs, weights)
    assert got.dtype == dtype
    if tokens:  # transformers' router fails without tokens
        want = made(x[None])[0]
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("split", [[{0, 1, 2}, {3, 4, 5}], [{5}, {0, 2}, {1, 3, 4}, set()]])
@torch.no_grad()
def test_parts_add_up_without_rounding(split: list[set[int]]) -> None:
    """The sum of the parts has the bits of the whole, for any placement of the experts."""
    weights = weights_of(block("mixtral", torch.float32))
    x, experts = torch.randn(40, HIDDEN), torch.rand(40, EXPERTS).topk(TOP_K).indices
    whole = torch.zeros(40, TOP_K, HIDDEN)
    expert_outputs(x, experts, weights, whole)
    total = torch.zeros_like(whole)
    for held in split:
        part = torch.zeros_like(whole)
        expert_outputs(x, experts, table_of({expert: weights[expert] for expert in held}), part)
        elsewhere = torch.tensor([[e not in held for e in row] for row in experts.tolist()])
        assert not part[elsewhere].any()
        total += part
    assert torch.equal(total, whole)
    assert whole.abs().amax(-1).min() > 0


def test_the_order_of_the_sum_follows_the_choices() -> None:
    """The terms are added in the order of the choices: 1e8 + 1 - 1e8 is 0 in float32 from the left,
    and 1 from the right."""
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]], [[-1e8], [1e8], [1.0]]])
    assert combine_experts(outputs, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]


def test_an_expert_without_tokens_is_not_computed() -> None:
    nothing = torch.full((2 * SIZE, HIDDEN), float("nan"))
    weights = {
        0: (torch.ones(2 * SIZE, HIDDEN), torch.ones(HIDDEN, SIZE)),
        1: (nothing, torch.empty(HIDDEN, 0)),  # a product with this weight would have a shape error
    }
    out = torch.zeros(3, 1, HIDDEN)
    experts = torch.tensor([[0], [2], [0]])
    expert_outputs(torch.ones(3, HIDDEN), experts, table_of(weights), out)
    assert out[:, 0, 0].bool().tolist() == [True, False, True]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3.0])
def test_padded_tokens_choose_no_expert(poison: float) -> None:
    """Other tokens have the results of a step without padding."""
    weights = weights_of(block("mixtral", torch.float32))
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)
    real = torch.tensor([True, False, True, True, False])
    x[~real] = logits[~real] = poison
    slots = torch.where(real, torch.arange(5), -1)
    routed, experts = route(logits, TOP_K, True, slots)
    assert experts[~real].eq(-1).all() and routed[~real].eq(0).all()
    outputs, plain = torch.full((5, TOP_K, HIDDEN), 9.0), torch.zeros(3, TOP_K, HIDDEN)
    expert_outputs(x, experts, weights, outputs)
    assert outputs[~real].eq(9).all()
    wanted, chosen = route(logits[real], TOP_K, True)
    expert_outputs(x[real], chosen, weights, plain)
    assert torch.equal(experts[real], chosen) and torch.equal(routed[real], wanted)
    assert torch.equal(outputs[real], plain)


# ---------------------------------------------------------------- rows


def rows_of(
    x: Tensor, router: Any, weights: Any, top_k: int, renormalize: bool, order: list[int]
) -> list[Tensor]:
    """Returns weights, choices, terms and sum of the rows `order` of x, computed in one call."""
    x = x[order]
    routed, experts = route(linear(x, router), top_k, renormalize)
    terms = torch.zeros(len(x), top_k, x.shape[1], dtype=x.dtype)
    expert_outputs(x, experts, weights, terms)
    return [routed, experts, terms, combine_experts(terms, routed)]


@pytest.mark.skipif(panel("cpu") is None, reason="no compiler: weights are not packed")
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sizes=st.tuples(st.sampled_from([8, 40, 128]), st.sampled_from([4, 24, 96])),
    experts=st.sampled_from([3, 8, 17, 64]),
    top_k=st.integers(1, 9),
    renormalize=st.booleans(),
    tokens=st.sampled_from([2, 3, 7, 33, 130]),
)
@example(0, torch.float32, (128, 96), 8, 2, True, 40)
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch(
    seed: int,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    experts: int,
    top_k: int,
    renormalize: bool,
    tokens: int,
) -> None:
    """With packed weights, a row has the same bits by itself and among any rows, in any order, that
    choose the same experts."""
    (hidden, size), draw = sizes, torch.Generator().manual_seed(seed)
    top_k = min(top_k, experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    x, router = normal(tokens, hidden), pack(normal(experts, hidden))
    packed = {
        expert: (pack(normal(2 * size, hidden)), pack(normal(hidden, size)))
        for expert in range(experts)
    }
    weights = table_of(packed, experts)
    order = torch.randperm(tokens, generator=draw).tolist()
    some = sorted(order[: tokens // 2])
    whole = rows_of(x, router, weights, top_k, renormalize, list(range(tokens)))
    for part in (order, some, [order[0]]):
        for got, want in zip(
            rows_of(x, router, weights, top_k, renormalize, part), whole, strict=True
        ):
            assert torch.equal(got, want[part])


# ---------------------------------------------------------------- compiled

FORMS: dict[str, Any] = {
    "floats": pack,
    "int8": lambda weight: pack_quantized(quantize(weight, 8), weight.dtype),
    "int4": lambda weight: pack_quantized(quantize(weight, 4), weight.dtype),
    "int8, activations too": lambda weight: pack_quantized(quantize(weight, 8), weight.dtype, True),
    "int4, activations too": lambda weight: pack_quantized(quantize(weight, 4), weight.dtype, True),
}
MANY = 1500
"""Rows whose choices of the experts of a table are more than are computed at a time."""


@pytest.fixture
def compiled() -> Any:
    return load_backend("cpu", "moe")


def experts_of(form: Any, dtype: torch.dtype, count: int = EXPERTS) -> ExpertTable:
    """Returns experts with an inner size of 64 and a hidden size of 96."""
    shapes = (2 * 64, 96), (96, 64)
    made = {
        expert: tuple(form(0.2 * torch.randn(*shape).to(dtype)) for shape in shapes)
        for expert in range(count)
    }
    return table_of(made, EXPERTS)  # type: ignore[arg-type]


def choices_of(kind: str, rows: int) -> Tensor:
    """Returns the experts of each row, [rows, TOP_K]."""
    if kind == "one expert":
        return torch.full((rows, 1), 3)
    chosen = torch.rand(rows, EXPERTS).topk(TOP_K).indices
    return chosen.masked_fill(torch.rand(rows, TOP_K) < 0.4, -1) if kind == "padding" else chosen


@pytest.mark.parametrize("kind", ["any", "one expert", "padding"])
@pytest.mark.parametrize("rows", [0, 1, 8, 32, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_experts_in_one_call_have_the_bits_of_single_products(
    form: str, dtype: torch.dtype, rows: int, kind: str, compiled: Any
) -> None:
    """The table lacks the last expert: its terms stay unchanged, and so do those of padding."""
    torch.manual_seed(0)
    weights = experts_of(FORMS[form], dtype, EXPERTS - 1)
    x, chosen = torch.randn(rows, 96).to(dtype), choices_of(kind, rows)
    want = torch.full((*chosen.shape, 96), 7.0, dtype=dtype)
    found = want.clone()
    reference.expert_outputs(x, chosen, weights, want)
    compiled.expert_outputs(x, chosen, weights, found)
    assert torch.equal(found, want)
    assert rows == 0 or not want.eq(7).all()


@pytest.mark.parametrize("change", ["another form", "plain"])
def test_experts_whose_forms_differ_are_computed_one_by_one(change: str, compiled: Any) -> None:
    torch.manual_seed(0)
    weights = experts_of(pack, torch.float32)
    x, chosen = torch.randn(8, 96), choices_of("any", 8)
    compiled.expert_outputs(x, chosen, weights, torch.zeros(8, TOP_K, 96))
    form = FORMS["int8"] if change == "another form" else torch.clone
    weights[2] = experts_of(form, torch.float32)[2]
    want, found = torch.zeros(8, TOP_K, 96), torch.zeros(8, TOP_K, 96)
    reference.expert_outputs(x, chosen, weights, want)
    compiled.expert_outputs(x, chosen, weights, found)
    assert torch.equal(found, want)
    with torch.inference_mode(), pytest.raises(NotCapturableError):
        capture(lambda: [compiled.expert_outputs(x, chosen, weights, found), found][1:], "cpu", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", [1, 3, 8, 17, 128])
def test_compiled_routes_choose_as_the_reference(
    experts: int, dtype: torch.dtype, compiled: Any
) -> None:
    torch.manual_seed(0)
    # In any order, each different in bfloat16, with infinities.
    logits = torch.linspace(-9, 9, experts).to(dtype)[torch.rand(50, experts).argsort(1)]
    logits[3, experts // 2] = -torch.inf
    slots = torch.arange(50).masked_fill_(torch.rand(50) < 0.2, -1)
    for top_k in {1, min(4, experts), experts}:
        for renormalize in (False, True):
            for given_slots in (None, slots):
                args = logits, top_k, renormalize, given_slots
                found, want = compiled.route(*args), reference.route(*args)
                close = {"rtol": 1e-5, "atol": 1e-12, "equal_nan": True}
                torch.testing.assert_close(found[0], want[0], **close)
                assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf, torch.nan])
def test_equal_logits_choose_different_experts(value: float, compiled: Any) -> None:
    logits = torch.full((2, 9), value)
    logits[1, 4] = torch.nan
    weights, chosen = compiled.route(logits, 5, True)
    assert torch.equal(weights.isnan(), reference.route(logits, 5, True)[0].isnan())
    assert all(len({*row}) == 5 and {*row} <= {*range(9)} for row in chosen.tolist())
    assert chosen[1].eq(4).any()


@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [5, 96])
def test_compiled_sums_of_terms(
    hidden: int, dtype: torch.dtype, weight_type: torch.dtype, compiled: Any
) -> None:
    torch.manual_seed(0)
    terms, weights = torch.randn(40, 3, hidden).to(dtype), torch.rand(40, 3).to(weight_type)
    found, want = (each.combine_experts(terms, weights) for each in (compiled, reference))
    tolerance = TOLERANCE[torch.float32] if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    for row in (0, 17, 39):
        alone = compiled.combine_experts(terms[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_replay_computes_the_experts_that_its_rows_choose(
    form: str, dtype: torch.dtype, compiled: Any
) -> None:
    """Also after another expert has taken the place of one of them."""
    torch.manual_seed(0)
    weights, x, logits = experts_of(FORMS[form], dtype), torch.empty(32, 96), torch.empty(32, 6)
    x, logits = x.to(dtype), logits.to(dtype)

    def layer() -> list[Tensor]:
        routed, chosen = compiled.route(logits, TOP_K, True)
        terms = x.new_zeros(len(x), TOP_K, 96)
        compiled.expert_outputs(x, chosen, weights, terms)
        return [chosen, compiled.combine_experts(terms, routed)]

    with torch.inference_mode():
        results, graph = capture(layer, "cpu", 32)
        for rows in (32, 1, 8, 0, 32):
            x.normal_()
            logits.normal_()
            if rows == 8:
                logits[:, 3] = 99  # of all rows
            if rows == 1:
                weights[2] = experts_of(FORMS[form], dtype)[2]
            for result in results:
                result.fill_(-5)
            graph.replay(rows)
            for found, want in zip(results, layer(), strict=True):
                assert torch.equal(found[:rows], want[:rows])
                assert found[rows:].eq(-5).all()
