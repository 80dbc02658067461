"""Replaces the weights of running workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from swell.configs.pooling import PoolingSpec
from swell.configs.schema import Config, ModelConfig
from swell.worker.hf_config import load_config

_MAY_DIFFER = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",  # trainers that checkpoint activations write false
}
"""Keys of config.json that do not affect the memory and the tables of a worker."""
_OF_TEXTS: dict[str, Any] = {
    "max_tokens": None,
    "lower_case": False,
    "prompts": {},
    "default_prompt": None,
    "pair_template": None,
}
"""Fields of a `PoolingSpec` that concern only texts: their files stay in the tokenizer's folder."""


def with_weights_of(config: Config, path: str) -> Config:
    """Returns the configuration for the weights of another folder, which may be sharded or not."""
    return replace(config, model=replace(config.model, path=path, load_format="auto"))


class ModelShape:
    """The properties of a model that new weights must not change: KV cache, steps and limits are
    made for them."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, pooling: PoolingSpec | None) -> None:
        values = hf_config.get_text_config().to_dict()  # towers are not served
        self._values = {key: value for key, value in values.items() if key not in _MAY_DIFFER}
        self._values["dtype"] = str(dtype)
        self._pooling = pooling and replace(pooling, **_OF_TEXTS)
        self.hf_config, self.pooling = hf_config, pooling

    def refuse_other(self, new: ModelShape, path: str) -> None:
        """Raises `ValueError`, with the first key that differs."""
        for key in sorted({*self._values, *new._values}):
            before, after = self._values.get(key), new._values.get(key)
            if before != after:
                raise ValueError(
                    f"config.json of {path} has {key}={after!r}, but the served model has "
                    f"{before!r}: new weights must belong to the same model; for another model "
                    "upgrade (swell upgrade), or start again"
                )
        if self._pooling != new._pooling:
            raise ValueError(
                f"{path} returns {_use_of(new._pooling)}, but the served model returns "
                f"{_use_of(self._pooling)}: new weights must belong to the same model; copy its "
                "modules.json there, and the folders that it lists"
            )


def _use_of(pooling: PoolingSpec | None) -> str:
    if pooling is None:
        return "text"
    values = f"{pooling.size} values" + ", normalized" * pooling.normalize
    return f"vectors of {values} ({pooling.task}, pooling {pooling.method})"


def save_weights(tensors: Mapping[str, torch.Tensor], model: ModelConfig, folder: Path) -> None:
    """Writes a model folder with these tensors of a checkpoint and the config.json of `model`.
    Raises `ValueError` for anything but the tensors of a checkpoint."""
    load_config(model, pools=True).save_pretrained(folder)  # the served one: it was checked
    stored: dict[str, torch.Tensor] = {}
    places: defaultdict[int, list[range]] = defaultdict(list)
    """Storage -> address ranges of its tensors so far."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{name!r} has the type {type(name).__name__}; the name of a tensor must be a str"
            )
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name!r} has the type {type(tensor).__name__}, which is not a tensor"
            )
        if tensor.is_meta or tensor.layout is not torch.strided:
            why = "has no values" if tensor.is_meta else f"has the layout {tensor.layout}"
            raise ValueError(f"{name!r} {why}; pass dense tensors")
        copy = tensor.detach().to("cpu").contiguous()
        place = range(copy.data_ptr(), copy.data_ptr() + copy.nbytes)
        others = places[copy.untyped_storage().data_ptr()]
        is_shared = any(one.start < place.stop and place.start < one.stop for one in others)
        stored[name] = copy.clone() if is_shared else copy  # tied: stored twice
        others.append(place)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
