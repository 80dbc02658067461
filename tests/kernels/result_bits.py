"""Digests of results of the CPU backend, whose bits should not depend on the kind of processor.

`python -m tests.kernels.result_bits` prints one line for each operation, with the digest of its
results. The inputs are fractions of integers, so that no random function of torch, which may itself
depend on the processor, changes them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from swell.kernels import activation, attention, logprobs, lora, moe, norm, rope, sample
from swell.kernels.cpu import linear
from swell.kernels.cpu.capture import choices, pointwise
from swell.kernels.host.cache_format import cache_width
from swell.kernels.weights.quantized import QuantizedTensor

TYPES = (torch.float32, torch.bfloat16)
PRODUCTS = ((1, 300, 1000), (7, 257, 65), (40, 701, 96), (200, 64, 33))
"""Rows, inputs and outputs."""
HEADS = (20, 32, 64, 80, 96, 128, 256)
ATTENTION_ROWS = ((1, 40), (1, 1), (7, 7), (5, 90), (33, 130))
"""Query tokens and context tokens."""
OF_ONE = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "erf")
OF_TWO = ("add", "mul", "div", "pow")

_generator = torch.Generator()


def numbers(*shape: int) -> Tensor:
    """Returns float32 numbers between -3 and 3."""
    return torch.randint(-3000, 3001, shape, generator=_generator).float() / 1000


def digest(*results: Tensor) -> str:
    found = hashlib.sha256()
    for each in results:
        exact = each.float() if each.dtype == torch.bfloat16 else each
        found.update(exact.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def products(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    for rows, size, outs in PRODUCTS:
        x, weight = numbers(rows, size).to(dtype), linear.pack(numbers(outs, size).to(dtype))
        yield f"linear, {rows} rows", digest(linear.linear(x, weight))
        yield f"argmax, {rows} rows", digest(*linear.linear_argmax(x, weight, outs))
        x, scales = numbers(rows, 256).to(dtype), numbers(outs, 8).abs().half()
        for bits, has_mins, rounds_x in itertools.product((4, 8), (False, True), (False, True)):
            integers = torch.randint(2**bits, (outs, 256), generator=_generator).byte()
            mins = numbers(outs, 8).half() if has_mins else None
            quantized = QuantizedTensor(integers, scales, mins, bits)
            packed = linear.pack_quantized(quantized, dtype, rounds_x)
            name = f"linear, {rows} rows, {bits} bits, {has_mins=}, {rounds_x=}"
            yield name, digest(linear.linear(x, packed))


def attended(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, window: int, softcap: float
) -> Tensor:
    heads, kv_heads, block_tokens = 4, 2, 16
    blocks = [-(-context // block_tokens) for _, context in ATTENTION_ROWS]
    width = head_dim if cache_dtype == dtype else cache_width(head_dim, cache_dtype)
    caches = torch.zeros(2, sum(blocks), kv_heads, block_tokens, width, dtype=cache_dtype)
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(count) + sum(blocks[:row])
    slots = torch.arange(sum(blocks) * block_tokens)
    k, v = (numbers(len(slots), kv_heads, head_dim).to(dtype) for _ in range(2))
    attention.write_kv(k, v, caches[0], caches[1], slots)
    queries, contexts = zip(*ATTENTION_ROWS, strict=True)
    meta = attention.AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(queries)]).int(),
        context_tokens=torch.tensor(contexts).int(),
        block_table=table,
        slot_mapping=slots[:0],
        max_query_tokens=max(queries),
        max_context_tokens=max(contexts),
    )
    q = numbers(sum(queries), heads, head_dim).to(dtype)
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    return attention.paged_attention(q, caches[0], caches[1], meta, **options)


def attentions(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    for head_dim in HEADS:
        for window, softcap in ((0, 0.0), (17, 0.0), (60, 5.0)):
            name = f"attention, {head_dim=}, {window=}, {softcap=}"
            yield name, digest(attended(dtype, dtype, head_dim, window, softcap))
        for cache_dtype in (torch.int8, torch.float8_e4m3fn):
            name = f"attention, {head_dim=}, {cache_dtype}"
            yield name, digest(attended(dtype, cache_dtype, head_dim, 0, 0.0))


def elementwise(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    x, y, weight = (numbers(*shape).to(dtype) for shape in ((9, 520), (9, 520), (520,)))
    yield "rms_norm", digest(norm.rms_norm(x, weight, 1e-5))
    yield "add_rms_norm", digest(*norm.add_rms_norm(x, y, weight, 1e-5))
    yield "rms_norm, float32 weight", digest(norm.rms_norm(x, weight.float(), 1e-5))
    yield "layer_norm", digest(norm.layer_norm(x, weight, weight.flip(0), 1e-5))
    for name in ("silu_and_mul", "gelu", "gelu_and_mul", "gelu_tanh_and_mul"):
        yield name, digest(getattr(activation, name)(x))
    yield "scale", digest(activation.scale(x, 3.3))
    yield "softcap", digest(activation.softcap(x, 3.0))
    heads, angles = numbers(9, 6, 64).to(dtype), numbers(9, 32)
    yield "rope", digest(*rope.apply_rope(heads[:, :4], heads[:, 4:], angles, angles.flip(0)))
    for name in OF_ONE:
        out = torch.empty_like(x)
        pointwise.pointwise(name, [x.abs() if name == "log" else x], out, 0)
        yield f"pointwise {name}", digest(out)
    for name in OF_TWO:
        out = torch.empty_like(x)
        pointwise.pointwise(name, [x.abs(), y], out, 0)
        yield f"pointwise {name}", digest(out)
    for name, width in (("softmax", 520), ("mean", 1)):
        out = x.new_empty(9, width)
        pointwise.reduction(name, x, out, 1, 0)
        yield f"reduction {name}", digest(out)


def adapters(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    outs, rank = (64, 33, 7), 4
    layer = lora.make_layer(75, outs, 3, 16, dtype, torch.device("cpu"))
    ups = [numbers(out, rank).to(dtype) for out in outs]
    layer.set(0, lora.LoraWeights(numbers(len(outs) * rank, 75).to(dtype), ups))
    tokens = lora.LoraTokens(20, 3, torch.device("cpu"))
    tokens.set({0: range(13)})
    y = numbers(20, sum(outs)).to(dtype)
    layer.add(numbers(20, 75).to(dtype), y, tokens)
    yield "lora", digest(y)


def experts(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    count, hidden, size, top_k = 9, 77, 16, 3
    x, router = numbers(40, hidden).to(dtype), numbers(count, hidden).to(dtype)
    logits = torch.empty(len(x), count, dtype=dtype)
    choices.product(x, router, logits, has_rows=False)
    weights, chosen = moe.route(logits, top_k, True)
    shapes = count * [(2 * size, hidden), (hidden, size)]
    packed = [linear.pack(numbers(*shape).to(dtype) / 4) for shape in shapes]
    pairs = zip(packed[::2], packed[1::2], strict=True)
    table = moe.ExpertTable(count, x.device, dict(enumerate(pairs)))
    terms = torch.zeros(len(x), top_k, hidden, dtype=dtype)
    moe.expert_outputs(x, chosen, table, terms)
    yield "router", digest(logits, weights, chosen)
    yield "experts", digest(terms, moe.combine_experts(terms, weights))


def sampled() -> Iterator[tuple[str, str]]:
    rows = 16
    logits, tokens = numbers(rows, 5000) * 2, torch.arange(rows) * 300
    yield "rank_tokens", digest(*logprobs.rank_tokens(logits, tokens, 5)[:3])
    u = sample.uniform_noise(torch.arange(rows), torch.arange(rows) * 3)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05)):
        filters = (torch.full((rows,), each) for each in (0.9, top_k, top_p, min_p))
        found = sample.sample_tokens(logits, *filters, u)
        yield f"sample_tokens, {top_k=}, {top_p=}, {min_p=}", digest(*found)


def all_digests() -> Iterator[str]:
    """Yields one line for each operation."""
    _generator.manual_seed(0)
    for dtype in TYPES:
        for operations in (products, attentions, elementwise, adapters, experts):
            for name, found in operations(dtype):
                yield f"{dtype}, {name}: {found}"
    for name, found in sampled():
        yield f"{name}: {found}"


if __name__ == "__main__":
    print(*all_digests(), sep="\n")
