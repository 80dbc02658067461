"""A padded step has the results of the step itself, for any contents of its padding, and changes
nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.attention import AttentionMetadata
from swell.kernels.inputs import Bucket, Inputs
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

BACKENDS = ["reference", "cpu"]
SLOTS, LENGTH, BLOCK, BLOCKS = 5, 24, 4, 6
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


@st.composite
def steps(draw):
    """Returns (slot, start, count, samples) of each row."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True))
    most = draw(st.sampled_from([1, 6]))
    counts = [draw(st.integers(0, most)) for _ in slots]
    return [
        (slot, draw(st.integers(0, LENGTH - n)), n, draw(st.integers(0, min(n, 2))))
        for slot, n in zip(slots, counts, strict=True)
    ]


paddings = st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 5))


def gathered(backend: str, step: list, bucket: Bucket | None, fill: int) -> tuple[Inputs, tuple]:
    """Gathers a step into inputs that contain `fill`."""
    torch.manual_seed(0)
    ids = torch.randint(1000, (SLOTS, LENGTH + 1), dtype=torch.int32)
    # each slot has blocks of its own
    table = torch.randperm(SLOTS * BLOCKS, dtype=torch.int32).view(SLOTS, BLOCKS)
    out = Inputs.allocate(60, 2 * SLOTS, BLOCKS, torch.device("cpu"), samples=3 * SLOTS)
    for tensor in out:
        tensor.fill_(fill)
    gather = load_backend(backend, "inputs").make_gather(ids, table, BLOCK, out)
    return out, gather(*([row[i] for row in step] for i in range(4)), bucket)


def bucket_of(step: list, padding: tuple[int, int, int]) -> Bucket:
    tokens, rows, samples = padding
    counts = [count for _, _, count, _ in step]
    drawn = sum(sampled for *_, sampled in step)
    most = max(counts, default=0)
    if most > 1:  # otherwise the bucket holds one token of each row
        most += tokens
    return Bucket(sum(counts) + tokens, len(step) + rows, drawn + samples, most)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(step=steps(), padding=paddings)
def test_the_gather_fills_the_padding(backend, step, padding):
    bucket = bucket_of(step, padding)
    out, sizes = gathered(backend, step, bucket, -7)
    plain, expected = gathered(backend, step, None, -7)
    assert sizes == expected
    tokens, rows, samples = sizes[:3]
    parts = {
        "input_ids": (tokens, bucket.tokens, 0),
        "positions": (tokens, bucket.tokens, 0),
        "slot_mapping": (tokens, bucket.tokens, -1),
        "query_start": (rows + 1, bucket.rows + 1, tokens),
        "context_tokens": (rows, bucket.rows, 0),
    }
    for name, (first, last, value) in parts.items():
        padded, unpadded = getattr(out, name), getattr(plain, name)
        assert torch.equal(padded[:first], unpadded[:first])
        assert (padded[first:last] == value).all()
        assert (padded[last:] == -7).all()
    assert torch.equal(out.samples[:, :samples], plain.samples[:, :samples])
    added = out.samples[:, samples : bucket.samples]
    assert added.T.tolist() == [[0, -1, 0]] * (bucket.samples - samples)
    assert (out.samples[:, bucket.samples :] == -7).all()
    assert torch.equal(out.block_table, plain.block_table)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_must_fit_into_its_bucket_and_the_bucket_into_the_inputs(backend):
    step = [(0, 0, 3, 1), (1, 0, 2, 1)]
    with pytest.raises(ValueError, match="a step has tokens=5, but its bucket has only 4"):
        gathered(backend, step, Bucket(4, 2, 2, 3), 0)
    with pytest.raises(ValueError, match="max_query_tokens=3, but its bucket has only 2"):
        gathered(backend, step, Bucket(5, 2, 2, 2), 0)
    with pytest.raises(ValueError, match="61 tokens, but there is room for 60"):
        gathered(backend, step, Bucket(61, 2, 2, 61), 0)


def padded(real: torch.Tensor, count: int, poison: float) -> torch.Tensor:
    """Returns the rows of `real` and `count` rows of poison."""
    return torch.cat([real, torch.full((count, *real.shape[1:]), poison, dtype=real.dtype)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3.0])
@settings(max_examples=40, deadline=None)
@given(step=steps(), padding=paddings)
def test_padding_changes_neither_cache_nor_attention(backend, poison, step, padding):
    bucket = bucket_of(step, padding)
    inputs, sizes = gathered(backend, step, bucket, -7)
    tokens, rows, _, max_query, max_context = sizes
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = random(tokens, HEADS, HEAD_DIM)
    k, v = random(2, tokens, KV_HEADS, HEAD_DIM)
    before = random(2, SLOTS * BLOCKS, KV_HEADS, BLOCK, HEAD_DIM)

    def run(bucket_tokens: int, bucket_rows: int, longest: int, context: int):
        caches, more = before.clone(), bucket_tokens - tokens
        load_backend(backend, "attention").write_kv(
            padded(k, more, poison), padded(v, more, poison), *caches,
            inputs.slot_mapping[:bucket_tokens],
        )  # fmt: skip
        meta = AttentionMetadata(
            inputs.query_start[: bucket_rows + 1],
            inputs.context_tokens[:bucket_rows],
            inputs.block_table[:bucket_rows].clamp(min=0),
            inputs.slot_mapping[:bucket_tokens],
            longest,
            context,
        )
        attention = load_backend(backend, "attention").paged_attention
        return caches, attention(padded(q, more, poison), *caches, meta, scale=0.25)[:tokens]

    caches, answer = run(tokens, rows, max_query, max_context)
    other, same = run(bucket.tokens, bucket.rows, bucket.max_query_tokens, LENGTH)
    assert torch.equal(caches, other)
    if backend == "cpu":
        assert torch.equal(answer, same)
    torch.testing.assert_close(answer, same)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_padded_samples_are_not_written(backend, data):
    places = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, LENGTH - 1))
    real = data.draw(st.lists(places, unique=True, max_size=6))
    entries = [(*place, 100 + i) for i, place in enumerate(real)]
    entries += [(-1, 0, data.draw(st.integers(-5, 10**6))) for _ in range(data.draw(paddings)[0])]
    ids = torch.arange(SLOTS * LENGTH, dtype=torch.int32).view(SLOTS, LENGTH)
    expected = ids.clone()
    for slot, position, token in entries[: len(real)]:
        expected[slot, position] = token
    columns = torch.tensor(entries, dtype=torch.int64).view(-1, 3).T.contiguous()
    load_backend(backend, "inputs").write_tokens(ids, *columns)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_keeps_what_is_written_to_the_first_place(backend):
    """A padded entry may write its place again, but not what was there before."""
    ids = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    columns = torch.tensor([[0, 0, 7], *[[-1, 0, 9]] * 5]).T.contiguous()
    load_backend(backend, "inputs").write_tokens(ids, *columns)
    assert ids[0, 0] == 7 and ids.count_nonzero() == 1
    caches = torch.zeros(2, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM)
    k, v = torch.ones(2, 6, KV_HEADS, HEAD_DIM)
    slots = torch.tensor([0, *[-1] * 5])
    load_backend(backend, "attention").write_kv(k, v, *caches, slots)
    assert (caches[:, 0, :, 0] == 1).all() and caches.count_nonzero() == 2 * KV_HEADS * HEAD_DIM
