"""Derives our attention's window from the masks of a transformers model, or refuses the masks.

The attention of transformers does not have windows: it adds a mask, and only the mask decides which
tokens a token attends to. Keywords and attributes of a layer repeat that, not always consistently.
So while a model is traced (`recording`), `_record` makes its masks and keeps the function of
positions from which each mask was made; `sliding_window_of` evaluates that function.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swell.worker.layers.attention import Attention

TRACE_IMPLEMENTATION = "swell-learning"
"""The attention implementation that records masks."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position), broadcast -> whether the query attends to the
key."""

SAMPLES = 24
"""The number of positions at which a mask is compared with our attention's, in addition to the
window's borders."""

TOKENS = 6
"""The number of tokens in the comparison with the attention of transformers."""


class UnsupportedMaskError(Exception):
    """Raised when our attention cannot apply a mask; the message says why."""


class _RecordedMasks(threading.local):
    """The masks of the current forward pass in this thread."""

    masks: list[tuple[torch.Tensor, MaskFunction]] | None = None


_made = _RecordedMasks()


def register(attention: Any) -> None:
    """Registers the tracing implementation in transformers; `attention` is its function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TRACE_IMPLEMENTATION, attention)
    AttentionMaskInterface.register(TRACE_IMPLEMENTATION, _record)


@contextmanager
def recording(model: Any) -> Iterator[None]:
    """In this context, `model` makes masks that `mask_function_of` knows, in this thread."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
    own = [(c, c._attn_implementation) for c in configs.values() if c is not None]
    for config, _ in own:
        config._attn_implementation = TRACE_IMPLEMENTATION
    _made.masks = []
    try:
        yield
    finally:
        _made.masks = None
        for config, name in own:
            config._attn_implementation = name


def _record(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None = None,
    device: Any = None,
    **_unused: Any,
) -> torch.Tensor:
    """Replaces the mask functions of transformers: returns bool [B, 1, Q, K], as for `sdpa`."""
    assert _made.masks is not None
    index = [torch.arange(n, device=device) for n in (q_length, kv_length)]
    zero = torch.zeros(1, dtype=torch.long, device=device)
    seen = mask_function(zero.view(1, 1, 1, 1), zero.view(1, 1, 1, 1), *_grid(*index))
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedMaskError("its mask depends on the tokens")
    mask = seen.expand(batch_size, 1, q_length, kv_length).clone()
    _made.masks.append((mask, mask_function))
    return mask


def _grid(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)


def mask_function_of(mask: torch.Tensor | None) -> MaskFunction:
    """Returns the function from which a layer's mask was made. Raises `UnsupportedMaskError` for a
    mask that was changed."""
    if mask is None:
        raise UnsupportedMaskError("it has no mask, so every token attends to every other")
    for made, function in _made.masks or ():
        if made is mask or (
            made.dtype == mask.dtype
            and made.shape == mask.shape
            and made.data_ptr() == mask.data_ptr()
        ):
            return function
    raise UnsupportedMaskError("it adds a bias of its own to the scores")


def sliding_window_of(
    function: MaskFunction, positions: int, device: torch.device | str = "cpu"
) -> int:
    """Returns how many tokens a token attends to, including itself, in sequences up to `positions`;
    0: all.

    Raises `UnsupportedMaskError` if other positions have a different rule from the last one.
    """
    last = _row(function, positions - 1, positions, device)
    width = int(last.sum())
    window = 0 if width == positions else width
    borders = {0, 1, 2, width - 1, width, width + 1, 2 * width - 1, 2 * width, positions // 2}
    step = max(1, positions // SAMPLES)
    for query in sorted(borders | {*range(0, positions, step), positions - 1}):
        if not 0 <= query < positions:
            continue
        keys = torch.arange(positions)
        want = keys <= query
        if window:
            want &= keys > query - window
        if not torch.equal(_row(function, query, positions, device), want):
            raise UnsupportedMaskError(
                f"the token at position {query} does not attend to "
                + (f"the last {window} tokens" if window else "all tokens up to itself")
                + f", but the token at {positions - 1} does"
            )
    return window


def _row(
    function: MaskFunction, query: int, positions: int, device: torch.device | str
) -> torch.Tensor:
    """Returns [positions] bool, on the host: the positions that the token at `query` attends to."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    keys = torch.arange(positions, device=device)
    try:
        seen = function(zero, zero, *_grid(torch.tensor([query], device=device), keys))
    except Exception as error:
        raise UnsupportedMaskError(
            f"its mask depends on more than the positions ({type(error).__name__})"
        ) from None
    return seen.expand(1, 1, 1, positions).reshape(positions).cpu()


@torch.no_grad()
def difference_from_eager(
    module: Any,
    layer: Attention,
    width: int,
    device: torch.device,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Compares the layer's attention in transformers with `layer` on the same random tokens, and
    describes the difference.

    Returns None if there is no difference, or if the function cannot be found. A model may change
    its scores or their sum (sinks, caps, factors of a layer) by attributes that are not passed as
    keywords.
    """
    forward = inspect.unwrap(type(module).forward)
    theirs = getattr(forward, "__globals__", {}).get("eager_attention_forward")
    if theirs is None:
        return None
    make = torch.Generator().manual_seed(0)
    shapes = ((layer.heads, layer.head_dim), (layer.kv_heads, layer.head_dim))
    q, k, v = (
        torch.randn(1, heads, TOKENS, dim, generator=make).to(device)
        for heads, dim in (*shapes, (layer.kv_heads, width))
    )
    q = q / (abs(layer.scale) * layer.head_dim**0.5 or 1.0)  # scores of about 1
    place = torch.arange(TOKENS, device=device)
    seen = place[None, :] <= place[:, None]
    if layer.window:
        seen &= place[None, :] > place[:, None] - layer.window
    mask = torch.zeros(TOKENS, TOKENS, device=device).masked_fill(~seen, torch.finfo(q.dtype).min)
    mask = mask[None, None]
    try:
        got = theirs(module, q, k, v, mask, scaling=scaling, **{**kwargs, "dropout": 0.0})[0]
    except Exception as error:
        return f"{type(error).__name__} when it is called by itself"
    group = layer.heads // layer.kv_heads
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    want = ((scores + mask).softmax(-1) @ v).transpose(1, 2)
    if got.shape != want.shape:
        return f"its output has the shape {list(got.shape)} instead of {list(want.shape)}"
    if not torch.allclose(got.float(), want, rtol=1e-3, atol=1e-3):
        return "its scores or its softmax depend on something that is not passed as a keyword"
    return None
