"""Splits a transformers model by its own tensor plan and its own pipeline plan.

The tensor plan maps module names, with `*` for numbers, to a style; planned `nn.Linear` modules are
replaced by our parallel layers under the same name. The pipeline plan lists the modules of the base
model in order, with a single list of layers among them; modules of other stages are replaced by
`PPMissingLayer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swell.worker.comm.mesh import Group, Mesh
from swell.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from swell.worker.layers.weight_shard import divide
from swell.worker.step.intermediate import stage_layers


def _columns(linear: nn.Linear, group: Group, name: str) -> nn.Module:
    bias = linear.bias is not None
    return ColumnParallelLinear(linear.in_features, linear.out_features, group, bias, what=name)


def _gathered_columns(linear: nn.Linear, group: Group, name: str) -> nn.Module:
    """Makes a column-parallel layer whose whole output is on every rank; so a layer whose outputs
    the ranks do not divide can be replicated."""
    if linear.out_features % group.size:
        return linear
    bias = linear.bias is not None
    return ColumnParallelLinear(linear.in_features, linear.out_features, group, bias, gather=True)


def _rows(linear: nn.Linear, group: Group, name: str) -> nn.Module:
    bias = linear.bias is not None
    return RowParallelLinear(linear.in_features, linear.out_features, group, bias, what=name)


def _split_rows(linear: nn.Linear, group: Group, name: str) -> nn.Module:
    """Makes a row-parallel layer whose whole input is on every rank; so a layer whose inputs the
    ranks do not divide can be replicated."""
    if linear.in_features % group.size:
        return linear
    bias = linear.bias is not None
    return RowParallelLinear(linear.in_features, linear.out_features, group, bias, split_input=True)


def _replicated(module: nn.Module, group: Group, name: str) -> nn.Module:
    return module


STYLES: dict[str, Callable[..., nn.Module]] = {
    "colwise": _columns,
    "colwise_rep": _gathered_columns,
    "colwise_gather_output": _gathered_columns,
    "rowwise": _rows,
    "rowwise_rep": _split_rows,
    "rowwise_split_input": _split_rows,
    "embedding_rowwise": _replicated,
    "embedding_colwise": _replicated,
    "replicate": _replicated,
    "replicated_with_grad_allreduce": _replicated,
}
"""Style of a tensor plan -> the function that makes the replacement of a module."""

HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


def split_tensors(model: nn.Module, config: Any, group: Group) -> None:
    """Replaces the planned modules of `model` (on the meta device) by this rank's part of them.

    Raises `ValueError` if the model lacks a plan, or has one that cannot be applied.
    """
    if group.size == 1:
        return
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    name = type(model).__name__
    way_out = "set parallel.tensor=1 (parallel.pipeline may split it)"
    if all(STYLES.get(style) in (_gathered_columns, _replicated) for style in plan.values()):
        raise ValueError(f"architecture {name!r} has no tensor-parallel plan; {way_out}")
    _check_heads(plan, config, group)
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):
        raise ValueError(
            f"architecture {name!r}: activation_sparsity_pattern compares all intermediate values "
            f"of a layer, but each rank has only a part of them; {way_out}"
        )
    modules = {path: _pattern(path) for path, _ in model.named_modules()}
    bare = {_pattern(path) for path, _ in model.named_parameters()} & plan.keys()
    for path, pattern in modules.items():
        style = plan.get(pattern)
        if style is None:
            continue
        module, take = model.get_submodule(path), STYLES.get(style)
        if take is None or not (take is _replicated or isinstance(module, nn.Linear)):
            bare.add(pattern)
            continue
        _replace(model, path, take(module, group, path.rpartition(".")[2]))
    if bare:
        pattern = min(bare)
        raise ValueError(
            f"architecture {name!r}: its tensor-parallel plan requires {plan[pattern]!r} for "
            f"{pattern!r}, which is not supported; {way_out}"
        )


def _pattern(path: str) -> str:
    """Returns the path as plans write it: numbers of layers and experts are `*`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _check_heads(plan: dict[str, str], config: Any, group: Group) -> None:
    """Raises `ValueError` if the plan splits heads and the ranks do not divide them: models reshape
    by whole heads."""
    split = [k for k, v in plan.items() if v == "colwise" and k.endswith(HEAD_PROJECTIONS)]
    if not split:
        return
    for key in ("num_attention_heads", "num_key_value_heads"):
        divide(key, getattr(config, key, None) or 0, group)


@dataclass
class StageBoundary:
    """The hidden states that enter and leave this stage in one forward pass."""

    incoming: torch.Tensor | None = None
    """[1, T, hidden], the output of the layer before this stage's first."""
    outgoing: torch.Tensor | None = None
    """[1, T, hidden], the input of the layer after this stage's last."""


class PPMissingLayer(nn.Module):
    """Replaces a module of another stage: returns its input, or `StageBoundary.incoming`."""

    def __init__(
        self, stage_boundary: StageBoundary, enters: bool = False, leaves: bool = False
    ) -> None:
        super().__init__()
        self.stage_boundary, self.enters, self.leaves = stage_boundary, enters, leaves

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.enters:
            assert self.stage_boundary.incoming is not None
            return self.stage_boundary.incoming
        if self.leaves:
            self.stage_boundary.outgoing = x
        return x


def decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """Returns the list of a model's `count` layers. Raises `ValueError` if it has none, or several
    that may be it."""
    lists = [
        module
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "*" not in _pattern(path)
    ]
    if len(lists) != 1:
        raise ValueError(
            f"the model {type(base).__name__!r} has {len(lists)} lists of {count} layers, and the "
            "inputs of its layers cannot be captured; take a head for drafts.method=eagle, or "
            "drafts.method=model"
        )
    return lists[0]


def split_stages(model: nn.Module, base: Any, mesh: Mesh, stage_boundary: StageBoundary) -> range:
    """Keeps only this stage's part of `base`; returns its layers.

    Raises `ValueError` if there are several stages and the model lacks a plan.
    """
    name, config = type(model).__name__, base.config
    total = int(config.num_hidden_layers)
    mine = stage_layers(total, mesh.pipeline.size, mesh.stage)
    if mesh.pipeline.size == 1:
        return mine
    plan = list(getattr(config, "base_model_pp_plan", None) or {})
    lists = [key for key in plan if isinstance(base.get_submodule(key), nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"architecture {name!r} has no pipeline plan with one list of layers; set "
            "parallel.pipeline=1 (parallel.tensor may split it)"
        )
    layers = base.get_submodule(lists[0])
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        if i not in mine:
            missing = PPMissingLayer(
                stage_boundary, enters=i == mine.start - 1, leaves=i == mine.stop
            )
            for key in ("attention_type", "layer_type"):  # some models read it from the layer
                if hasattr(layer, key):
                    setattr(missing, key, getattr(layer, key))
            layers[i] = missing
    index = plan.index(lists[0])
    others = [] if mesh.is_first_stage else plan[:index]
    others += [] if mesh.is_last_stage else plan[index + 1 :]
    for key in others:
        _replace(base, key, PPMissingLayer(stage_boundary))
    return mine


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
