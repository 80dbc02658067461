"""Log probabilities in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.logprobs.rank_tokens`."""
    token_ids = token_ids[:, None]
    rank = 1 + (logits > logits.gather(1, token_ids)).sum(1, keepdim=True)
    best = logits.topk(min(top, logits.shape[1]), dim=1).indices
    reported = torch.cat([token_ids, best], 1)
    return torch.cat([rank, reported], 1), logits.log_softmax(1).gather(1, reported)
