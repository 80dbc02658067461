"""Blocks that the tests write are read as the numbers that were written, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swell.configs.files.gguf.block_types import BLOCK_TYPES
from swell.worker.checkpoint.gguf.blocks import dequantize
from tests.support.gguf.blocks import encode

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("spread", ["normal", "positive", "zeros", "one large number"])
def test_numbers_are_read_as_written(name: str, spread: str) -> None:
    random = np.random.default_rng(5)
    numbers = random.normal(size=(7, 512)).astype(np.float32)
    if spread == "positive":
        numbers = np.abs(numbers)
    elif spread == "zeros":
        numbers = np.zeros_like(numbers)
    elif spread == "one large number":
        numbers[:, 100] = 300
    data, written = encode(name, numbers)
    kind = KINDS[name]
    found = dequantize(torch.from_numpy(data.reshape(-1, kind.nbytes)), kind)
    np.testing.assert_array_equal(found.numpy().reshape(7, 512), written)


@pytest.mark.parametrize("name", KINDS)
def test_more_bits_are_closer_to_the_numbers(name: str) -> None:
    numbers = np.random.default_rng(5).normal(size=(7, 512)).astype(np.float32)
    _, written = encode(name, numbers)
    bits = KINDS[name].nbytes * 8 / KINDS[name].numbers
    error = np.abs(written - numbers).max()
    assert error < 8 / 2 ** min(int(bits), 8)
