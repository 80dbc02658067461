"""Log probabilities compiled from `logprobs.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, UnrecordedFunction
from swell.kernels.logprobs import LogprobsTensors

_call = UnrecordedFunction("swell_rank", *[POINTER] * 2, *[INT] * 4, *[POINTER] * 3)


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> LogprobsTensors:
    """See `swell.kernels.logprobs.rank_tokens`; of equally likely tokens, the one with the lower id
    comes first."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert token_ids.dtype == torch.int64 and token_ids.is_contiguous()
    rows, vocab = logits.shape
    top = min(top, vocab)
    ranked = LogprobsTensors.empty_cpu(rows, 1 + top)
    _call(
        logits.data_ptr(), token_ids.data_ptr(), rows, vocab, logits.stride(0), top,
        *[tensor.data_ptr() for tensor in ranked[:3]],
    )  # fmt: skip
    return ranked
