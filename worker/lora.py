"""The adapters (LoRA) of a worker: read at its start or beside its steps, and chosen for the rows
of each step.

A step whose rows have none is computed as without adapters, by a capture of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors

from swell.configs.adapter_files import (
    MERGE,
    AdapterFiles,
    AdapterModule,
    adapter_digest,
    adapters_of,
    read_adapter,
)
from swell.configs.hanging_calls import HangingCalls, TooManyCalls
from swell.configs.log import first_line
from swell.configs.lora import Adapter, LoraConfig
from swell.configs.shown import shown
from swell.kernels.lora import LoraTokens
from swell.worker.layers.lora import AdaptedTokens, LayerLora, LoraMatrices, LoraPart, NoLora
from swell.worker.wire import AdapterLoaded, LoadAdapter, NewRow, SchedulerOutput

_MAX_READS = 16
"""Beside those that have a place: of folders that hang, and whose places others have since."""


class AdapterNotLoaded(RuntimeError):
    """The fault of a worker, not of a request: engines send requests for what all workers have."""


class AdaptedLayer(Protocol):
    """A linear layer that adapters may adapt."""

    lora: NoLora

    def lora_parts(self, *names: str) -> list[LoraPart]:
        """Its matrices; `names`: one for each, as the checkpoint has them."""


OnLoaded = Callable[[AdapterLoaded], None]


class NoAdapters:
    """Of a worker that takes none."""

    count = 0
    """Their numbers are below."""
    nbytes = 0
    """Of those that stay."""
    reserved_bytes = 0
    """For those that come and go, at most."""

    def load(self, command: LoadAdapter, rank: int, on_loaded: OnLoaded) -> None:
        name = shown(command.adapter.name)
        raise AdapterNotLoaded(f"adapter {name}: this worker takes none")

    def number_of(self, digest: str) -> int | None:
        """The number that layers know it by; None: the model alone."""
        if digest:
            raise AdapterNotLoaded(f"the adapter {digest} is not loaded")
        return None

    def close(self) -> None:
        """Load nothing more."""


NO_ADAPTERS = NoAdapters()


class Adapters(NoAdapters):
    """Those of the configuration, which stay, have the numbers 0, 1, ..; those that come and go are
    behind them, by their places.

    One thread loads, beside the steps: reading and packing take as long as many of them. What it
    loads was read before, by a thread of its own, since its folder may hang.
    """

    def __init__(self, config: LoraConfig, model: Any, dtype: torch.dtype) -> None:
        """Load all adapters of the configuration into the layers of a filled model. Raises
        ValueError for one that does not fit, and for a model that takes none."""
        if not getattr(model, "takes_adapters", False):
            raise ValueError(
                f"{config.reason}: this model takes no adapters, only native dense models that "
                f"sample do (llama, mistral, qwen2, qwen3); {MERGE}"
            )
        self._config, self._modules = config, model.linear_modules()
        self._dtype, self._device = dtype, model.device
        self.count = len(config.adapters) + (config.max_adapters if config.enabled else 0)
        self._layers: list[LayerLora] = []
        for layer, names in model.linear_layers():
            parts = layer.lora_parts(*names)
            lora = LayerLora(model.active_adapters, parts, self.count, dtype, self._device)
            self._layers.append(lora)
            layer.lora = lora
        self._numbers: dict[str, Future[int]] = {}
        """Digest of an adapter -> its number, once it is loaded."""
        self._at_place: dict[int, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swell-adapters")
        self._reads = HangingCalls("swell-adapter-read", config.max_adapters + _MAX_READS)
        self.nbytes = 0
        for number, adapter in enumerate(adapters_of(config).values()):
            future = self._numbers[adapter.digest] = Future()
            nbytes = self._load(number, adapter)
            self.nbytes += nbytes
            future.set_result(number)
        if config.enabled:
            self.reserved_bytes = config.max_adapters * self._largest_bytes()

    def load(self, command: LoadAdapter, rank: int, on_loaded: OnLoaded) -> None:
        """See `LoadAdapter`. `on_loaded` is called at least once, on any thread."""
        place, adapter, load = command.place, command.adapter, command.number
        digest, future = adapter.digest, self._numbers.get(adapter.digest)
        stays = future is not None and digest not in self._at_place.values()
        if not stays and place >= self._config.max_adapters:
            why = "has other files than when this worker read it; start the engines again"
            failure = f"adapter {shown(adapter.name)}: {adapter.folder} {why}"
            on_loaded(AdapterLoaded(rank, digest, failure, load))
            return
        if future is None or not (stays or self._is_good(place, digest, future)):
            future = self._begin(place, adapter)
        future.add_done_callback(
            lambda done: on_loaded(AdapterLoaded(rank, digest, _failure(done), load))
        )

    def _is_good(self, place: int, digest: str, future: Future[int]) -> bool:
        """Whether the adapter is at this place, or is being loaded there."""
        return self._at_place.get(place) == digest and not (future.done() and _failure(future))

    def _begin(self, place: int, adapter: Adapter) -> Future[int]:
        """Forget what has the place, and the adapter where it was before, which may be late."""
        for digest in (self._at_place.get(place, ""), adapter.digest):
            self._forget(digest)
        self._at_place = {p: d for p, d in self._at_place.items() if d in self._numbers}
        self._at_place[place] = adapter.digest
        future = self._numbers[adapter.digest] = Future()
        try:
            read = self._reads.submit(partial(_check_digest, adapter))
        except TooManyCalls as error:
            future.set_exception(error)
        else:
            number = len(self._config.adapters) + place
            read.add_done_callback(partial(self._continue, number, adapter, future))
        return future

    def _continue(
        self, number: int, adapter: Adapter, future: Future[int], read: Future[None]
    ) -> None:
        """Its files have been read."""
        if error := read.exception():
            future.set_exception(error)
            return
        try:
            self._thread.submit(self._load_into, number, adapter, future)
        except RuntimeError as refused:  # this worker ends, or the system has no thread for it
            future.set_exception(refused)

    def number_of(self, digest: str) -> int | None:
        if not digest:
            return None
        future = self._numbers.get(digest)
        if future is None or not future.done() or future.exception() is not None:
            raise AdapterNotLoaded(f"the adapter {digest} is not loaded")
        return future.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, digest: str) -> None:
        future = self._numbers.pop(digest, None)
        if future is None or not future.done() or future.exception() is not None:
            return
        for layer in self._layers:
            layer.unload(future.result())

    def _load_into(self, number: int, adapter: Adapter, future: Future[int]) -> None:
        """Load one that an ingress has found on its own host, unless its place has another one
        since."""
        if self._numbers.get(adapter.digest) is not future:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._load(number, adapter)
            _check_digest(adapter)  # somebody may have written the files meanwhile
        except Exception as error:
            for layer in self._layers:
                layer.unload(number)
            future.set_exception(error)
        else:
            future.set_result(number)

    @torch.inference_mode()
    def _load(self, number: int, adapter: Adapter) -> int:
        """Put it into the layers; returns its bytes."""
        for layer in self._layers:
            layer.unload(number)
        files = read_adapter(adapter.name, adapter.folder, self._config.max_rank)
        _check_modules(files, self._modules)
        nbytes = 0
        try:
            # Not mapped: a file that is cut while it is mapped ends the process that reads it.
            tensors = parse_tensors(files.weights.read_bytes())
            for layer in self._layers:
                found = [self._read(tensors, files, part) for part in layer.parts]
                nbytes += layer.load(number, found)
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(
                f"adapter {shown(files.name)}: {files.weights} cannot be read ({error}); copy it "
                "there again"
            ) from None
        return nbytes

    def _read(
        self, tensors: dict[str, torch.Tensor], files: AdapterFiles, part: LoraPart
    ) -> LoraMatrices | None:
        module = files.modules.get(part.module)
        if module is None:
            return None
        _check_shapes(files, part, module)
        key = f"base_model.model.{part.module}"
        a, b = (tensors[f"{key}.lora_{matrix}.weight"].float() for matrix in "AB")
        found = LoraMatrices(a.to(self._dtype), (b * module.scale).to(self._dtype))
        for matrix in found:
            if not bool(torch.isfinite(matrix).all()):
                raise ValueError(
                    f"adapter {shown(files.name)}: the matrices of {part.module!r} hold NaN or "
                    f"infinity as {self._dtype}; train the adapter again, or remove it"
                )
        return LoraMatrices(*(matrix.to(self._device) for matrix in found))

    def _largest_bytes(self) -> int:
        """Of an adapter of all modules, of the largest rank."""
        numbers = 0
        for layer in self._layers:
            ranks = self._config.max_rank * len(layer.parts)
            numbers += ranks * layer.ins + self._config.max_rank * sum(layer.outs)
        return numbers * self._dtype.itemsize


def _failure(done: Future[int]) -> str:
    error = done.exception()
    return "" if error is None else first_line(error)


def make_adapters(config: LoraConfig, model: Any, dtype: torch.dtype) -> NoAdapters:
    """Those of a worker with a filled model. Raises as `Adapters` does."""
    return Adapters(config, model, dtype) if config.is_on else NO_ADAPTERS


def _check_digest(adapter: Adapter) -> None:
    """Raises ValueError."""
    if adapter_digest(adapter.name, adapter.folder) != adapter.digest:
        raise ValueError(
            f"adapter {shown(adapter.name)}: {adapter.folder} has other files here than when it "
            "was loaded; load it again, and give all hosts the same files"
        )


def _check_modules(files: AdapterFiles, modules: Sequence[str]) -> None:
    """The modules of all stages that the adapter names, and no others, must be in its file."""
    where, known = f"adapter {shown(files.name)}", set(modules)
    for module in files.modules:
        if module not in known:
            raise ValueError(
                f"{where}: it adapts {shown(module)}; this model has adapters of its linear modules"
                f" alone, {modules[0]!r} .. {modules[-1]!r}: the adapter belongs to another model, "
                f"or {MERGE}"
            )
    for module in modules:
        if files.adapts(module) and module not in files.modules:
            raise ValueError(
                f"{where}: the weights lack {module!r}, which target_modules names: the adapter "
                "belongs to another model, or the file is cut off"
            )


def _check_shapes(files: AdapterFiles, part: LoraPart, module: AdapterModule) -> None:
    outs, size = part.shape
    if (module.b.shape[0], module.a.shape[1]) != (outs, size):
        raise ValueError(
            f"adapter {shown(files.name)}: {part.module!r} is adapted from "
            f"{module.a.shape[1]} to {module.b.shape[0]} numbers, but the model's has {size} to "
            f"{outs}: the adapter belongs to another model"
        )


class AdapterSlots:
    """The adapter of each slot of a runner."""

    def __init__(self, adapters: NoAdapters, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: of one step."""
        self._adapters = adapters
        self._of_slot: dict[int, int] = {}
        count = adapters.count
        sizes = (max_tokens if count else 0, count, device)
        self._among_all, self._among_sampled = LoraTokens(*sizes), LoraTokens(*sizes)

    def add_request(self, row: NewRow) -> None:
        """A request takes a slot. Raises AdapterNotLoaded."""
        self._of_slot.pop(row.slot, None)
        number = self._adapters.number_of(row.adapter)
        if number is not None:
            self._of_slot[row.slot] = number

    def tokens(self, plan: SchedulerOutput) -> AdaptedTokens | None:
        """The tokens of a step that have adapters, valid until the next step; None: none has."""
        rows = [self._of_slot.get(slot) for slot in plan.slots] if self._of_slot else []
        if all(number is None for number in rows):
            return None
        self._among_all.set(_tokens_of(rows, plan.num_tokens))
        self._among_sampled.set(_tokens_of(rows, [int(samples) for samples in plan.samples]))
        return AdaptedTokens(sum(plan.num_tokens), self._among_all, self._among_sampled)


def _tokens_of(rows: Sequence[int | None], counts: Sequence[int]) -> dict[int, list[int]]:
    """Adapter -> its tokens. `rows`: the adapter of each row of a step; `counts`: how many tokens
    of it count."""
    own: dict[int, list[int]] = {}
    first = 0
    for number, count in zip(rows, counts, strict=True):
        if number is not None and count:
            own.setdefault(number, []).extend(range(first, first + count))
        first += count
    return own
