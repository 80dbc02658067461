"""Writes that leave out padding, without a wait for the device: only the device knows which entries
are padding, so their writes are redirected to a place where they change nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """The targets of the entries of a padded write. A padded entry repeats the write of an entry
    that is not padding; if all are padding, each writes what place 0 holds already."""

    source: Tensor
    """[N] int64: the entry whose values are written."""
    slots: Tensor
    """[N] int64: where they are written."""
    writes: Tensor
    """[N] bool: False if the place must keep its value."""


def without_padding(slots: Tensor) -> Targets:
    """slots [N] int64; -1: padding"""
    is_real = slots >= 0
    first = is_real.int().argmax()
    source = torch.where(is_real, torch.arange(len(slots), device=slots.device), first)
    found = slots[source]
    return Targets(source, found.clamp(min=0), found >= 0)
