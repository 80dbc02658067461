"""Finds out with hooks how a transformers model uses its tokens and positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

Seen = dict[tuple[str, int, str], Any]
"""(module, number of the call, argument or output) -> its values."""

WEIGHT = 0.01
"""The value of every parameter while a model is traced."""


def trace_integers(base: nn.Module, run: Callable[..., Any], *arguments: Any) -> Seen:
    """Returns the integer arguments of all modules of `base` in `run(*arguments)`, which include
    tokens and positions, and the rows that its embeddings look up."""
    seen: Seen = {}
    calls: dict[str, int] = {}

    def watch(path: str, module: nn.Module) -> Any:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls[path] = calls.get(path, 0) + 1
            for where, leaf in tree_flatten_with_path((args, kwargs))[0]:
                if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int32, torch.int64):
                    seen[path, calls[path], keystr(where)] = leaf.tolist()

        return module.register_forward_pre_hook(before, with_kwargs=True)

    def watch_rows(path: str, module: nn.Module) -> Any:
        def after(_: nn.Module, args: Any, answer: torch.Tensor) -> None:
            seen[path, calls[path], "rows"] = answer.flatten().tolist()

        return module.register_forward_hook(after)

    parts = [(path, module) for path, module in base.named_modules() if path]
    tables = [(path, module) for path, module in parts if isinstance(module, nn.Embedding)]
    hooks = [watch(path, module) for path, module in parts]
    hooks += [watch_rows(path, module) for path, module in tables]
    try:
        with _numbered([module for _, module in tables]):
            run(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def first_difference(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> str | None:
    """Returns the first module that has different values in the two runs."""
    for key, value in one.items():
        if key in other and other[key] != value:
            return str(key[0])
    return None


@contextmanager
def _numbered(tables: list[nn.Embedding]) -> Iterator[None]:
    """In this context, row i of each embedding has the value i in every column, without using
    memory."""
    own: list[Any] = [table._parameters["weight"] for table in tables]
    for table, weight in zip(tables, own, strict=True):
        rows = torch.arange(len(weight), device=weight.device).to(weight.dtype)
        table.weight = nn.Parameter(rows[:, None].expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for table, weight in zip(tables, own, strict=True):
            table.weight = weight


def mixes_tokens(
    base: Any,
    run: Callable[..., torch.Tensor],
    ids: torch.Tensor,
    positions: torch.Tensor,
    incoming: torch.Tensor | None,
) -> bool:
    """Whether the second of two tokens depends on the first, although attention returns zeros.

    Call it under `constant_weights`. The embedding of the first token is set to NaN: then the
    output of the second must stay finite. Returns False if the output is not finite even without
    that.
    """
    if not run(ids, positions, incoming)[1].isfinite().all():
        return False
    if incoming is not None:
        incoming = incoming.clone()
        incoming[0] = torch.nan
        return not bool(run(ids, positions, incoming)[1].isfinite().all())
    table = base.get_input_embeddings()

    def poison(_: nn.Module, args: Any, answer: torch.Tensor) -> torch.Tensor:
        answer = answer.clone()
        answer[:, 0] = torch.nan
        return answer

    hook = table.register_forward_hook(poison)
    try:
        return not bool(run(ids, positions, None)[1].isfinite().all())
    finally:
        hook.remove()


@contextmanager
def constant_weights(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """In this context, all values of every parameter are `WEIGHT`, on `device`. They share the same
    memory, which is enough for the largest matrix: the rows of an embedding are one row, and
    stacked matrices (experts) are one matrix. So a model without weights can be run with little
    memory."""
    own = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    ]
    made: dict[torch.dtype, torch.Tensor] = {}
    for module, _, parameter in own:
        dtype, numbers = parameter.dtype, math.prod(_stored(module, parameter))
        if dtype not in made or made[dtype].numel() < numbers:
            made[dtype] = torch.empty(numbers, dtype=dtype, device=device)
    for buffer in made.values():
        buffer.fill_(WEIGHT)
    for module, name, parameter in own:
        shape = _stored(module, parameter)
        part = made[parameter.dtype][: math.prod(shape)].view(shape)
        data = part.expand(parameter.shape)
        module._parameters[name] = nn.Parameter(data, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter


def _stored(module: nn.Module, parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the part of the shape that needs memory: one row of an embedding, otherwise one
    matrix."""
    return tuple(parameter.shape[1 if isinstance(module, nn.Embedding) else -2 :])
