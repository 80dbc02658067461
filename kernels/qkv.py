"""The step between the projection to queries, keys and values, and attention.

q, k, v = qkv                                      three parts, each by heads
q, k    = rms_norm(q), rms_norm(k)                 if there are norms (`kernels/norm.py`)
q, k    = apply_rope(q, k, cos, sin)               (`kernels/rope.py`)
write_kv(k, v, k_cache, v_cache, slot_mapping)     (`kernels/attention.py`)
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def prepare(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> Tensor:
    """Returns the queries, [T, heads, head_dim], and stores keys and values in the caches.

    qkv [T, (heads + 2 * kv_heads) * head_dim], undefined afterwards: the queries may be a part of
    it; norms: the weights for queries and keys, [head_dim] each, as for `rms_norm`; cos, sin
    [T, rotary_dim / 2]; caches: K and V, of qkv's type or quantized, as in `write_kv`; slot_mapping
    [T] int64, each -1 (not written) or distinct and inside the cache. Rounds to qkv's type after
    each of the operations above. Backends: reference (calls these operations, each in
    its fastest backend), triton.
    """
    return backends.get("qkv", qkv.device.type).prepare(
        qkv, norms, eps, cos, sin, caches, slot_mapping
    )
