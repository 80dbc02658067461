"""LoRA adapters in PEFT's format with random weights, and models into which they are merged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.configs.files import adapter_files, bounded_files

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def module_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Returns name -> (out, in) for each linear module of a transformers model, except the LM
    head."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def make_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] | str = "all-linear",
    rank_pattern: Mapping[str, int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Writes an adapter whose effect is about as large as the weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (outs, size) in shapes.items():
        leaf = module.rpartition(".")[2]
        if targets == "all-linear" or leaf in targets:
            own = (rank_pattern or {}).get(leaf, rank)
            for name, shape in (("A", (own, size)), ("B", (outs, own))):
                noise = torch.randn(*shape, generator=generator) * 0.15 / math.sqrt(own)
                tensors[f"{PREFIX}{module}.lora_{name}.weight"] = noise.to(dtype)
    write_adapter(
        folder,
        {
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "rank_pattern": dict(rank_pattern or {}),
            **settings,
        },
        tensors,
    )
    return folder


def write_adapter(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Writes an adapter, including keys that PEFT writes but that do not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "somewhere/model",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "rank_pattern": {},
        "revision": None,
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})


def merge(model: Any, adapter: Path) -> None:
    """Adds scale * B A to the weight W of each module of a transformers model, in place, as PEFT's
    `merge_and_unload` does."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        leaf = module.rpartition(".")[2]
        alpha = settings["alpha_pattern"].get(leaf, settings["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if settings["use_rslora"] else len(a))
        b = tensors[key.replace("lora_A", "lora_B")]
        with torch.no_grad():
            weights[f"{module}.weight"] += scale * (b.double() @ a.double()).float()


def hang(monkeypatch: pytest.MonkeyPatch, *files: Path) -> threading.Event:
    """Makes files hang in this process: opening one blocks until the event is set, then fails."""
    released, names = threading.Event(), {str(file) for file in files}
    open_regular = bounded_files.open_regular

    def opened(path: Path) -> int:
        if str(path) in names:
            released.wait(600)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_regular(path)

    for module in (adapter_files, bounded_files):
        monkeypatch.setattr(module, "open_regular", opened)
    return released


@contextlib.contextmanager
def leased(file: Path) -> Iterator[None]:
    """Makes a file hang in all processes: opening it blocks until the lease ends, but not longer
    than /proc/sys/fs/lease-break-time, which is 45 s by default."""
    handler = signal.signal(
        signal.SIGIO, signal.SIG_IGN
    )  # the system sends it to ask for the lease back
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, handler)
