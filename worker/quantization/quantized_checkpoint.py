"""A checkpoint whose quantized matrices are dequantized while they are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.checkpoint.safetensors_files import SafetensorsCheckpoint
from swell.worker.quantization.scheme import CACHE_SCALES, UNUSED, Scheme


class QuantizedCheckpoint:
    """The parameters of safetensors files in which some matrices are quantized."""

    def __init__(self, stored: SafetensorsCheckpoint, scheme: Scheme) -> None:
        self._stored, self._scheme = stored, scheme
        self._parts: dict[str, dict[str, str]] = {}
        """Parameter -> suffix -> name of the stored tensor."""
        scheme.declared.refuse_tensors(stored.names)
        for name in stored.names:
            if not name.endswith((*CACHE_SCALES, *UNUSED)):
                parameter, suffix = scheme.split(name)
                self._parts.setdefault(parameter, {})[suffix] = name

    @property
    def names(self) -> Collection[str]:
        return self._parts.keys()

    @property
    def notes(self) -> Sequence[str]:
        is_quantized = any(list(self._parts[name].values()) != [name] for name in self._parts)
        method = [f"the checkpoint is quantized ({self._scheme.method})"] if is_quantized else []
        return [*method, *self._stored.notes]

    def tensor(self, name: str) -> StoredTensor:
        parts = self._parts[name]
        if list(parts.values()) == [name]:
            return self._stored.tensor(name)
        tensors = {suffix: self._stored.tensor(stored) for suffix, stored in parts.items()}
        return self._scheme.matrix(name, tensors)

    def close(self) -> None:
        self._stored.close()
