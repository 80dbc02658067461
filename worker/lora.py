"""The adapters (LoRA) of a worker: loaded at startup or in the background of steps, and selected
for the rows of each step.

A step whose rows use no adapter is computed as if there were none, by a separate capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors

from swell.configs.error_text import shown
from swell.configs.files.adapter_files import (
    MAX_WEIGHTS_BYTES,
    MERGE,
    AdapterFiles,
    AdapterModule,
    adapter_digest,
    adapters_of,
    read_adapter,
)
from swell.configs.files.bounded_files import read_file
from swell.configs.lora import Adapter, LoraConfig
from swell.configs.runtime.hanging_calls import HangingCalls, TooManyCalls
from swell.configs.runtime.log import first_line
from swell.kernels.lora import LoraTokens
from swell.worker.layers.lora import AdaptedTokens, LayerLora, LoraMatrices, LoraPart
from swell.worker.model_interfaces import Model, SupportsLoRA
from swell.worker.wire import AdapterLoaded, LoadAdapter, NewRequest, SchedulerOutput

_MAX_READS = 16
"""Reads that may be pending in addition to one per place: reads of folders that hang, whose places
other adapters have taken since."""


class AdapterNotLoaded(RuntimeError):
    """Raised when a worker lacks an adapter. This is the worker's fault, not the request's: engines
    send requests only for adapters that all workers have."""


OnLoaded = Callable[[AdapterLoaded], None]


class NoAdapters:
    """The adapters of a worker that does not accept any."""

    count = 0
    """The number of adapters, which bounds their numbers."""
    nbytes = 0
    """Bytes of the adapters of the configuration, which stay loaded."""
    reserved_bytes = 0
    """The most bytes of adapters that are loaded and unloaded at runtime."""

    def load(self, command: LoadAdapter, rank: int, on_loaded: OnLoaded) -> None:
        name = shown(command.adapter.name)
        raise AdapterNotLoaded(f"adapter {name}: this worker does not support adapters")

    def number_of(self, digest: str) -> int | None:
        """Returns the number that layers know the adapter by; None: the base model without an
        adapter."""
        if digest:
            raise AdapterNotLoaded(f"the adapter {digest} is not loaded")
        return None

    def close(self) -> None:
        """Stops loading adapters."""


NO_ADAPTERS = NoAdapters()


class Adapters(NoAdapters):
    """The adapters of a worker. Those of the configuration stay loaded and have the numbers 0, 1,
    ..; those that are loaded at runtime have the following numbers, by their places.

    One thread loads adapters in the background of steps: reading and packing take as long as many
    steps. Before that, another thread reads the adapter's files, since their folder may hang.
    """

    def __init__(self, config: LoraConfig, model: Model, dtype: torch.dtype) -> None:
        """Loads all adapters of the configuration into the layers of a loaded model. Raises
        `ValueError` for an adapter that does not fit, and for a model that does not accept
        adapters."""
        if not isinstance(model, SupportsLoRA) or not model.takes_adapters:
            raise ValueError(
                f"{config.reason}: this model does not support adapters; only native dense models "
                f"that generate text do (llama, mistral, qwen2, qwen3, phi-3, gemma 2 and 3); "
                f"{MERGE}"
            )
        self._config, self._modules = config, model.linear_modules()
        self._dtype, self._device = dtype, model.device
        self.count = len(config.adapters) + (config.max_adapters if config.enabled else 0)
        self._layers: list[LayerLora] = [
            layer.accept_adapters(
                names, model.active_adapters, self.count, config.max_rank, dtype, self._device
            )
            for layer, names in model.linear_layers()
        ]
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
        """Loads an adapter (see `LoadAdapter`). `on_loaded` is called, on any thread, when the
        adapter is loaded or cannot be loaded."""
        place, adapter, load = command.place, command.adapter, command.number
        digest, future = adapter.digest, self._numbers.get(adapter.digest)
        stays = future is not None and digest not in self._at_place.values()
        if not stays and place >= self._config.max_adapters:
            why = "has other files than when this worker read it; restart the engines"
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
        """Starts to load an adapter. Forgets the adapter that has the place, and an earlier load of
        this adapter, which may complete late."""
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
        """Queues the load; called when the adapter's files have been read."""
        if error := read.exception():
            future.set_exception(error)
            return
        try:
            self._thread.submit(self._load_into, number, adapter, future)
        except RuntimeError as refused:  # shutdown, or the system has too many threads
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
        """Loads an adapter that an ingress has found on its own host, unless another one has taken
        its place since."""
        if self._numbers.get(adapter.digest) is not future:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._load(number, adapter)
            _check_digest(adapter)  # the files may have changed meanwhile
        except Exception as error:
            for layer in self._layers:
                layer.unload(number)
            future.set_exception(error)
        else:
            future.set_result(number)

    @torch.inference_mode()
    def _load(self, number: int, adapter: Adapter) -> int:
        """Loads an adapter into the layers; returns its bytes."""
        for layer in self._layers:
            layer.unload(number)
        files = read_adapter(adapter.name, adapter.folder, self._config.max_rank)
        _check_modules(files, self._modules)
        nbytes = 0
        try:
            # Not mapped: if a file is truncated while it is mapped, the process that reads it is
            # killed.
            tensors = parse_tensors(read_file(files.weights, MAX_WEIGHTS_BYTES))
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
                    f"adapter {shown(files.name)}: the matrices of {part.module!r} contain NaN or "
                    f"infinity in {self._dtype}; train the adapter again, or remove it"
                )
        return LoraMatrices(*(matrix.to(self._device) for matrix in found))

    def _largest_bytes(self) -> int:
        """Returns the bytes of an adapter of the largest rank that adapts all modules."""
        numbers = 0
        for layer in self._layers:
            ranks = self._config.max_rank * len(layer.parts)
            numbers += ranks * layer.ins + self._config.max_rank * sum(layer.outs)
        return numbers * self._dtype.itemsize


def _failure(done: Future[int]) -> str:
    error = done.exception()
    return "" if error is None else first_line(error)


def make_adapters(config: LoraConfig, model: Model, dtype: torch.dtype) -> NoAdapters:
    """Returns the adapters of a worker with a loaded model. Raises what `Adapters` raises."""
    return Adapters(config, model, dtype) if config.is_on else NO_ADAPTERS


def _check_digest(adapter: Adapter) -> None:
    """Raises `ValueError` if the files of the adapter have changed."""
    if adapter_digest(adapter.name, adapter.folder) != adapter.digest:
        raise ValueError(
            f"adapter {shown(adapter.name)}: {adapter.folder} has other files here than when it "
            "was loaded; load it again, with the same files on all hosts"
        )


def _check_modules(files: AdapterFiles, modules: Sequence[str]) -> None:
    """Checks that the model has all modules that the adapter names, and that the adapter's file has
    all modules of the model that its target_modules name, in all stages."""
    where, known = f"adapter {shown(files.name)}", set(modules)
    for module in files.modules:
        if module not in known:
            raise ValueError(
                f"{where}: it adapts {shown(module)}, but only the linear modules of this model "
                f"can be adapted ({modules[0]!r} .. {modules[-1]!r}): use an adapter of this "
                f"model, or {MERGE}"
            )
    for module in modules:
        if files.adapts(module) and module not in files.modules:
            raise ValueError(
                f"{where}: the weights have no {module!r}, which target_modules contains: the "
                "adapter belongs to another model, or the file is incomplete"
            )


def _check_shapes(files: AdapterFiles, part: LoraPart, module: AdapterModule) -> None:
    outs, size = part.shape
    if (module.b.shape[0], module.a.shape[1]) != (outs, size):
        raise ValueError(
            f"adapter {shown(files.name)}: {part.module!r} has {module.a.shape[1]} inputs and "
            f"{module.b.shape[0]} outputs, but in the model it has {size} and {outs}: the adapter "
            "belongs to another model"
        )


class AdapterSlots:
    """The adapter of each slot of a runner."""

    def __init__(self, adapters: NoAdapters, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: the most tokens of one step."""
        self._adapters = adapters
        self._of_slot: dict[int, int] = {}
        count = adapters.count
        sizes = (max_tokens if count else 0, count, device)
        self._among_all, self._among_sampled = LoraTokens(*sizes), LoraTokens(*sizes)

    @property
    def may_adapt(self) -> bool:
        """Whether steps may have tokens with adapters."""
        return self._adapters.count > 0

    def no_tokens(self) -> AdaptedTokens:
        """Returns the tokens of a step without tokens, valid until the next step."""
        for tokens in (self._among_all, self._among_sampled):
            tokens.set({})
        return AdaptedTokens(0, self._among_all, self._among_sampled)

    def add_request(self, row: NewRequest) -> None:
        """Adds the request that takes a slot. Raises `AdapterNotLoaded`."""
        self._of_slot.pop(row.slot, None)
        number = self._adapters.number_of(row.adapter)
        if number is not None:
            self._of_slot[row.slot] = number

    def tokens(self, plan: SchedulerOutput) -> AdaptedTokens | None:
        """Returns the tokens of a step that have adapters, valid until the next step; None: none
        has."""
        rows = [self._of_slot.get(slot) for slot in plan.slots] if self._of_slot else []
        if all(number is None for number in rows):
            return None
        self._among_all.set(_tokens_of(rows, plan.num_tokens))
        self._among_sampled.set(_tokens_of(rows, [int(samples) for samples in plan.samples]))
        return AdaptedTokens(sum(plan.num_tokens), self._among_all, self._among_sampled)


def _tokens_of(rows: Sequence[int | None], counts: Sequence[int]) -> dict[int, list[int]]:
    """Returns adapter -> its tokens. `rows`: the adapter of each row of a step; `counts`: the
    number of tokens of each row."""
    own: dict[int, list[int]] = {}
    first = 0
    for number, count in zip(rows, counts, strict=True):
        if number is not None and count:
            own.setdefault(number, []).extend(range(first, first + count))
        first += count
    return own
