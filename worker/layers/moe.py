"""A mixture of experts whose experts are distributed over the workers of one pipeline stage.

Attention is data parallel: each engine has its own tokens, the same on all its tensor ranks. Each
expert of a layer is on one of the stage's workers in all engines (`mesh.expert`), in any placement
(see `worker/moe/experts.py`); or copies of it are on several workers, each for the tokens of some
engines. With T tokens in this engine, P the largest number of tokens in any engine, k choices per
token and the engines of `mesh.data`, there are two forms. On a GPU without `model.exact`:

    route          x [T, hidden] -> weights, choices [T, k]      the same on every tensor rank
    all-gather     [P, hidden | choices | weights] over `data`   [engines * P, ...]
    local experts  the tokens of all engines together            [engines * P, k, hidden]
    combine        this rank's terms of each token               [engines * P, hidden]
    sum            reduce-scatter over `data`, all-reduce over `tensor`      [P, hidden]

On CPU and with `model.exact` (`Mesh.adds_in_order`), where the sum moves k times as much:

    all-gather     [P, hidden | choices] over `data`             [engines * P, ...]
    local experts  each engine's tokens separately               [engines * P, k, hidden]
    sum            reduce-scatter over `data`, all-reduce over `tensor`      [P, k, hidden]
    combine        in the order of the k choices, in the token's engine      [T, hidden]

Here an answer has the same bits for any number of engines and any placement: in each element of the
sum only one term is not zero, and the choices are added in the token's engine, in a fixed order. It
also has the same bits in any batch, because weights are packed (see `kernels/linear.py`). If they
are not packed (float16 on CPU), the rounding of a matrix product depends on its number of rows: so
a product never mixes tokens of two engines.

An all-to-all of only the tokens that leave is not used. With N engines, each rank sends (N - 1) * P
rows in the all-gather and as many in the reduce-scatter. An all-to-all saves those of tokens that
have no expert on the receiving engine, a share of (1 - 1 / N)^k. A captured step would save
nothing: its sizes are fixed, and every token may have to go to any engine. In an eager step, the
host would wait in each layer for the numbers of tokens. See docs/design/decisions.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from swell.kernels.linear import Weight, panel
from swell.kernels.moe import ExpertTable, combine_experts, expert_outputs, route
from swell.kernels.weights.quantized import GROUP, QuantizedForm
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.mlp import FeedForward
from swell.worker.layers.packed_weight import FLOATS, Matrix, Packable, Packing, pack_matrix
from swell.worker.layers.weight_shard import ALL, WeightShard

PlainExpert = tuple[torch.Tensor, torch.Tensor]
"""The weights of one expert while they are loaded or sent: gate over up [2 * size, hidden], down
[hidden, size]."""
Expert = tuple[Weight, Weight]
"""The weights of one expert as they are used: packed if the device uses packed weights, or
quantized."""

PARTS = ("gate_up", "down")
"""The names of an expert's two weights."""


@dataclass(frozen=True)
class ExpertWeight:
    """The place of one of an expert's two weights: a `Matrix`."""

    experts: MutableMapping[int, Expert]
    expert: int
    part: int
    """The place in `PARTS`."""

    @property
    def weight(self) -> Weight:
        return self.experts[self.expert][self.part]

    @property
    def may_be_quantized(self) -> bool:
        """GPUs compute experts with floats only."""
        return self.weight.device.type == "cpu"

    def quantized_bits(self, packing: Packing) -> int | None:
        return packing.bits if self.may_be_quantized else None

    def pack(self, packing: Packing) -> None:
        pack_matrix(self, packing)

    def replace(self, weight: Weight) -> None:
        gate_up, down = self.experts[self.expert]
        self.experts[self.expert] = (gate_up, weight) if self.part else (weight, down)


@dataclass(frozen=True)
class ExpertTraits:
    """The configuration of a model's experts."""

    count: int
    size: int
    """The inner dimension of an expert."""
    top_k: int
    """Number of experts for each token."""
    renormalize: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    round_weights: bool
    """Whether the weights are rounded to the model's type before they are used."""
    names: tuple[str, str, str]
    """The names of gate, up and down in a checkpoint."""


class MoE(FeedForward, Packable):
    """A feed-forward block of experts. The router is on every rank; each expert, or each copy of
    it, is on one rank of `mesh.expert`."""

    def __init__(self, hidden: int, traits: ExpertTraits, mesh: Mesh) -> None:
        super().__init__()
        self.hidden, self.traits, self.mesh = hidden, traits, mesh
        self.router = ReplicatedLinear(hidden, traits.count, bias=False)
        self.local_experts = ExpertTable(traits.count, mesh.device)
        """The experts that this rank holds."""
        self.owners: Sequence[Sequence[int]] | None = None
        """[engines][experts] the rank of `mesh.expert` that computes an expert for the tokens of an
        engine; None: each expert has one copy."""
        self._owned: torch.Tensor | None = None
        """[engines, experts] bool: the experts that this rank computes for the tokens of an engine;
        None: all of `local_experts`."""
        self.load: torch.Tensor | None = None
        """[experts] int64: how often tokens of this engine have chosen each expert; None: not
        counted."""
        self._recorded: torch.Tensor | None = None
        """[max_tokens, k]: where the choices of each step are written; None: nowhere."""
        self.packing = FLOATS
        """How the weights of experts are stored; those that arrive later, too."""

    def forward(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Every worker of the stage must call this, even without tokens. Padding chooses no
        expert."""
        traits = self.traits
        weights, choices = route(self.router(x), traits.top_k, traits.renormalize, slots)
        if self._recorded is not None:
            self._recorded[: len(choices)] = choices
        if self.load is not None:
            chosen = choices.flatten()
            self.load.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())
        if traits.round_weights:
            weights = weights.to(x.dtype)
        # All engines pad a step to the same number of tokens, or none does.
        engines = self.mesh.data.size
        tokens = [len(x)] * engines if slots is not None or engines == 1 else self.mesh.tokens
        assert tokens[self.mesh.data.rank] == len(x), (
            "dp_sync announced a different number of tokens"
        )
        if self.mesh.adds_in_order:
            return combine_experts(self._outputs(x, choices, tokens), weights)
        return self._sums(x, choices, weights, tokens)

    def record_choices(self, target: torch.Tensor) -> None:
        """Writes the choices of each step, [T, k], to the first rows of `target` [max_tokens, k]
        from now on."""
        self._recorded = target

    def count_load(self) -> None:
        """Counts `load` from zero, in the same memory, because captured steps contain its
        address."""
        if self.load is None:
            self.load = torch.zeros(self.traits.count, dtype=torch.int64, device=self.mesh.device)
        self.load.zero_()

    def halve_load(self) -> None:
        """Halves `load`, so that older choices count less."""
        assert self.load is not None, "count_load comes first"
        self.load //= 2

    def share(self, owners: Sequence[Sequence[int]] | None) -> None:
        """Sets `owners`. This rank must hold the experts that it owns."""
        here = self.mesh.expert.rank
        self.owners, self._owned = owners, None
        if owners is not None:
            owned = [[owner == here for owner in of_engine] for of_engine in owners]
            self._owned = torch.tensor(owned, device=self.mesh.device)

    def refresh_addresses(self) -> None:
        """Reads the addresses of the experts again, after their memory has moved."""
        self.local_experts.refresh()

    def make_expert(self) -> PlainExpert:
        """Returns uninitialized weights of one expert."""
        gate_up, down = self._expert_shapes
        dtype, device = self.router.weight.dtype, self.mesh.device
        return (
            torch.empty(gate_up, dtype=dtype, device=device),
            torch.empty(down, dtype=dtype, device=device),
        )

    def matrices(self) -> Iterable[tuple[str, Matrix]]:
        for expert in list(self.local_experts):
            for part, name in enumerate(PARTS):
                yield f".experts.{expert}.{name}", ExpertWeight(self.local_experts, expert, part)

    def quantized_inputs(self, packing: Packing) -> Iterable[tuple[str, int]]:
        if packing.bits is not None and self.mesh.device.type == "cpu":
            for name, (_, inputs) in zip(PARTS, self._expert_shapes, strict=True):
                yield f".experts.{name}", inputs

    def on_packed(self, packing: Packing) -> None:
        assert packing.exact == self.mesh.exact, "experts that arrive later are packed like these"
        self.packing = packing

    def pack_expert(self, weights: Expert) -> Expert:
        """Converts the weights of a loaded expert to the form in which they are used."""
        experts = {0: weights}
        for part, _ in enumerate(PARTS):
            ExpertWeight(experts, 0, part).pack(self.packing)
        return experts[0]

    @property
    def may_quantize(self) -> bool:
        """Whether experts may be quantized."""
        return self.packing.is_quantized and self.mesh.device.type == "cpu"

    @property
    def expert_bytes(self) -> int:
        """The most bytes of one expert in the form in which it is used."""
        weight, bits = self.router.weight, self.packing.bits
        width = panel(weight.device.type) or 1
        panels = [(-(-outs // width), ins) for outs, ins in self._expert_shapes]
        if bits is None or not self.may_quantize:
            return sum(count * width * ins for count, ins in panels) * weight.dtype.itemsize
        form = QuantizedForm(bits, GROUP, has_mins=False, scale_type=torch.float32)
        return sum(count * (ins // GROUP) * form.block_bytes(width) for count, ins in panels)

    @property
    def _expert_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        size, hidden = self.traits.size, self.hidden
        return (2 * size, hidden), (hidden, size)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.router.weight_shards(f"{name}.gate")
        for expert, (gate_up, down) in self.local_experts.items():
            assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
            yield from self.expert_weight_shards(name, expert, (gate_up, down))

    def expert_weight_shards(
        self, name: str, expert: int, weights: PlainExpert
    ) -> Iterator[WeightShard]:
        """Returns the shards that fill the weights of one expert."""
        (gate_up, down), size = weights, self.traits.size
        targets = (gate_up[:size], gate_up[size:], down)
        for part, target in zip(self.traits.names, targets, strict=True):
            shape = tuple(target.shape)
            yield WeightShard(f"{name}.experts.{expert}.{part}.weight", target, (ALL, ALL), shape)

    def _sums(
        self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, tokens: Sequence[int]
    ) -> torch.Tensor:
        """[T, hidden], [T, k], [T, k] -> [T, hidden]: the sum of each token's experts. Each rank
        adds those that it holds and rounds, then the ranks add. `tokens`: the number of each
        engine's tokens."""
        mesh, count = self.mesh, len(x)
        if mesh.data.size > 1:
            x, choices, weights = self._gather(max(tokens), x, choices, weights)
        outputs = x.new_zeros(*choices.shape, self.hidden)
        expert_outputs(x, self._to_compute(choices, len(tokens)), self.local_experts, outputs)
        sums = combine_experts(outputs, weights)
        if mesh.data.size > 1:
            sums = mesh.data.reduce_scatter(sums)[:count]
        return mesh.tensor.all_reduce(sums)

    def _outputs(
        self, x: torch.Tensor, choices: torch.Tensor, tokens: Sequence[int]
    ) -> torch.Tensor:
        """[T, hidden], [T, k] -> [T, k, hidden]: the output of each chosen expert for each token.
        `tokens`: the number of each engine's tokens."""
        mesh, count, padded = self.mesh, len(x), max(tokens)
        if mesh.data.size > 1:
            x, choices = self._gather(padded, x, choices)
        choices = self._to_compute(choices, len(tokens))
        outputs = x.new_zeros(*choices.shape, self.hidden)
        for engine, of_engine in enumerate(tokens):
            rows = slice(engine * padded, engine * padded + of_engine)
            expert_outputs(x[rows], choices[rows], self.local_experts, outputs[rows])
        if mesh.data.size > 1:
            outputs = mesh.data.reduce_scatter(outputs)[:count]
        # A token is a row of the sum: a captured step has other numbers of tokens.
        return mesh.tensor.all_reduce(outputs.flatten(1)).view(outputs.shape)

    def _gather(
        self, padded: int, x: torch.Tensor, choices: torch.Tensor, *weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns the tensors of all engines, [engines * padded, ...]. Padding chooses no
        expert."""
        # Choices are sent as the bits of activations: bfloat16 represents integers exactly only up
        # to 256.
        parts = [x, choices.to(_INTEGERS[x.element_size()]), *weights]
        if padded > len(x):
            rows = (0, 0, 0, padded - len(x))
            parts = [functional.pad(t, rows, value=-1 if t is parts[1] else 0) for t in parts]
        sent = [part.view(x.dtype) for part in parts]
        gathered = self.mesh.data.all_gather(torch.cat(sent, dim=1), 0)
        x, *others = gathered.split([part.shape[1] for part in sent], dim=1)
        of_parts = zip(others, parts[1:], strict=True)
        choices, *more = (other.contiguous().view(part.dtype) for other, part in of_parts)
        return [x, choices.long(), *more]

    def _to_compute(self, choices: torch.Tensor, engines: int) -> torch.Tensor:
        """choices [engines * P, k] -> the same; -1: another rank computes it."""
        if self._owned is None:
            return choices
        of_engines = choices.view(engines, -1)
        is_own = self._owned.gather(1, of_engines.clamp(min=0))
        return of_engines.masked_fill(~is_own, -1).view_as(choices)


_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Bytes of an element -> the integer type of that size."""
