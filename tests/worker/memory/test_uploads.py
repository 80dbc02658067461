"""Copies of weights to a GPU and back, where the copies are done late."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from swell.kernels.host.uploads import Uploads
from swell.worker.memory import sleep
from swell.worker.memory.locked_copy import LockedCopy
from swell.worker.memory.sleep import SleepingWeights
from tests.worker.memory.late_gpu import LateGpu, late_gpu

__all__ = ["late_gpu"]

CUDA = torch.device("cuda")


def sources() -> list[Tensor]:
    """Returns tensors of many sizes and types: views, numbers, and tensors without elements."""
    wide = torch.arange(60.0).view(6, 10)
    return [
        *(wide.clone()[:, 2:7], wide.clone().t(), wide.to(torch.bfloat16)),
        *(torch.tensor(3.5), torch.empty(0, 4)),
        *(torch.arange(n, dtype=torch.int64) for n in (1, 1000, 7, 300)),
    ]


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=str)
def test_each_tensor_arrives(late_gpu: LateGpu, device: torch.device) -> None:
    uploads, given = Uploads(device), sources()
    wanted = [source.clone() for source in given]
    targets = [torch.full(source.shape, 9, dtype=source.dtype) for source in given]
    for source, target in zip(given, targets, strict=True):
        uploads.copy(target, source)
        source.zero_()  # the file's memory, for example, is read again
    uploads.finish()
    assert all(map(torch.equal, targets, wanted))
    assert late_gpu.num_queued == (len(given) if device == CUDA else 0)


def test_the_host_fills_one_buffer_while_the_device_copies_the_other(late_gpu: LateGpu) -> None:
    uploads, target = Uploads(CUDA), torch.zeros(3, 8)
    for row in range(3):
        uploads.copy(target[row], torch.ones(8))
        assert target.sum() == 8 * max(0, row - 1), "at most two copies are queued"
    uploads.finish()
    assert target.sum() == 24


def test_a_target_may_be_a_part_of_a_wider_tensor(late_gpu: LateGpu) -> None:
    uploads, whole = Uploads(CUDA), torch.zeros(4, 6)
    uploads.copy(whole[:, 1:3], torch.ones(4, 2))
    uploads.finish()
    assert whole.sum() == whole[:, 1:3].sum() == 8


class CudaStorage:
    """A storage of the GPU."""

    device = CUDA

    def __init__(self, values: list[int]) -> None:
        self.values = torch.tensor(values, dtype=torch.uint8)

    def nbytes(self) -> int:
        return len(self.values)

    def copy_(self, source: torch.UntypedStorage, non_blocking: bool) -> None:
        self.values.untyped_storage().copy_(source, non_blocking=non_blocking)


@pytest.mark.parametrize("error", [0, 2], ids=["locked", "refused"])
def test_a_copy_is_in_locked_memory_as_long_as_it_exists(
    late_gpu: LateGpu, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    late_gpu.lock_error = error
    copy = torch.UntypedStorage.copy_

    def from_gpu(target: torch.UntypedStorage, source: object, non_blocking: bool) -> object:
        is_gpu = isinstance(source, CudaStorage)
        if is_gpu and not error:
            assert late_gpu.locked == {target.data_ptr(): 5}
        inner = source.values.untyped_storage() if isinstance(source, CudaStorage) else source
        return copy(target, inner, non_blocking)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", from_gpu)
    storage = CudaStorage([1, 2, 3, 4, 5])
    kept = LockedCopy(storage)  # type: ignore[arg-type]
    torch.cuda.synchronize(CUDA)
    storage.values.zero_()
    kept.restore(storage)  # type: ignore[arg-type]
    torch.cuda.synchronize(CUDA)
    assert storage.values.tolist() == [1, 2, 3, 4, 5] and kept.nbytes == 5
    del kept
    assert not late_gpu.locked


def test_weights_are_freed_after_they_were_copied(
    late_gpu: LateGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "_synchronize", torch.cuda.synchronize)
    model = nn.Linear(4, 6)
    wanted = model.weight.detach().clone()
    sleeping = SleepingWeights(model)
    assert model.weight.untyped_storage().nbytes() == 0
    sleeping.wake()
    assert torch.equal(model.weight, wanted)
    assert late_gpu.num_queued == 4
