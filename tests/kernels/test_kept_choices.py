"""A run repeats the choices of another one whose numbers are rounded differently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swell.kernels.host.kept_choices import KeptChoices

pytestmark = pytest.mark.slow

NEARLY_EQUAL = torch.tensor([[0.5, 0.3, 0.2999, 0.1], [0.1, 0.2, 0.3, 0.4]])


def chosen(x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(k)
    return values, indices


def test_choices_between_nearly_equal_numbers_are_repeated() -> None:
    choices = KeptChoices()
    with choices.keep():
        _, kept = chosen(NEARLY_EQUAL)
    other = NEARLY_EQUAL.clone()
    other[0, 2] = 0.3001
    assert not torch.equal(chosen(other)[1], kept)
    with choices.repeat() as repeated:
        values, indices = chosen(other)
    assert torch.equal(indices, kept) and repeated.are_valid
    assert torch.equal(values, other.gather(1, kept))


def test_choices_of_other_numbers_are_not_valid() -> None:
    choices = KeptChoices()
    with choices.keep():
        chosen(-NEARLY_EQUAL)
    with choices.repeat() as repeated:
        chosen(NEARLY_EQUAL)
    assert not repeated.are_valid


def test_a_run_with_more_or_other_choices_is_not_valid() -> None:
    for later in ([2, 2], [3]):
        choices = KeptChoices()
        with choices.keep():
            chosen(NEARLY_EQUAL)
        with choices.repeat() as repeated:
            found = [chosen(NEARLY_EQUAL, k)[1] for k in later]
        assert torch.equal(found[-1], chosen(NEARLY_EQUAL, later[-1])[1])
        assert not repeated.are_valid
