"""Log probabilities of tokens, and the most likely tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels import backends


class LogprobsLists(NamedTuple):
    """`LogprobsTensors` as lists, one element for each of the N positions."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    selected_token_ranks: list[int]
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, index: int) -> LogprobsLists:
        """Returns the positions of one request."""
        ends = self.cu_num_generated_tokens
        here = slice(index, index + 1) if ends is None else slice(*ends[index : index + 2])
        return LogprobsLists(
            self.logprob_token_ids[here], self.logprobs[here], self.selected_token_ranks[here]
        )


class LogprobsTensors(NamedTuple):
    """The token that was selected at each of N positions, sampled or given by a prompt, and the
    `top` most likely ones, best first. All three tensors are on one device. The positions of a
    request are adjacent: with drafts, or in a prompt, it has several."""

    # [N, 1 + top] int64
    logprob_token_ids: Tensor
    # [N, 1 + top] float32, natural logarithms
    logprobs: Tensor
    # [N] int64; 1 is the most likely
    selected_token_ranks: Tensor
    # [R + 1] cu[i] .. cu[i + 1] - 1 are the positions of request i; None: each has one
    cu_num_generated_tokens: list[int] | None = None

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
        token_ids, logprobs, ranks = (tensor.to("cpu", non_blocking=True) for tensor in self[:3])
        return LogprobsTensors(token_ids, logprobs, ranks, self.cu_num_generated_tokens)

    def filter(self, mask: list[bool]) -> LogprobsTensors:
        """Returns the positions where mask [N] is True. Requests may be left without positions."""
        ends, kept = self.cu_num_generated_tokens, torch.tensor(mask, dtype=torch.bool)
        if ends is not None:
            counts = [0, *accumulate(mask)]
            ends = [counts[end] for end in ends]
        token_ids, logprobs, ranks = (tensor[kept] for tensor in self[:3])
        return LogprobsTensors(token_ids, logprobs, ranks, ends)

    def tolists(self) -> LogprobsLists:
        """Returns the tensors as lists. Waits for the device, unless the tensors are on the
        host."""
        token_ids, logprobs, ranks = (tensor.tolist() for tensor in self[:3])
        return LogprobsLists(token_ids, logprobs, ranks, self.cu_num_generated_tokens)


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
