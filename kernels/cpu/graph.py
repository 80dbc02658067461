"""Captures what a function computes as a recording of compiled calls (see `recording.py`), and runs
such calls without a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from swell.kernels.cpu.capture import references
from swell.kernels.cpu.capture import torch_operations as operations
from swell.kernels.cpu.capture.comparison import Recorded, refuse_differences
from swell.kernels.cpu.capture.recording import Recording, recorded
from swell.kernels.graph import NotCapturableError, Probe, Traits
from swell.kernels.host.dispatch_mode import DispatchMode

TRAITS = Traits(has_fixed_sizes=False, accepts_torch=False, is_asynchronous=False)


def capture(
    run: Callable[[], list[Tensor]], sizes: tuple[int, ...], probe: Probe | None = None
) -> tuple[list[Tensor], Recording]:
    """See `swell.kernels.graph.capture`. The function may call operations of this backend, allocate
    and view tensors, and call the operations of torch in `torch_operations.py`."""
    results, step = _record(run, sizes)
    if probe is not None and step.recording.computes_torch:
        others, of_probe = _record(*probe)
        refuse_differences(
            Recorded(step.recording, step.made, results),
            Recorded(of_probe.recording, of_probe.made, others),
        )
    step.recording.finish(step.made, results)
    return results, step.recording


def _record(
    run: Callable[[], list[Tensor]], sizes: tuple[int, ...]
) -> tuple[list[Tensor], operations.Step]:
    assert len(set(sizes)) == len(sizes)
    with recorded(sizes) as recording:
        step = operations.Step(recording, sizes)
        with _RefuseReads(), _Compiled(step):
            return run(), step


class _RefuseReads(TorchFunctionMode):
    """Raises `NotCapturableError` where Python reads values that no operation has computed yet.
    Other reads are operations, which `_Compiled` refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__"):
            raise NotCapturableError(f"Python reads a result by torch's {name}")
        return func(*args, **(kwargs or {}))


def rounding_like_replays() -> DispatchMode:
    """See `swell.kernels.graph.rounding_like_replays`."""
    return _CompiledOrTorch(operations.UnrecordedStep())


def compared_with_torch() -> _Compared:
    """See `swell.kernels.graph.compared_with_torch`."""
    return _Compared(operations.UnrecordedStep())


class _Compiled(DispatchMode):
    """Replaces torch's operations by compiled calls, which are recorded during a recording, and
    lets those run that need not be repeated."""

    def __init__(self, step: operations.Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch without annotations
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in operations.VIEWS or name in operations.CONSTANTS:
            return func(*args, **kwargs)
        if name in operations.MAKERS:
            made = func(*args, **kwargs)
            self.step.add(made)
            return made
        if name in operations.FACTORIES:
            made = func(*args, **kwargs)
            if len(self.step.sizes_in(made)) != 1:
                return made
            self.step.add(made)
            with self._again():
                return made.fill_(operations.FACTORIES[name])
        if name in operations.COMPOSED:
            with self._again():
                return operations.COMPOSED[name](*args, **kwargs)
        if name in operations.LOOKUPS:
            with self._again():
                return operations.record_lookup(self.step, func, args, kwargs)
        if name in operations.CHOICES:
            return operations.CHOICES[name](self.step, func, *args, **kwargs)
        if name in operations.REDUCTIONS:
            return operations.record_reduction(self.step, func, args, kwargs)
        if name.removesuffix("_") in operations.POINTWISE or name in operations.POINTWISE:
            return operations.record_pointwise(self.step, func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self._again():
                return func.decompose(*args, **kwargs)
        raise NotCapturableError(f"torch's {name} is not an operation that a replay can repeat")

    @contextmanager
    def _again(self) -> Iterator[None]:
        """In this context, operations that `__torch_dispatch__` calls are replaced, too."""
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _CompiledOrTorch(_Compiled):
    """Lets torch compute the operations that have no compiled calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except NotCapturableError:
            return func(*args, **(kwargs or {}))


class _Compared(_CompiledOrTorch):
    """Also computes each of these operations with torch, on the same operands."""

    difference: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if not operations.is_computed(name):
            return super().__torch_dispatch__(func, types, args, kwargs)
        expected = references.compute(func, args, kwargs)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if self.difference is None and not references.are_equal(func, args, expected, found):
            self.difference = f"torch's {name}"
        return found
