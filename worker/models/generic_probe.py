"""What a model of transformers does with its tokens and positions, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

Seen = dict[tuple[str, int, str], Any]
"""(module, which of its calls, which of its arguments or its answer) -> the numbers there."""


def integers(base: nn.Module, run: Callable[..., Any], *arguments: Any) -> Seen:
    """The integers that reach the modules of `base` in `run(*arguments)`, and the rows that its
    embeddings look up.

    Tokens and positions are such. What is computed from weights is not: while a model is learned
    it has none yet.
    """
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


def differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> str | None:
    """The first module that both saw with different numbers."""
    for key, value in one.items():
        if key in other and other[key] != value:
            return str(key[0])
    return None


@contextmanager
def _numbered(tables: list[nn.Embedding]) -> Iterator[None]:
    """Row i of each embedding is i in every column, without memory for it."""
    own = [table.weight for table in tables]
    for table, weight in zip(tables, own, strict=True):
        rows = torch.arange(len(weight), device=weight.device).to(weight.dtype)
        table.weight = nn.Parameter(rows[:, None].expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for table, weight in zip(tables, own, strict=True):
            table.weight = weight
