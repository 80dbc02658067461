"""Torch's index of a GPU that Ray has assigned."""

from __future__ import annotations

import pytest

from swell.configs.runtime.gpus import gpu_indices


@pytest.mark.parametrize(
    ("assigned", "visible", "indices"),
    [
        ([], None, []),
        ([], "", []),
        # Ray shows the process only its own GPUs.
        ([2], "2", [0]),
        (["7", "5"], "5,7", [0, 1]),
        (["GPU-5d2e"], "GPU-5d2e", [0]),
        # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: it sees all GPUs of its host.
        ([2], None, [2]),
        ([3, 1], None, [1, 3]),
        # The host has given only some of its GPUs to Ray.
        (["6"], "4, 6", [1]),
        (["GPU-5d2e"], "GPU-09ab,GPU-5d2e", [1]),
    ],
)
def test_the_index_counts_the_gpus_that_torch_sees(assigned, visible, indices) -> None:
    assert gpu_indices(assigned, visible) == indices


def test_an_assigned_gpu_that_torch_does_not_see_is_named() -> None:
    with pytest.raises(ValueError, match=r"assigned GPU 3 .*CUDA_VISIBLE_DEVICES='0,1' hides it"):
        gpu_indices(["0", "3"], "0,1")
