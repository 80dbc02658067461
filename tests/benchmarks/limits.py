"""The speed limit of a batch: its matrix products only, and its bytes at the memory bandwidth.

    time of a step = products of its tokens and of its sampled rows, each as one `F.linear`
                   + bytes of KV that its rows read and write, at the measured memory bandwidth

A step of a single token is not limited by arithmetic: for it, the bytes of the weights at that
bandwidth replace the products. The scheduler decides the steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.benchmarks.models import FLOAT_BYTES, Shape
from tests.benchmarks.steps import Step

_PROBE_BYTES = 512 * 2**20
"""Much more than any cache holds."""
_PROBES, _PASSES = 4, 8
_LEAST_S = 0.3
"""The minimum time for which a product is repeated, at least twice."""


def memory_rate() -> float:
    """Returns the bytes a second that all cores together read: the best of several passes over
    several buffers.

    Buffers differ: the location of a virtual machine's memory changes the result by up to a factor
    of two.
    """
    best = float("inf")
    for _ in range(_PROBES):
        buffer = torch.ones(_PROBE_BYTES // FLOAT_BYTES)
        best = min(best, *(_timed(buffer.sum) for _ in range(_PASSES)))
    return _PROBE_BYTES / best


class Products:
    """The matrix products of a model, with separate weights for each layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
        sizes = (
            (hidden + 2 * kv, hidden),
            (hidden, hidden),
            (2 * shape.intermediate, hidden),
            (hidden, shape.intermediate),
        )
        self._layers = [[torch.randn(size) for size in sizes] for _ in range(shape.layers)]
        self._head = torch.randn(shape.vocab_size, hidden)

    @torch.inference_mode()
    def seconds(self, tokens: int, sampled: int) -> float:
        """Returns the duration of one step, the median of several."""
        widths = (self.shape.hidden, self.shape.intermediate)
        inputs = {width: torch.randn(tokens, width) for width in widths}
        last = torch.randn(sampled, self.shape.hidden)

        def run() -> None:
            for layer in self._layers:
                for weight in layer:
                    F.linear(inputs[weight.shape[1]], weight)
            if sampled:
                F.linear(last, self._head)

        return _median(run)


def batch_seconds(shape: Shape, products: Products, made: list[Step], rate: float) -> float:
    """Returns the minimum time of all these steps."""
    seconds = sum(step.positions for step in made) * shape.kv_bytes / rate
    kinds = Counter((step.tokens, step.sampled) for step in made)
    for (tokens, sampled), count in kinds.items():
        alone = tokens == 1
        one = shape.weight_bytes / rate if alone else products.seconds(tokens, sampled)
        seconds += count * one
    return seconds


def _median(run: Callable[[], object]) -> float:
    spent = [_timed(run)]
    started = time.perf_counter()
    spent = [_timed(run) for _ in range(2)] if spent[0] > _LEAST_S else []
    while time.perf_counter() - started < _LEAST_S:
        spent.append(_timed(run))
    return statistics.median(spent)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
