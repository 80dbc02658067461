"""The limits of the card: the rate of its memory, and of a product in bfloat16."""

from __future__ import annotations

import torch

from tests.gpu_report.scale import Figures, Scale


def run(scale: Scale) -> Figures:
    """A copy reads and writes, a sum only reads."""
    size = scale.pick(1 << 31, 1 << 20)
    x = torch.ones(size // 4, device=scale.device)
    y = torch.empty_like(x)
    copy_s = scale.queued_seconds(lambda: y.copy_(x), 10)
    read_s = scale.queued_seconds(lambda: x.sum(), 10)
    side = scale.pick(8192, 128)
    a, b = torch.ones(2, side, side, device=scale.device, dtype=torch.bfloat16)
    product_s = scale.queued_seconds(lambda: a @ b, 10)
    small = torch.ones(1, device=scale.device)
    return {
        "copy_gb_per_s": round(2 * size / copy_s / 1e9, 1),
        "read_gb_per_s": round(max(size / read_s, 2 * size / copy_s) / 1e9, 1),
        "bf16_tflop_per_s": round(2 * side**3 / product_s / 1e12, 2),
        "launch_us": round(scale.queued_seconds(lambda: small.add_(1), 1000) * 1e6, 2),
    }
