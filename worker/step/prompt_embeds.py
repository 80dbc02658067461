"""Prompts that are given as embeddings, which replace the model's own embeddings of their tokens in
the steps that compute these tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels.host.device_copy import copy_to_device
from swell.worker.sampler_wire import PromptEmbeds
from swell.worker.wire import NewRequest, SchedulerOutput

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class EmbedsOverride(NamedTuple):
    """Embeddings that replace those of E tokens of a step."""

    indices: Tensor
    """[E] int64, indices among the tokens of the step"""
    values: Tensor
    """[E, width]"""

    def put_into(self, x: Tensor) -> Tensor:
        """x [T, width], the embeddings of all tokens -> a copy with these embeddings at their
        indices"""
        return x.index_copy(0, self.indices, self.values.to(x.dtype))


class PromptEmbedsTable:
    """The embeddings of prompts that are not computed yet, by slot. The first stage keeps them; the
    other stages check them too, so that all stages agree on which requests fail."""

    def __init__(self, width: int | None, device: torch.device, is_first_stage: bool) -> None:
        """`width`: the size of one embedding; None: the model does not accept embeddings."""
        self._width, self._device = width, device
        self._keeps = is_first_stage
        self._of_slot: dict[int, tuple[int, Tensor]] = {}
        """Slot -> the position of the first embedding, and all embeddings."""

    def __len__(self) -> int:
        return len(self._of_slot)

    def add_request(self, row: NewRequest) -> None:
        """Adds the request that takes a slot. Raises `ValueError` for embeddings that do not fit
        the model."""
        self._of_slot.pop(row.slot, None)
        if row.prompt_embeds is not None:
            self._check(row.prompt_embeds, row.prompt_tokens)
            if self._keeps:
                embeds = self._read(row.prompt_embeds)
                self._of_slot[row.slot] = (row.prompt_embeds.first, embeds)

    def _check(self, given: PromptEmbeds, prompt_tokens: int) -> None:
        if given.width != self._width:
            raise ValueError(
                f"prompt_embeds: the embeddings have {given.width} values, but the model's have "
                f"{self._width}"
            )
        if given.first + given.num_tokens != prompt_tokens:
            raise ValueError(
                f"prompt_embeds: {given.num_tokens} embeddings after the first {given.first} "
                f"tokens do not match {prompt_tokens} prompt tokens"
            )

    def _read(self, given: PromptEmbeds) -> Tensor:
        """Returns [prompt tokens, width] on the model's device."""
        flat = torch.frombuffer(bytearray(given.data), dtype=DTYPES[given.dtype])
        return copy_to_device(flat.view(-1, given.width), self._device)

    def override(self, plan: SchedulerOutput) -> EmbedsOverride | None:
        """Returns the embeddings that a step uses; None: it uses none. Drops embeddings that no
        later step needs."""
        if not self._of_slot:
            return None
        indices: list[Tensor] = []
        values: list[Tensor] = []
        first = 0
        for slot, start, count in zip(plan.slots, plan.starts, plan.num_tokens, strict=True):
            if (kept := self._of_slot.get(slot)) is not None:
                begin, embeds = kept
                part = embeds[start - begin : start - begin + count]
                indices.append(torch.arange(first, first + len(part), device=self._device))
                values.append(part)
                if start + count >= begin + len(embeds):
                    del self._of_slot[slot]
            first += count
        return EmbedsOverride(torch.cat(indices), torch.cat(values)) if indices else None
