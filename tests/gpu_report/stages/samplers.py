"""The cost of samplers over greedy, with 64 rows of a vocabulary of 152 000 tokens."""

from __future__ import annotations

import torch

from swell.kernels.logprobs import rank_tokens
from swell.kernels.sample import greedy_sample, sample_tokens, uniform_noise
from tests.gpu_report.scale import Figures, Scale


def run(scale: Scale) -> Figures:
    rows, vocab = scale.pick((64, 151936), (3, 320))
    logits = 4 * torch.randn(rows, vocab, device=scale.device)
    ones, zeros = torch.ones(rows, device=scale.device), torch.zeros(rows, device=scale.device)
    whole = torch.arange(rows, device=scale.device)
    no_top_k = torch.zeros_like(whole)

    def sample(top_k: torch.Tensor, top_p: torch.Tensor, any_top: bool) -> object:
        u = uniform_noise(whole, whole)
        return sample_tokens(logits, ones, top_k, top_p, zeros, u, any_top_k_or_p=any_top)

    kinds = {
        "greedy": lambda: greedy_sample(logits),
        "plain": lambda: sample(no_top_k, ones, False),
        "top_p": lambda: sample(no_top_k, ones * 0.9, True),
        "top_k": lambda: sample(no_top_k + 40, ones, True),
        "logprobs": lambda: rank_tokens(logits, whole, 5),
    }
    calls = scale.pick(20, 2)
    return {
        f"{name}, ms": round(scale.queued_seconds(run, calls) * 1e3, 4)
        for name, run in kinds.items()
    }
