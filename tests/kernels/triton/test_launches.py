"""A decode step launches few kernels: the time between launches is most of a step of a small
model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from swell.engine.wire import EngineCoreRequest
from swell.kernels import backends
from swell.worker.runner import ModelRunner
from swell.worker.sampler_wire import SamplerParams
from tests.engine.outputs.test_token_exact import Engine
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

LAYERS = 28
MOST = {"qwen3": 10 * LAYERS + 20, "qwen3_moe": 16 * LAYERS + 20}
"""The most launches of a step: ten for each dense layer (four products, two norms, `qkv.prepare`,
two of attention, the activation), 16 for each layer with experts (instead of two products and the
activation nine: the router, six of `moe`, rounding the weights, filling outputs with zeros), and 20
for the inputs, the head and the sampler."""
EVERY_KERNEL = SamplerParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=7)
"""A request for which each kernel of the sampler is launched."""
WITHOUT_LAUNCH = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand"),
    *("lift_fresh", "new_empty", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "_unsafe_view"),
    *("_reshape_alias", "flatten", "narrow", "resolve_conj", "resolve_neg"),
}


@pytest.fixture
def column(monkeypatch) -> Iterator[None]:
    """Lets CPU tensors be computed by the kernels for GPUs."""
    monkeypatch.setitem(backends.BACKENDS, "cpu", backends.BACKENDS["cuda"])
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


class Launches(TorchDispatchMode):
    """Counts kernels of Triton, which compute zeros here, and operations of torch that launch
    one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        monkeypatch.setattr(
            GridExecutor,
            "__call__",
            lambda grid, *args, **kwargs: self.found.append(f"triton {grid.fn.__name__}"),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in WITHOUT_LAUNCH:
            self.found.append(name)
        result = func(*args, **(kwargs or {}))
        return result.zero_() if "empty" in name else result


@pytest.mark.parametrize(
    ("kind", "params", "quantize"),
    [
        *((kind, SamplerParams(), "none") for kind in MOST),
        ("qwen3", EVERY_KERNEL, "none"),
        ("qwen3", SamplerParams(), "int4"),
    ],
)
def test_a_decode_step_of_28_layers(kind, params, quantize, column, monkeypatch, tmp_path):
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 32}
    monkeypatch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, **sizes})
    tiny_models.make(tmp_path, kind)
    launches = Launches(monkeypatch)
    execute = ModelRunner.execute_model

    def counted(self: ModelRunner, plan: Any) -> Any:
        launches.found.clear()
        with launches:
            return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute_model", counted)
    settings = {"model__quantize": quantize, "model__enforce_eager": True}
    with Engine(tmp_path, **settings) as engine:
        # The last step is a decode step.
        engine.answer([EngineCoreRequest("0", [5, 6], params, max_tokens=3)])
    per_layer = sum(name.startswith("triton") for name in launches.found) / LAYERS
    assert per_layer >= 5, "the kernels of this column compute the step"
    assert len(launches.found) <= MOST[kind], Counter(launches.found)
