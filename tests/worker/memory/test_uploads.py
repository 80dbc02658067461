"""Copies of weights to a GPU and back, where the copies are done late."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from swell.kernels.linear import pack_quantized
from swell.kernels.weights.quantized import quantize
from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.memory import sleep, uploads
from swell.worker.memory.host_memory import LockedMemory
from swell.worker.memory.sleep import LockedCopy, SleepingWeights
from swell.worker.memory.uploads import Uploads
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


@pytest.fixture(params=[1 << 26, 16, 1], ids="parts of {} bytes".format)
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(uploads, "PART_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=str)
def test_each_tensor_arrives(late_gpu: LateGpu, part_bytes: int, device: torch.device) -> None:
    given = sources()
    wanted = [source.clone() for source in given]
    targets = [torch.full(source.shape, 9, dtype=source.dtype) for source in given]
    with Uploads(device) as uploading:
        for source, target in zip(given, targets, strict=True):
            uploading.copy(target, source)
            source.zero_()  # the file's memory, for example, is read again
    assert all(map(torch.equal, targets, wanted))
    if device == CUDA:
        assert late_gpu.num_queued >= len(given)
        assert late_gpu.locked_bytes <= 2 * max(part_bytes, 8), "an element is never divided"
    assert not late_gpu.locked, "the buffers are given back"


def test_without_locked_memory_each_tensor_arrives(
    late_gpu: LateGpu, caplog: pytest.LogCaptureFixture
) -> None:
    late_gpu.lock_error = 2
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources()]
    with Uploads(CUDA) as uploading:
        for source, target in zip(sources(), targets, strict=True):
            uploading.copy(target, source)
    assert all(map(torch.equal, targets, sources()))
    late_gpu.launch()
    [line] = caplog.messages
    assert "ulimit -l" in line


def test_a_failed_load_frees_its_buffers_after_the_copies(late_gpu: LateGpu) -> None:
    target = torch.zeros(8)

    def load() -> None:
        with Uploads(CUDA) as uploading:
            uploading.copy(target, torch.ones(8))
            raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        load()
    assert target.sum() == 8 and not late_gpu.locked


def test_the_host_fills_one_buffer_while_the_device_copies_the_other(late_gpu: LateGpu) -> None:
    target = torch.zeros(3, 8)
    with Uploads(CUDA) as uploading:
        for row in range(3):
            uploading.copy(target[row], torch.ones(8))
            assert target.sum() == 8 * max(0, row - 1), "at most two copies are queued"
    assert target.sum() == 24


def test_a_target_may_be_a_part_of_a_wider_tensor(late_gpu: LateGpu, part_bytes: int) -> None:
    whole = torch.zeros(4, 6)
    with Uploads(CUDA) as uploading:
        uploading.copy(whole[:, 1:3], torch.ones(4, 2))
    assert whole.sum() == whole[:, 1:3].sum() == 8


class CudaStorage:
    """A storage of the GPU."""

    device = CUDA

    def __init__(self, values: list[int]) -> None:
        self.values = torch.tensor(values, dtype=torch.uint8)

    def nbytes(self) -> int:
        return len(self.values)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

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
    late_gpu.launch()


@pytest.fixture
def from_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All storages are taken for those of the GPU."""
    locked = partial(LockedMemory, device=CUDA)
    monkeypatch.setattr(sleep, "LockedMemory", lambda nbytes, _device: locked(nbytes))
    monkeypatch.setattr(sleep, "_synchronize", lambda _device: torch.cuda.synchronize(CUDA))


@pytest.mark.usefixtures("from_gpu")
def test_copies_of_small_storages_are_locked(late_gpu: LateGpu) -> None:
    storages = [torch.zeros(n).untyped_storage() for n in (1, 8, 100, 5000, 8)]
    kept = [LockedCopy(storage) for storage in storages]
    assert len(late_gpu.locked) == len(storages)
    assert not any(copy.error for copy in kept)
    torch.cuda.synchronize(CUDA)


@pytest.mark.usefixtures("from_gpu")
def test_weights_that_cannot_be_locked_are_warned_of_once(
    late_gpu: LateGpu, caplog: pytest.LogCaptureFixture
) -> None:
    late_gpu.lock_error = 2
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    SleepingWeights(model).wake()
    assert all(map(torch.equal, model.parameters(), wanted))
    late_gpu.launch()
    [record] = caplog.records
    assert "ulimit -l" in record.message
    assert record.__dict__["fields"]["nbytes"] == sum(tensor.nbytes for tensor in wanted)


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


def test_quantized_weights_sleep(late_gpu: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "_synchronize", torch.cuda.synchronize)
    layer = PackedWeight()
    layer.weight = pack_quantized(quantize(torch.randn(40, 64), 4), torch.float32)
    data = layer.weight.data
    wanted = data.clone()
    sleeping = SleepingWeights(nn.Sequential(layer))
    assert sleeping.nbytes == wanted.nbytes and data.untyped_storage().nbytes() == 0
    sleeping.wake()
    assert torch.equal(layer.weight.data, wanted) and layer.weight.data is data
    assert late_gpu.num_queued == 2
