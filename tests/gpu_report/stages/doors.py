"""Every operation of `kernels/`: the device's backend against the reference on the CPU, which gets
the same inputs in float64 or, where an operation accepts only float32, in that. `make test`
compares the reference itself with the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from swell.kernels import backends
from swell.kernels.attention import AttentionMetadata
from swell.kernels.host.cache_format import LIMITS, cache_width
from swell.kernels.inputs import Bucket, Inputs
from swell.kernels.linear import Weight, pack_quantized
from swell.kernels.lora import LoraTokens, LoraWeights
from swell.kernels.moe import ExpertTable
from swell.kernels.weights.quantized import Numbers, QuantizedTensor
from tests.gpu_report.scale import Figures, Scale

Case = Callable[[ModuleType, Callable[[Tensor], Tensor]], list[Tensor]]
"""(module of a backend, move to its device) -> results"""


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_randn_generator)


_randn_generator = torch.Generator()


def _rms_norm(norm: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, residual, weight = to(_randn(5, 256)), to(_randn(5, 256)), to(_randn(256))
    return [norm.rms_norm(x, weight, 1e-5), *norm.add_rms_norm(x, residual, weight, 1e-5)]


def _layer_norm(norm: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, residual, weight, bias = (
        to(_randn(*shape)) for shape in ((5, 256), (5, 256), (256,), (256,))
    )
    return [
        norm.layer_norm(x, weight, bias, 1e-5),
        norm.layer_norm(x, weight, None, 1e-5, residual),
    ]


def _activation(activation: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = to(_randn(5, 256))
    return [activation.silu_and_mul(x), activation.gelu(x), activation.gelu_and_mul(x)]


def _rope(rope: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    angles = _randn(5, 32)
    return list(
        rope.apply_rope(
            to(_randn(5, 4, 64)), to(_randn(5, 2, 64)), to(angles.cos()), to(angles.sin())
        )
    )


def _qkv(qkv: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    caches = to(torch.zeros(3, 2, 4, 64)), to(torch.zeros(3, 2, 4, 64))
    angles, norms = _randn(5, 32), (to(_randn(64)), to(_randn(64)))
    slots, cos, sin = to(torch.tensor([5, 0, 11, 7, -1])), to(angles.cos()), to(angles.sin())
    q = qkv.prepare(to(_randn(5, 8 * 64)), norms, 1e-5, cos, sin, caches, slots)
    return [q[:4], *caches]


def _cache(attention: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    caches = [to(torch.zeros(3, 2, 4, 64)) for _ in range(2)]
    slots = to(torch.tensor([5, 0, 11, -1]))
    attention.write_kv(to(_randn(4, 2, 64)), to(_randn(4, 2, 64)), *caches, slots)
    return caches


def _attention(attention: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    queries, contexts = [1, 0, 5, 1], [300, 7, 21, 1]
    blocks = torch.randperm(64)[: 4 * 16].view(4, 16)
    starts = torch.tensor([0, *queries]).cumsum(0)
    meta = AttentionMetadata(
        to(starts.int()), to(torch.tensor(contexts).int()), to(blocks.int()),
        to(torch.zeros(7, dtype=torch.int64)), max(queries), max(contexts),
    )  # fmt: skip
    found = []
    for heads, kv_heads, head_dim in ((8, 2, 128), (14, 2, 80)):
        cache = 64, kv_heads, 32, head_dim
        tensors = to(_randn(7, heads, head_dim)), to(_randn(*cache)), to(_randn(*cache))
        sinks = to(_randn(heads))
        for options in ({}, {"window": 9, "softcap": 30.0}, {"lookahead": 3, "sinks": sinks}):
            for exact in (False, True):
                own = meta._replace(exact=exact)
                found.append(attention.paged_attention(*tensors, own, scale=0.1, **options))
    return found


def _quantized_cache(attention: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Attention over what is written to caches of 8 bits."""
    queries, contexts, slots = [1, 0, 5, 1], [300, 7, 21, 1], to(torch.arange(64 * 32))
    blocks = torch.randperm(64)[: 4 * 16].view(4, 16)
    meta = AttentionMetadata(
        to(torch.tensor([0, *queries]).cumsum(0).int()), to(torch.tensor(contexts).int()),
        to(blocks.int()), to(torch.zeros(7, dtype=torch.int64)), max(queries), max(contexts),
    )  # fmt: skip
    q, k, v = to(_randn(7, 8, 128)), to(_randn(64 * 32, 2, 128)), to(_randn(64 * 32, 2, 128))
    found = []
    for dtype in LIMITS:
        shape = 64, 2, 32, cache_width(128, dtype)
        caches = [to(torch.zeros(shape, dtype=torch.uint8)).view(dtype) for _ in range(2)]
        attention.write_kv(k, v, *caches, slots)
        found.append(attention.paged_attention(q, *caches, meta, scale=0.1))
    return found


def _linear(linear: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, weight, bias = to(_randn(5, 64)), to(_randn(96, 64)), to(_randn(96))
    ids = to(torch.tensor([3, 0, 3]))
    products = [linear.linear(x, linear.pack(weight, exact), bias) for exact in (False, True)]
    return [*products, linear.embedding(ids, to(_randn(9, 64)))]


def _argmax(linear: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return list(linear.linear_argmax(to(_randn(5, 64)), linear.pack(to(_randn(96, 64))), 90))


def _quantized(linear: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    forms = _form(4, 32), _form(8, 128), _form(4, 256, mins=True), _form(8, 32, mins=True)
    return _products(linear, to, forms)


def _small_floats(linear: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return _products(linear, to, [_floats(Numbers.E2M1, 32), _floats(Numbers.E4M3, 128)])


def _products(
    linear: ModuleType, to: Callable[[Tensor], Tensor], forms: Iterable[tuple[Any, ...]]
) -> list[Tensor]:
    x, ids, found = to(_randn(5, 256) / 16), to(torch.tensor([3, 95, 0])), []
    for form in forms:
        parts = (None if part is None else part.to(x.device) for part in form[:3])
        weight = linear.pack_quantized(QuantizedTensor(*parts, *form[3:]), x.dtype)
        products = [linear.linear(x, weight, to(_randn(96))), *linear.linear_argmax(x, weight, 90)]
        found += [*products, linear.embedding_part(ids + 7, weight, 10)]
    return found


def _form(
    bits: int, group: int, mins: bool = False, shape: tuple[int, int] = (96, 256)
) -> tuple[Any, ...]:
    """Returns the parts of a random quantized weight."""
    integers = torch.randint(2**bits, shape, dtype=torch.uint8, generator=_randn_generator)
    of_groups = shape[0], shape[1] // group
    scales, low = _randn(*of_groups).abs() / 2**bits, _randn(*of_groups) / 4
    return (
        integers,
        scales.to(torch.float32 if mins else torch.float16),
        low if mins else None,
        bits,
    )


def _floats(numbers: Numbers, group: int) -> tuple[Any, ...]:
    """Returns the parts of a weight of small floats."""
    assert numbers.float_bits
    codes, scales, *rest = _form(numbers.float_bits, group)
    codes[codes & 127 == 127] = 0  # NaN, of 8 bits
    return codes, scales, *rest, numbers


def _sample(sample: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    logits = to(4 * _randn(6, 1000))
    columns = torch.tensor(
        [[0, 1, 1, 0.5, 2, 0.7], [1, 0.9, 1, 0.3, 1, 0.95], [0, 0, 0.1, 0, 0.02, 0]]
    )
    temperature, top_p, min_p = (to(column) for column in columns)
    u = sample.uniform_noise(to(torch.arange(6)), to(torch.arange(6) * 7))
    top_k = to(torch.tensor([0, 0, 5, 40, 0, 3]))
    tokens, largest = sample.sample_tokens(logits, temperature, top_k, top_p, min_p, u)
    return [tokens, largest, *sample.greedy_sample(logits)]


def _logprobs(logprobs: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return list(logprobs.rank_tokens(to(_randn(4, 1000)), to(torch.tensor([1, 5, 999, 0])), 3)[:3])


def _penalties(penalties: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    logits = to(_randn(4, 100))
    counts, seen = to(torch.zeros(5, 100, dtype=torch.int32)), to(torch.zeros(5, 100) > 1)
    penalties.count_tokens(counts, seen, to(torch.tensor([4, 4, 1])), to(torch.tensor([7, 7, 99])))
    rows, slots = to(torch.tensor([3, 0])), to(torch.tensor([4, 1]))
    each = [to(torch.tensor(pair)) for pair in ([1.2, 0.8], [0.5, 0.0], [0.1, 0.3])]
    penalties.apply_penalties(logits, rows, slots, counts, seen, *each)
    return [logits, counts]


def _bitmask(bitmask: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    logits = to(_randn(4, 70))
    mask = torch.tensor([[-2, 5, 3], [0, -1, 1]], dtype=torch.int32)
    bitmask.apply_bitmask(logits, to(mask), to(torch.tensor([2, 0])), -math.inf)
    return [logits.nan_to_num(neginf=-1e9)]


def _moe(moe: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = to(_randn(7, 32))
    weights, experts = moe.route(to(_randn(7, 4)), 2, True)
    made = {e: (to(_randn(48, 32) / 6), to(_randn(32, 24) / 5)) for e in range(4)}
    table = ExpertTable(4, x.device, made)
    outputs = torch.zeros(7, 2, 32, dtype=x.dtype, device=x.device)
    moe.expert_outputs(x, experts, table, outputs)
    return [weights, moe.combine_experts(outputs, weights.to(x.dtype))]


def _quantized_moe(moe: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Experts with integers of 4 bits, and of 8 bits with minima; the reference has floats."""
    x = to(_randn(7, 256) / 16)
    _, experts = moe.route(to(_randn(7, 4)), 2, True)
    table = ExpertTable(4, x.device)
    for expert in range(4):
        up, down = _form(4, 32), _form(8, 16, mins=True, shape=(256, 48))
        table[expert] = _expert_weight(moe, up, x), _expert_weight(moe, down, x)
    outputs = torch.zeros(7, 2, 256, dtype=x.dtype, device=x.device)
    moe.expert_outputs(x, experts, table, outputs)
    return [outputs]


def _expert_weight(moe: ModuleType, form: tuple[Any, ...], x: Tensor) -> Weight:
    """Returns the weight that the parts of `_form` make, for products with `x`."""
    parts = (None if part is None else part.to(x.device) for part in form[:3])
    weight = QuantizedTensor(*parts, *form[3:])
    if moe is _reference("moe"):
        return weight.dequantize(x.dtype)
    return pack_quantized(weight, x.dtype)


def _inputs(inputs: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A step of 3 rows, padded to a bucket."""
    token_ids, blocks = to(torch.arange(4 * 40).view(4, 40).int()), to(torch.randperm(12).int())
    out = Inputs.allocate(16, 8, 3, token_ids.device)
    gather = inputs.make_gather(token_ids, blocks.view(4, 3), 16, out)
    gather([3, 0, 1], [7, 0, 37], [1, 5, 2], [1, 0, 1], Bucket(12, 4, 4, 8))
    tokens = to(torch.tensor([701, 702, 703, 704]))
    inputs.write_tokens(token_ids, out.samples[1, :4], out.samples[2, :4], tokens)
    padded = [out.input_ids[:12], out.positions[:12], out.query_start[:5], out.context_tokens[:4]]
    return [*padded, out.slot_mapping[:12], out.samples[:, :4], token_ids]


def _lora(lora: ModuleType, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A layer of two matrices: one adapter adapts both, another one only the second matrix."""
    x, y = to(_randn(6, 64)), to(_randn(6, 48))
    layer = lora.make_layer(64, (32, 16), 3, 8, x.dtype, x.device)
    layer.set(0, LoraWeights(to(_randn(12, 64)), [to(_randn(32, 8)), to(_randn(16, 4))]))
    layer.set(2, LoraWeights(to(_randn(5, 64)), [None, to(_randn(16, 5))]))
    tokens = LoraTokens(6, 3, x.device)
    tokens.set({0: [4, 1], 2: [5, 0, 3]})
    layer.add(x, y, tokens)
    return [y / 8]  # the size of the terms of one product


CASES: list[tuple[str, Case]] = [
    ("inputs", _inputs),
    ("lora", _lora),
    ("norm", _rms_norm),
    ("norm", _layer_norm),
    ("activation", _activation),
    ("rope", _rope),
    ("qkv", _qkv),
    ("attention", _cache),
    ("attention", _attention),
    ("attention", _quantized_cache),
    ("linear", _linear),
    ("linear", _argmax),
    ("linear", _quantized),
    ("linear", _small_floats),
    ("sample", _sample),
    ("logprobs", _logprobs),
    ("penalties", _penalties),
    ("bitmask", _bitmask),
    ("moe", _moe),
    ("moe", _quantized_moe),
]
"""(operation, case)"""
_FLOAT32_ONLY = ("inputs", "sample", "logprobs", "penalties", "bitmask")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def run(scale: Scale) -> Figures:
    figures: Figures = {}
    for operation, case in CASES:
        module = backends.get(operation, scale.device)
        figures[operation] = module.__name__.split(".")[-2]
        if case is _small_floats and Numbers.E4M3 not in module.numbers():
            module = _reference(operation)  # on a CPU
        types = [torch.float32] if operation in _FLOAT32_ONLY else list(_TOLERANCE)
        if case is _quantized_cache:
            types = [torch.bfloat16, torch.float16]  # a GPU refuses float32
        if case is _quantized_moe and not scale.is_full:
            types = [torch.float32, torch.bfloat16]  # a CPU refuses float16
        exact = torch.float32 if operation in _FLOAT32_ONLY else torch.float64
        for dtype in types:
            results = _results(case, module, scale.device, dtype, dtype)
            reference = _results(case, _reference(operation), "cpu", dtype, exact)
            for got, expected in zip(results, reference, strict=True):
                tolerance = _TOLERANCE[dtype]
                torch.testing.assert_close(
                    got.cpu().to(expected.dtype), expected, rtol=tolerance, atol=tolerance,
                    msg=lambda text, what=(operation, dtype): f"{what}: {text}",
                )  # fmt: skip
    return figures


def _reference(operation: str) -> ModuleType:
    module = backends.load("reference", operation)
    assert module is not None
    return module


def _results(
    case: Case, module: ModuleType, device: str, dtype: torch.dtype, computed: torch.dtype
) -> list[Tensor]:
    """Computes the case in the type `computed`, with the same numbers of type `dtype` for each
    backend."""
    _randn_generator.manual_seed(0)

    def to(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float32:
            tensor = tensor.to(dtype).to(computed)
        return tensor.to(device)

    torch.manual_seed(0)
    return case(module, to)
