"""Norms, rotation, activation and cache writes: every backend against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def close(got: Tensor, wanted: Tensor, times: float = 1.0) -> None:
    assert got.dtype == wanted.dtype
    tolerance = TOLERANCE[got.dtype] * times
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(x.shape[-1], eps)
    module.weight.data = weight
    return module(x).detach()


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (1, 7), (3, 100), (40, 1024), (4, 3, 32)])
def test_rms_norm(name, dtype, shape):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    close(load_backend(name, "norm").rms_norm(x, weight, 1e-5), llama_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm_of_heads_in_a_wider_tensor(name, dtype):
    torch.manual_seed(0)
    wide, weight = torch.randn(6, 300).to(dtype), torch.randn(32).to(dtype)
    x = wide[:, 30:158].unflatten(1, (4, 32))
    close(load_backend(name, "norm").rms_norm(x, weight, 1e-6), llama_norm(x, weight, 1e-6))


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [9, 64, 520])
def test_add_rms_norm(name, dtype, size):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(6, size), torch.randn(6, size), torch.randn(size)
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    normed, total = load_backend(name, "norm").add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, llama_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [7, 64, 520])
def test_rms_norm_with_a_float32_weight(name, dtype, size):
    """The product with the weight is rounded once, as in transformers' gemma3."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    torch.manual_seed(0)
    x, residual = torch.randn(6, size).to(dtype), torch.randn(6, size).to(dtype)
    module = Gemma3RMSNorm(size, 1e-6)
    module.weight.data = torch.randn(size)
    weight, norm = module.weight.data + 1, load_backend(name, "norm")
    exact = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    for got, source in ((norm.rms_norm(x, weight, 1e-6), x), (normed, total)):
        wanted = module(source.float()).detach()
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), wanted, rtol=exact, atol=1e-6)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (32, 16), (20, 10), (128, 128)])
def test_rope(name, dtype, head_dim, rotary):
    """RoPE equals that of transformers' llama, in float32 bit for bit."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    tokens, half = 9, rotary // 2
    angles = torch.rand(tokens, half) * 100
    cos, sin = angles.cos(), angles.sin()
    wide = torch.randn(tokens, 8 * head_dim).to(dtype)  # q, k and v side by side
    q, k = wide[:, : 4 * head_dim], wide[:, 4 * head_dim : 6 * head_dim]
    q, k = q.unflatten(1, (4, head_dim)), k.unflatten(1, (2, head_dim))

    def full(x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=-1)[None]

    parts = [x[None, ..., :rotary].transpose(1, 2).float() for x in (q, k)]
    wanted = [
        torch.cat((y[0].transpose(0, 1).to(dtype), x[..., rotary:]), dim=-1)
        for x, y in zip((q, k), apply_rotary_pos_emb(*parts, full(cos), full(sin)), strict=True)
    ]
    v = wide[:, 6 * head_dim :].clone()
    got = load_backend(name, "rope").apply_rope(q, k, cos, sin)
    assert got[0].data_ptr() == q.data_ptr()
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(wide[:, 6 * head_dim :], v)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5, 130), (64, 1024)])
def test_silu_and_mul(name, dtype, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 5).to(dtype)
    x[0, :2] = torch.tensor([-200.0, 90.0])
    gate, up = x.float().chunk(2, dim=-1)
    wanted = (gate / (1 + torch.exp(-gate))).to(dtype) * up.to(dtype)
    close(load_backend(name, "activation").silu_and_mul(x), wanted)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5, 130), (64, 1024)])
def test_gelu(name, dtype, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    x[0, :4] = torch.tensor([-200.0, 90.0, -6.0, 0.0])
    activation, wide = load_backend(name, "activation"), x.double()
    whole = wide * (1 + torch.erf(wide / 2**0.5)) / 2
    close(activation.gelu(x), whole.to(dtype), times=2)
    gate, up = whole.to(dtype).chunk(2, dim=-1)[0], x.chunk(2, dim=-1)[1]
    close(activation.gelu_and_mul(x), gate * up, times=5)
    u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    gate = (wide * (1 + torch.tanh(u)) / 2).to(dtype).chunk(2, dim=-1)[0]
    close(activation.gelu_tanh_and_mul(x), gate * up, times=5)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 13), (0, 16), (2, 3, 64)])
def test_scale(name, dtype, shape):
    """The factor is rounded to the type, as transformers' gemma3 rounds it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    got = load_backend(name, "activation").scale(x, 25.298221281347036)
    assert torch.equal(got, x * torch.tensor(25.298221281347036, dtype=dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 13), (0, 16), (2, 3, 64), (9, 1000)])
def test_softcap(name, dtype, shape):
    """Each operation is rounded to the type, as in transformers' gemma2."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 40
    x.view(-1)[:1] = 1000.0
    before = x.clone()
    got = load_backend(name, "activation").softcap(x, 30.0)
    expected = torch.tanh(x / 30.0) * 30.0
    tolerance = (
        {"rtol": 1e-6, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 0}
    )
    torch.testing.assert_close(got, expected, **tolerance)
    if dtype == torch.bfloat16 and len(x):
        assert (got == expected).float().mean() > 0.99
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (1, 7), (3, 100), (40, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_layer_norm(name, dtype, shape, has_bias, adds):
    torch.manual_seed(0)
    x, residual = ((torch.randn(shape) * 3 + 1).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    total = (x + residual if adds else x).double()
    centered = total - total.mean(-1, keepdim=True)
    wanted = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    wanted = (wanted + bias.double() if has_bias else wanted).to(dtype)
    norm = load_backend(name, "norm").layer_norm
    close(norm(x, weight, bias if has_bias else None, 1e-5, residual if adds else None), wanted)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "block_tokens"), [(1, 16), (70, 16), (0, 4), (9, 1)])
def test_write_kv(name, dtype, tokens, block_tokens):
    """Each token is written to its slot, and nothing else changes."""
    torch.manual_seed(0)
    blocks, kv_heads, head_dim = 90, 3, 20
    caches = torch.randn(2, blocks, kv_heads, block_tokens, head_dim).to(dtype)
    wanted = caches.clone()
    wide = torch.randn(tokens, 2 * kv_heads * head_dim).to(dtype)
    k, v = (x.unflatten(1, (kv_heads, head_dim)) for x in wide.chunk(2, dim=1))
    slots = torch.randperm(blocks * block_tokens)[:tokens]
    for t, slot in enumerate(slots.tolist()):
        wanted[0, slot // block_tokens, :, slot % block_tokens] = k[t]
        wanted[1, slot // block_tokens, :, slot % block_tokens] = v[t]
    load_backend(name, "attention").write_kv(k, v, caches[0], caches[1], slots)
    assert torch.equal(caches, wanted)
