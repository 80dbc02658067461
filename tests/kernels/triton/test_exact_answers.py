"""`model.exact` reaches the kernels for GPUs: answers have the same bits for any other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster.local import LLM, SamplingParams
from swell.kernels import backends
from swell.kernels.triton import linear
from swell.kernels.triton.attention import exact
from tests.worker import tiny_models
from tests.worker.step.test_buckets import make

pytestmark = pytest.mark.slow

PROMPT = [7, 11, 3, 9, 30, 12, 25]
OTHERS = [[5, 6, 8], [20], [9, 4, 17, 2, 6]]
PARAMS = SamplingParams(max_tokens=2, temperature=0, logprobs=1, ignore_eos=True)


@pytest.fixture
def calls(monkeypatch) -> Iterator[Counter[str]]:
    """Lets CPU tensors be computed by the kernels for GPUs, with parts of one tile; counts calls of
    the exact ones."""
    found: Counter[str] = Counter()
    attend, multiply = exact.attend, linear._multiply

    def counted_attend(*args):
        found["attention"] += 1
        return attend(*args)

    def counted_multiply(*args):
        found["products"] += 1
        return multiply(*args)

    monkeypatch.setattr(exact, "PART_TOKENS", 16)
    monkeypatch.setattr(exact, "attend", counted_attend)
    monkeypatch.setattr(linear, "_multiply", counted_multiply)
    monkeypatch.setitem(backends.BACKENDS, "cpu", backends.BACKENDS["cuda"])
    backends.get.cache_clear()
    yield found
    backends.get.cache_clear()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_answer_has_the_same_bits_in_every_batch(kind, calls, tmp_path, monkeypatch):
    sizes = {**tiny_models.SIZES, "num_hidden_layers": 1}
    monkeypatch.setattr(tiny_models, "SIZES", sizes)
    make(tmp_path, kind)

    def answer(prompts: list[list[int]], folder: Path = tmp_path, **options: object) -> list:
        settings = {"model.exact": True, "cache.memory_bytes": 1 << 20, "scheduler.max_rows": 4}
        with LLM(str(folder), **settings, **options) as llm:
            outputs = llm.generate(prompts, PARAMS)
        found = outputs[prompts.index(PROMPT)].outputs[0]
        return [found.token_ids, found.logprobs.logprobs]

    alone = answer([PROMPT])
    # A step for the prompt and one for its answer: q, k and v in one product, `o`, and the head.
    assert calls["attention"] >= 2 and calls["products"] >= 3 * 2
    assert answer([*OTHERS[:2], PROMPT, OTHERS[2]]) == alone
    assert answer([OTHERS[0], PROMPT], **{"scheduler.max_tokens_per_step": 4}) == alone
