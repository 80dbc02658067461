"""The two forms of the sum of a token's experts over ranks: on a GPU each rank adds the experts
that it holds, and fewer bytes move; on CPU and with `model.exact` the sum has the same bits
anywhere."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from swell.configs.schema import ParallelConfig
from swell.kernels.host.host_reads import RefuseHostReads
from swell.worker.comm.groups import ProcessGroup
from swell.worker.comm.mesh import Mesh
from swell.worker.layers import moe
from swell.worker.layers.moe import ExpertTraits, MoE
from swell.worker.layers.weight_shard import materialize
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker.comm.test_mesh import in_threads
from tests.worker.fixed_graphs import FixedGraphs
from tests.worker.moe.moe_engines import PROMPTS, EngineGroup, answers
from tests.worker.moe.test_moe import SPREADS
from tests.worker.moe.test_moe_captures import Experts, Observed, experts, graphs

__all__ = ["experts", "graphs"]

HIDDEN, SIZE, EXPERTS = 16, 24, 12
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=["terms in order", "each rank combines"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets a CPU compute either form."""
    is_in_order = request.param == "terms in order"
    monkeypatch.setattr(Mesh, "adds_in_order", property(lambda mesh: is_in_order))
    return str(request.param)


@pytest.fixture
def combining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU compute the form of GPUs."""
    monkeypatch.setattr(Mesh, "adds_in_order", property(lambda mesh: False))


def test_terms_are_added_in_order_on_cpu_and_where_the_model_is_exact() -> None:
    def adds_in_order(device: str, exact: bool) -> bool:
        return Mesh.build(ParallelConfig(), 0, device=device, exact=exact).adds_in_order

    assert adds_in_order("cpu", False) and adds_in_order("cpu", True)
    assert adds_in_order("cuda", True)
    assert not adds_in_order("cuda", False)


class Case(NamedTuple):
    tokens: Sequence[int]
    """The number of tokens of each engine."""
    tensor: int = 1
    top_k: int = 4
    dtype: torch.dtype = torch.float32
    round_weights: bool = False
    copies: int = 1
    """How many ranks hold each expert."""
    padded: bool = False
    """Whether all engines pad their tokens to the same number."""


class Layer:
    """A layer of random weights over the workers of several engines."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        names = ("gate", "up", "down")
        self.traits = ExpertTraits(EXPERTS, SIZE, case.top_k, True, case.round_weights, names)
        self.router = torch.randn(EXPERTS, HIDDEN).to(case.dtype)
        self.weights = [
            (
                (torch.randn(2 * SIZE, HIDDEN) / HIDDEN**0.5).to(case.dtype),
                (torch.randn(HIDDEN, SIZE) / SIZE**0.5).to(case.dtype),
            )
            for _ in range(EXPERTS)
        ]
        self.inputs = [torch.randn(count, HIDDEN).to(case.dtype) for count in case.tokens]

    def run(self) -> list[Tensor]:
        """Returns the outputs of each worker for its engine's tokens."""
        engines, tensor = len(self.case.tokens), self.case.tensor
        stores = [torch.distributed.HashStore() for _ in range(engines)]
        between = torch.distributed.HashStore()

        def work(number: int) -> Tensor:
            engine, rank = divmod(number, tensor)
            mesh = Mesh.build(ParallelConfig(expert=True, tensor=tensor), rank)
            mesh.begin(1)
            plan = GroupPlan(1, None, 1, engines, engine)
            mesh.regroup(plan, stores[engine], between, timeout_s=HANG_S)
            try:
                return self._compute(mesh, self.inputs[engine])
            finally:
                mesh.close()

        return in_threads(engines * tensor, work)

    def _compute(self, mesh: Mesh, x: Tensor) -> Tensor:
        case, here, ranks = self.case, mesh.expert.rank, mesh.expert.size
        layer = MoE(HIDDEN, self.traits, mesh)
        materialize(layer, torch.device("cpu"), case.dtype)
        layer.router.weight.copy_(self.router)
        holders = [[(e + copy) % ranks for copy in range(case.copies)] for e in range(EXPERTS)]
        held = {e: self.weights[e] for e in range(EXPERTS) if here in holders[e]}
        layer.local_experts.update(held)
        if case.copies > 1:
            engines = range(len(case.tokens))
            layer.share([[of[engine % case.copies] for of in holders] for engine in engines])
        mesh.tokens = list(case.tokens)
        slots, count = None, len(x)
        if case.padded:
            missing = max(case.tokens) - count
            slots = torch.cat((torch.arange(count), torch.full((missing,), -1)))
            x = torch.cat((x, torch.full((missing, HIDDEN), torch.nan, dtype=x.dtype)))
        return layer(x, slots)[:count]

    def expected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the definition of `swell.kernels.moe` in float64, and the sum of the terms'
        absolute values, both [T, hidden]."""
        logits = (x @ self.router.T).double()
        p = torch.softmax(logits, dim=-1)
        weights, chosen = torch.topk(p, self.case.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        terms = []
        for number, (gate_up, down) in enumerate(self.weights):
            gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
            out = (torch.nn.functional.silu(gate) * up) @ down.double().T
            terms.append(out * (weights * (chosen == number)).sum(dim=-1, keepdim=True))
        stacked = torch.stack(terms)
        return stacked.sum(0), stacked.abs().sum(0)


CASES = [
    Case([9, 4]),
    Case([0, 7, 3]),
    Case([5, 0], tensor=2),
    Case([6], tensor=3),
    Case([9, 4], dtype=torch.bfloat16),
    Case([9, 4, 1], dtype=torch.bfloat16, round_weights=True),
    Case([3, 8, 5], copies=2),
    Case([3, 8], tensor=2, copies=3, dtype=torch.bfloat16),
    Case([3, 8, 0], padded=True),
    Case([2, 5], top_k=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_forms_compute_the_definition(case: Case, form: str) -> None:
    layer = Layer(case)
    outputs = layer.run()
    for number, got in enumerate(outputs):
        x = layer.inputs[number // case.tensor]
        want, magnitude = layer.expected(x)
        # Each product, each term, and the sum of each rank are rounded.
        bound = 16 * EPSILON[case.dtype] * (magnitude + 1)
        assert got.shape == want.shape and got.dtype == case.dtype
        assert ((got.double() - want).abs() <= bound).all()
        assert torch.equal(got, outputs[number - number % case.tensor]), "tensor ranks differ"


def moved(monkeypatch: pytest.MonkeyPatch, case: Case) -> dict[tuple[str, str], int]:
    """Runs a layer; returns the bytes that each worker gives to each operation of each kind of
    group."""
    found: defaultdict[int, dict[tuple[str, str], int]] = defaultdict(dict)
    run = ProcessGroup._run

    def run_and_note(self: ProcessGroup, operation: str, *args: Any) -> None:
        given = args[1] if operation in ("_reduce_scatter_base", "_allgather_base") else args[0][0]
        key = (self.name.rstrip("0123456789."), operation)
        mine = found[threading.get_ident()]
        mine[key] = mine.get(key, 0) + given.nbytes
        run(self, operation, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroup, "_run", run_and_note)
        Layer(case).run()
    workers = list(found.values())
    assert len(workers) == len(case.tokens) * case.tensor
    assert all(each == workers[0] for each in workers)
    return workers[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_moves_one_row_for_a_token_where_each_rank_combines(
    monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype
) -> None:
    case = Case([8, 8, 8], tensor=2, dtype=dtype)
    row = HIDDEN * dtype.itemsize
    rows = case.top_k if form == "terms in order" else 1
    weights = 0 if form == "terms in order" else case.top_k * torch.float32.itemsize
    assert moved(monkeypatch, case) == {
        ("data", "_allgather_base"): 8 * (row + case.top_k * dtype.itemsize + weights),
        ("data", "_reduce_scatter_base"): 3 * 8 * rows * row,
        ("tensor", "allreduce"): 8 * rows * row,
    }


@pytest.mark.parametrize("padded", [False, True])
def test_each_rank_computes_the_tokens_of_all_engines_at_once_without_host_reads(
    combining: None, monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    """The weights of an expert are read once for all engines, and a GPU's queue never runs empty.
    Each choice is computed by one rank, and padding by none."""
    calls: defaultdict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def expert_outputs(x: Tensor, chosen: Tensor, weights: Any, out: Tensor) -> None:
        calls[threading.get_ident()].append((len(x), (chosen >= 0).sum()))

    forward = MoE.forward

    def forward_on_device(self: MoE, *args: Any) -> Tensor:
        with RefuseHostReads():  # type: ignore[no-untyped-call]
            return forward(self, *args)

    monkeypatch.setattr(moe, "expert_outputs", expert_outputs)
    monkeypatch.setattr(MoE, "forward", forward_on_device)
    case = Case([3, 8, 5], copies=3, padded=padded)
    Layer(case).run()
    assert [[rows for rows, _choices in of_rank] for of_rank in calls.values()] == [[3 * 8]] * 3
    choices = sum(int(count) for of_rank in calls.values() for _rows, count in of_rank)
    assert choices == sum(case.tokens) * case.top_k


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "tensor"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe-mixed"])
def test_engines_answer_like_transformers_where_each_rank_combines(
    combining: None, tiny_moe: Any, family: str, engines: int, tensor: int
) -> None:
    folder, truth = tiny_moe(family)
    with EngineGroup(folder, parallel__tensor=tensor) as engine_group:
        engine_group.regroup(*[engine_group.add() for _ in range(engines)])
        rows = SPREADS[engines]
        assert answers(engine_group, rows) == [truth[i] for mine in rows for i in mine]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"parallel__balance_steps": 100}], ids=str)
def test_captured_steps_combine_like_eager_ones(
    combining: None,
    tiny_moe: Any,
    graphs: FixedGraphs,
    experts: Experts,
    options: dict[str, Any],
) -> None:
    """There are two engines, because the order of two terms does not change their sum."""
    found = []
    for eager in (True, False):
        folder, _truth = tiny_moe("mixtral")
        with EngineGroup(folder, model__enforce_eager=eager, **options) as group:
            first, second = (group.add() for _ in range(2))
            observed = Observed(group, graphs, experts)
            group.regroup(first, second)
            first.start([PROMPTS[0], PROMPTS[1]])
            observed.advance(3)
            second.start([PROMPTS[2], PROMPTS[3]], SamplerParams(logprobs=2))
            observed.advance(3)
        observed.check_that_all_do_the_same()
        found.append(observed)
    eager_run, run = found
    assert set(eager_run.buckets()) == {None} and None not in run.buckets()
    assert run.outputs == eager_run.outputs
