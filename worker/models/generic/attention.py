"""The attention function through which transformers models call our paged attention.

transformers looks up attention by name in one table and calls

    f(module, q [1, H, T, D], k [1, KVH, T, D], v [1, KVH, T, Dv], mask, scaling=..., **kwargs)
        -> out [1, T, H, Dv], weights

Our function is registered there as `swell`. Every module of a model that we build has an attribute
with its model's `PagedAttentionHook`, so the function itself is stateless and several threads can
run models. The number of heads and the window of a layer are not read from its config, where names
vary, but found by running a few tokens (`Mode.TRACE`): the window from the mask that transformers
makes for the layer, and the rest from a comparison with the attention of transformers.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from swell.worker.layers.attention import Attention
from swell.worker.models.generic import masks
from swell.worker.models.generic.masks import (
    MaskFunction,
    UnsupportedMaskError,
    difference_from_eager,
    mask_function_of,
    sliding_window_of,
)

NAME = "swell"

HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}
"""Keywords that we apply, or that do not matter in eager attention. A model that passes any other
keyword is refused."""


class UnsupportedModelError(ValueError):
    """Raised when an architecture is not supported; the message names it and the reason."""


class Mode(Enum):
    """The action of attention calls."""

    TRACE = auto()
    """Records the shape and the mask of the layer; returns zeros."""
    DRY_RUN = auto()
    """Returns zeros."""
    COMPUTE = auto()


class PagedAttentionHook:
    """The attention layers of one model, and the metadata of the current step."""

    def __init__(self, architecture: str, positions: int) -> None:
        """`positions`: tokens of the longest sequence that is served."""
        self.architecture, self.positions = architecture, positions
        self.layers: dict[int, Attention] = {}
        """Layer index -> its attention."""
        self._windows: dict[MaskFunction, int] = {}
        self.mode = Mode.COMPUTE
        self.metadata: Any = None
        """The `AttentionMetadata` of the current forward pass."""

    def attach(self, model: nn.Module) -> None:
        """Sets this object as an attribute of every module of `model`."""
        for module in model.modules():
            object.__setattr__(module, "swell_calls", self)

    def __call__(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        index: int | None = getattr(module, "layer_idx", None)
        if self.mode is not Mode.COMPUTE:
            if self.mode is Mode.TRACE:
                self._trace(module, index, q, k, v, mask, scaling, kwargs)
            return v.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        assert index is not None, "layers without an index were refused"
        layer = self.layers[index]
        tokens, width = q.shape[2], v.shape[3]
        if width < layer.head_dim:  # values narrower than keys are padded in the cache
            v = F.pad(v, (0, layer.head_dim - width))
        q, k, v = (t[0].transpose(0, 1).reshape(tokens, -1) for t in (q, k, v))
        out = layer.write_and_attend(q, k, v, self.metadata).view(1, tokens, -1, layer.head_dim)
        return out[..., :width]

    def _trace(
        self,
        module: Any,
        index: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> None:
        extra = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS)
        if index is None:
            self.refuse(f"its {type(module).__name__} does not have the index of its layer")
        elif index in self.layers:
            self.refuse(f"its layer {index} calls attention twice")
        elif extra:
            self.refuse(f"its attention has the arguments {', '.join(extra)}")
        elif k.shape[2] != q.shape[2]:
            self.refuse(f"its layer {index} has {k.shape[2]} keys for {q.shape[2]} tokens")
        elif v.shape[3] > q.shape[3]:
            self.refuse(f"its values ({v.shape[3]}) are wider than its keys ({q.shape[3]})")
        try:
            window = self._window(mask_function_of(mask), q.device)
        except UnsupportedMaskError as unfit:
            self.refuse(f"in its layer {index}, {unfit}")
        layer = Attention(
            q.shape[1],
            k.shape[1],
            q.shape[3],
            q.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=window,
            softcap=float(kwargs.get("softcap") or 0.0),
        )
        difference = difference_from_eager(module, layer, v.shape[3], q.device, scaling, kwargs)
        if difference:
            self.refuse(f"its layer {index} computes a different attention: {difference}")
        self.layers[index] = layer

    def _window(self, function: MaskFunction, device: torch.device) -> int:
        """Returns the window of a mask function, computed once: many layers share a few
        functions."""
        if function not in self._windows:
            self._windows[function] = sliding_window_of(function, self.positions, device)
        return self._windows[function]

    def refuse(self, why: str) -> NoReturn:
        """Raises `UnsupportedModelError` for the architecture."""
        raise UnsupportedModelError(
            f"architecture {self.architecture!r} cannot be served: {why}, which the paged KV "
            "cache does not support; choose a decoder with ordinary causal attention"
        )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    calls: PagedAttentionHook = module.swell_calls
    return calls(module, query, key, value, attention_mask, scaling, kwargs), None


def register() -> None:
    """Registers our function in transformers: as `NAME` without a mask function, so that steps do
    not make masks, and with a function that records masks, for tracing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    masks.register(_attention)
