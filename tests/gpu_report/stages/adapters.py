"""Decode steps in which each row uses one of eight LoRA adapters, compared with steps without
adapters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from swell.configs.files.adapter_files import adapters_of
from tests.gpu_report.engines import Swell, prompts_of, step_seconds, write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale, Shape

_ADAPTERS = 8
_RANK = 16


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("0.6B", "tiny")]
    rows, context, steps = scale.pick((64, 192, 32), (3, 8, 2))
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        folders = {str(i): _write(folder / f"adapter{i}", shape, i) for i in range(_ADAPTERS)}
        with Swell(
            folder,
            scale,
            model__load_format="dummy",
            model__max_model_len=context + steps + 8,
            scheduler__max_rows=rows,
            scheduler__max_tokens_per_step=min(rows * context, 8192),
            lora__adapters={name: str(path) for name, path in folders.items()},
        ) as engine:
            prompts = prompts_of(rows, context, shape.vocab)
            found = list(adapters_of(engine.config.lora).values())
            for label, used in (("no adapter", 0), ("one adapter", 1), ("8 adapters", _ADAPTERS)):
                engine.adapters = found[:used]
                seconds = step_seconds(scale, engine, prompts, steps)
                figures[f"{rows} x {context}, {label}, ms"] = round(seconds * 1e3, 3)
    return figures


def _write(folder: Path, shape: Shape, seed: int) -> Path:
    """Writes an adapter of all linear layers in PEFT's format."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    modules = {
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(shape.layers):
        for module, (outs, size) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, sizes in (("A", (_RANK, size)), ("B", (outs, _RANK))):
                noise = torch.randn(sizes, generator=generator) * 0.02
                tensors[f"{name}.lora_{part}.weight"] = noise.bfloat16()
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": [name.partition(".")[2] for name in modules],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
