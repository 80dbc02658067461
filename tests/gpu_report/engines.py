"""Engines under measurement: Swell's core without Ray, and plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers

from swell.configs.lora import Adapter
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.gpu_report.scale import Scale, Shape


class Swell:
    """One engine in this process. Use as a context manager."""

    def __init__(self, folder: Path, scale: Scale, **settings: Any) -> None:
        """`settings`: keys of the configuration, with `__` for the dot."""
        given = {key.replace("__", "."): value for key, value in settings.items()}
        self.config = config = load(
            str(folder),
            {
                "model.device": scale.device,
                "parallel.executor": "inproc",
                "cache.prefix_caching": False,
                "cache.memory_bytes": scale.pick(24 << 30, 8 << 20),
                **given,
            },
        )
        executor = build_executor(config)
        self.core = EngineCore(config, executor, executor.start())
        self.adapters: Sequence[Adapter] = ()
        """The adapters that requests use in turn."""

    def generate(
        self, prompts: list[list[int]], tokens: int, params: SamplerParams | None = None
    ) -> list[list[int]]:
        """Returns `tokens` tokens for each prompt, all at once."""
        outputs = self.outputs(prompts, tokens, params)
        return [
            [token for one in of_prompt for token in one.new_token_ids] for of_prompt in outputs
        ]

    def outputs(
        self, prompts: list[list[int]], tokens: int, params: SamplerParams | None = None
    ) -> list[list[EngineCoreOutput]]:
        """Returns the outputs of `tokens` tokens for each prompt, all at once."""
        answers: dict[str, list[EngineCoreOutput]] = {}
        for index, prompt in enumerate(prompts):
            of_adapter: dict[str, Any] = {}
            if self.adapters:
                adapter = self.adapters[index % len(self.adapters)]
                of_adapter = {"adapter": adapter, "cache_salt": adapter.digest}
            request = EngineCoreRequest(
                str(index), prompt, params or SamplerParams(), tokens, **of_adapter
            )
            refusal = self.core.add_request(request, b"report")
            assert refusal is None, refusal
        while self.core.has_work:
            for output in self.core.step().get(b"report", []):
                answers.setdefault(output.request_id, []).append(output)
        return [answers[str(index)] for index in range(len(prompts))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.core.shutdown()


class Transformers:
    """Plain `generate`, greedy."""

    def __init__(self, folder: Path, scale: Scale, **options: Any) -> None:
        """`options`: those of `generate`."""
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(scale.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model: Any = model.eval()
        self._model.generation_config.eos_token_id = None
        self._device, self._options = scale.device, options

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=self._device)
        self._model.generate(
            ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0, **self._options
        )


def write_config(folder: Path, shape: Shape) -> Path:
    """Writes a model folder for dummy weights."""
    (folder / "config.json").write_text(json.dumps(shape.config))
    return folder


def prompts_of(rows: int, length: int, vocab: int) -> list[list[int]]:
    """Returns different prompts of one length."""
    return [[3 + (row * 977 + i * 31) % (vocab - 3) for i in range(length)] for row in range(rows)]


def step_seconds(
    scale: Scale, engine: Swell | Transformers, prompts: list[list[int]], steps: int
) -> float:
    """Returns the time of a decode step: that of an answer with `steps` more tokens than one, less
    that of one token."""
    whole_s = scale.seconds(lambda: engine.generate(prompts, steps + 1), repeats=2)
    first_s = scale.seconds(lambda: engine.generate(prompts, 1), repeats=2)
    return max(whole_s - first_s, 0.0) / steps
