"""Log probabilities of tokens, and the most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels import backends


class LogprobsLists(NamedTuple):
    """`LogprobsTensors` as lists, one element for each of the N positions."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    selected_token_ranks: list[int]


class LogprobsTensors(NamedTuple):
    """The token that was selected at each of N positions, sampled or given by a prompt, and the
    `top` most likely ones, best first. All three tensors are on one device."""

    # [N, 1 + top] int64
    logprob_token_ids: Tensor
    # [N, 1 + top] float32, natural logarithms
    logprobs: Tensor
    # [N] int64; 1 is the most likely
    selected_token_ranks: Tensor

    @staticmethod
    def empty_cpu(num_positions: int, num_tokens_per_position: int) -> LogprobsTensors:
        """Allocates uninitialized tensors; `num_tokens_per_position` is 1 + top."""
        shape = num_positions, num_tokens_per_position
        return LogprobsTensors(
            torch.empty(shape, dtype=torch.int64),
            torch.empty(shape, dtype=torch.float32),
            torch.empty(num_positions, dtype=torch.int64),
        )

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        """Returns a copy on the host. From a CUDA device it is copied on the current stream: it may
        be read once the stream has done the copy, and `self` must exist until then."""
        return LogprobsTensors(*[tensor.to("cpu", non_blocking=True) for tensor in self])

    def filter(self, mask: Tensor) -> LogprobsTensors:
        """Returns the positions where mask [N] bool is True."""
        return LogprobsTensors(*[tensor[mask] for tensor in self])

    def tolists(self) -> LogprobsLists:
        """Returns the tensors as lists. Waits for the device, unless the tensors are on the
        host."""
        return LogprobsLists(*[tensor.tolist() for tensor in self])


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> LogprobsTensors:
    """logits [N, V] float32, token_ids [N] int64: the selected tokens -> their log probabilities
    and ranks, and the `top` most likely tokens; a `top` above V counts as V.

        logprob(t) = logit(t) - log(sum(exp(logits)))        rank(t) = 1 + number of larger logits

    The order of equal logits depends on the backend. If one of a row's logits is NaN or +inf, or
    all are -inf, all its log probabilities are NaN. Backends: reference, cpu,
    triton (up to 32 most likely tokens).
    """
    backend = backends.get("logprobs", logits.device.type)
    ranked: LogprobsTensors = backend.rank_tokens(logits, token_ids, top)
    return ranked
