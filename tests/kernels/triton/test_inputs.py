"""A step's inputs: the kernel writes the same as the reference, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.inputs import Bucket, Inputs
from swell.kernels.triton import inputs
from swell.kernels.triton.inputs import make_gather, write_tokens
from tests.kernels.test_padding import bucket_of, gathered, paddings, steps

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[object]:
    """Launches the kernels in sizes of an engine; the type makes no difference."""
    device = torch.device("cpu")
    out = Inputs.allocate(8192, 257, 512, device)
    ids = torch.zeros(256, 8193, dtype=torch.int32)
    table = torch.zeros(256, 512, dtype=torch.int32)
    gather = make_gather(ids, table, 16, out)
    yield gather([3, 1], [0, 9], [4, 1], [1, 1], Bucket(16, 4, 4, 16))
    some = torch.zeros(2, dtype=torch.int64)
    yield write_tokens(ids, some, some, some)


def equals_the_reference(step: list, bucket: Bucket | None) -> None:
    found, sizes = gathered("triton", step, bucket, -7)
    expected, expected_sizes = gathered("reference", step, bucket, -7)
    assert sizes == expected_sizes
    for name in Inputs._fields:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@settings(max_examples=20, deadline=None)
@given(step=steps(), padding=st.none() | paddings)
def test_a_step_equals_the_reference(step, padding):
    equals_the_reference(step, None if padding is None else bucket_of(step, padding))


@pytest.mark.parametrize("block", [2, 4])
def test_more_tokens_and_blocks_than_one_program_computes(monkeypatch, block):
    monkeypatch.setattr(inputs, "BLOCK", block)
    step = [(4, 0, 0, 0), (1, 3, 6, 2), (0, 20, 1, 1), (3, 0, 0, 0), (2, 12, 5, 1)]
    equals_the_reference(step, None)
    equals_the_reference(step, bucket_of(step, (9, 4, 5)))


def test_a_step_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a step has tokens=3, but its bucket has only 2"):
        gathered("triton", [(0, 0, 3, 1)], Bucket(2, 1, 1, 3), 0)
    with pytest.raises(ValueError, match="61 tokens, but there is room for 60"):
        gathered("triton", [(0, 0, 3, 1)], Bucket(61, 1, 1, 61), 0)
    with pytest.raises(IndexError, match="row 0 of the step: slot 9"):
        gathered("triton", [(9, 0, 3, 1)], None, 0)


@pytest.mark.parametrize("block", [2, 128])
def test_tokens_are_written_to_their_positions(monkeypatch, block):
    monkeypatch.setattr(inputs, "BLOCK", block)
    memory = torch.zeros(4, 5, dtype=torch.int32)
    ids = memory[1:]
    places = torch.tensor([[2, 4], [-1, 0], [0, 0], [1, 3], [-1, 0]])
    write_tokens(ids, places[:, 0], places[:, 1], torch.tensor([7, 5, 8, 9, 6]))
    assert ids.tolist() == [[8, 0, 0, 0, 0], [0, 0, 0, 9, 0], [0, 0, 0, 0, 7]]
    assert not memory[0].any(), "a padded entry writes before the first slot"
    write_tokens(ids, *torch.empty(3, 0, dtype=torch.int64))
