"""Log probabilities in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.logprobs import LogprobsTensors


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> LogprobsTensors:
    """See `swell.kernels.logprobs.rank_tokens`."""
    token_ids = token_ids[:, None]
    ranks = 1 + (logits > logits.gather(1, token_ids)).sum(1)
    best = logits.topk(min(top, logits.shape[1]), dim=1).indices
    reported = torch.cat([token_ids, best], 1)
    return LogprobsTensors(reported, logits.log_softmax(1).gather(1, reported), ranks)
