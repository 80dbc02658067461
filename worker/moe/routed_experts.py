"""Records which experts computed each token. The layers write them, the KV blocks keep them, and a
reader reports them for the rows that request them.

A token's choices are stored in the block that holds its K and V, so a prompt that is found in the
prefix cache, or is loaded from another memory tier, has them too. With T tokens in a step, L layers
with experts up to and including this stage, and k choices per token and layer:

    layers        [T, L, k]    of this stage; those of earlier stages come with the activations
    last stage    one row of bytes per token, at the token's slot in the cache
    reader        the rows of all positions that have not been reported to the request

Expert numbers are those of the model, regardless of the rank that holds an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.worker.comm.mesh import Group, Mesh
from swell.worker.memory import host_memory
from swell.worker.model_interfaces import MixtureOfExperts, Model, moe_layers
from swell.worker.sample.logits_processor import HiddenStatesReader, PendingExtra
from swell.worker.sampler_wire import Extra, RoutedExperts
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import SPARE, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.wire import NewRequest, SchedulerOutput

_ALIGNMENT = 4
"""A token's bytes are a multiple of this, so that a block is a whole number of elements of the KV
cache's type."""
_MAX_UINT8 = 256


@dataclass(frozen=True)
class RouteLayout:
    """The memory layout of one token's choices."""

    layers: tuple[int, ...]
    """The model's layers that have experts, in all stages."""
    before: int
    """How many of these layers are in earlier stages."""
    through: int
    """How many of these layers are in this stage and earlier ones."""
    top_k: int
    wide: bool
    """Whether the number of an expert takes two bytes instead of one."""

    @classmethod
    def of(cls, model: Model) -> RouteLayout:
        """Returns the layout for a model. Raises `ValueError` if its experts are not computed
        here."""
        if not isinstance(model, MixtureOfExperts) or not model.expert_layers:
            raise ValueError(
                "model.routed_experts=true needs a mixture of experts that Swell computes itself "
                "(Mixtral, Qwen3-MoE); this model has none, or model.backend is transformers. "
                "Leave model.routed_experts out"
            )
        layers, traits = model.expert_layers, model.expert_traits
        return cls(
            layers,
            before=sum(layer < model.range.start for layer in layers),
            through=sum(layer < model.range.stop for layer in layers),
            top_k=traits.top_k,
            wide=traits.count > _MAX_UINT8,
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.int16 if self.wide else torch.uint8

    def used_bytes(self, layers: int) -> int:
        """Returns the bytes of one token's choices in this many layers."""
        return layers * self.top_k * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return -(-self.used_bytes(self.through) // _ALIGNMENT) * _ALIGNMENT

    def block_bytes(self, block_tokens: int) -> int:
        return block_tokens * self.token_bytes


class RouteRecorder:
    """The choices of the current step, and those of all tokens in the KV cache."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        num_blocks: int,
        block_tokens: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.layout = layout = RouteLayout.of(model)
        # [max_tokens + SPARE, token_bytes] uint8, for the current step
        shape = max_tokens + SPARE, layout.token_bytes
        self._step = torch.zeros(shape, dtype=torch.uint8, device=device)
        # [max_tokens + SPARE, L, k], a view of the same memory
        used = self._step[:, : layout.used_bytes(layout.through)]
        choices = used.view(layout.dtype).unflatten(1, (layout.through, layout.top_k))
        for index, layer in enumerate(moe_layers(model), layout.before):
            layer.record_choices(choices[:, index])
        kept_blocks = num_blocks if mesh.is_last_stage else 0
        # [num_blocks, block_tokens * token_bytes] uint8
        shape = kept_blocks, layout.block_bytes(block_tokens)
        (self.blocks,) = host_memory.zeros([shape], torch.uint8, device)
        # [num_blocks * block_tokens, token_bytes], a view of the same memory
        self.tokens = self.blocks.view(kept_blocks * block_tokens, layout.token_bytes)

    def receive(self, tokens: int, group: Group, source: int) -> None:
        """Receives the choices of the step's T tokens in earlier stages from the previous stage."""
        width = self.layout.used_bytes(self.layout.before)
        if width:
            arrived = self._step.new_empty(tokens, width)
            group.recv(arrived, source)
            self._step[:tokens, :width] = arrived

    def leaving(self, tokens: int) -> list[Tensor]:
        """Returns the choices to send to the next stage: [T, bytes] uint8, or nothing if no layer
        so far has experts. It is a copy, because the next step may begin before it is sent."""
        width = self.layout.used_bytes(self.layout.through)
        return [self._step[:tokens, :width].clone()] if width else []

    def keep(self, batch: InputBatch) -> None:
        """Stores the choices of a batch next to its K and V; called on the last stage after its
        computation."""
        self.tokens.index_copy_(0, batch.attention.slot_mapping, self._step[: batch.num_tokens])


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive positions of one row of the step."""

    row: int
    start: int
    count: int


@dataclass(slots=True)
class PendingRoutes(PendingExtra):
    # [P, token_bytes] uint8, for the concatenated spans
    choices: Tensor
    spans: list[_Span]
    layout: RouteLayout

    def to_cpu_nonblocking(self) -> PendingRoutes:
        return replace(self, choices=self.choices.to("cpu", non_blocking=True))

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        layout, end = self.layout, 0
        choices = self.choices[:, : layout.used_bytes(layout.through)].numpy()
        for span in self.spans:
            begin, end = end, end + span.count
            data = choices[begin:end].tobytes()
            yield (
                span.row,
                RoutedExperts(span.start, [*layout.layers], layout.top_k, layout.wide, data),
            )


class RoutedExpertsReader(HiddenStatesReader):
    """Reports to a request the choices of every position that it has computed or found in the
    cache. It reports a position once the choices of all positions before it are known, too.

        known to the client   0 ........ reported - 1
        computed positions                    start ........ start + n - 1
        reported now                reported .............. start + n - 1

    A request that takes a slot again is reported from its first token again; the results carry
    positions. Choices of a rejected draft are reported again when the position is computed again.
    """

    def __init__(self, recorder: RouteRecorder, states: RequestStates, blocks: BlockTables) -> None:
        self._recorder, self._blocks = recorder, blocks
        self._active = SlotSet(states.max_rows)
        # [max_rows]
        self._reported_np = np.zeros(states.max_rows, dtype=np.int64)

    def add_request(self, row: NewRequest) -> None:
        self._active.set(row.slot, row.sampler.routed_experts)
        self._reported_np[row.slot] = 0

    def reads(self, plan: SchedulerOutput) -> bool:
        return self._active.any and bool(
            len(self._active.among(np.array(plan.slots, dtype=np.int64)))
        )

    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        spans, places = [], []
        for row in self._active.among(np.array(plan.slots, dtype=np.int64)).tolist():
            slot, start = plan.slots[row], plan.starts[row]
            first, end = min(int(self._reported_np[slot]), start), start + plan.num_tokens[row]
            self._reported_np[slot] = end
            spans.append(_Span(row, first, end - first))
            places.append(np.stack([np.full(end - first, slot), np.arange(first, end)]))
        # [2, P] int64: slot, position
        slots, positions = to_device(np.concatenate(places, axis=1), hidden.device)
        block_tokens = self._blocks.block_tokens
        blocks = self._blocks.tensor[slots, positions // block_tokens].long()
        rows = self._recorder.tokens[blocks * block_tokens + positions % block_tokens]
        return [PendingRoutes(rows, spans, self._recorder.layout)]
