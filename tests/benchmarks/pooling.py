"""Embeddings of short texts against sentence-transformers, in one process on the same cores:
`python -m tests.benchmarks.pooling` (`sentence-transformers` must be importable).

A random model of the shape of bge-small, float32, and 64 texts of 8 to 40 tokens. Each pair is one
call of either library for all texts; the ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from swell.cluster.local import LLM
from tests.support.weights.pooled_models import make

BGE_SMALL: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
TEXTS = [" ".join("abcdefghijklmnopqrstuvwxyz0123456789.,"[: 6 + 32 * i // 63]) for i in range(64)]
"""Texts of 8 to 40 tokens each, including two special tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import torch
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as name:
        make(Path(name), "bert", modes={"pooling_mode": "cls"}, normalizes=True, **BGE_SMALL)
        peer = SentenceTransformer(name, device="cpu")
        with LLM(name, **{"model.cpu_threads": args.threads}) as llm:
            torch.set_num_threads(args.threads)
            wanted = torch.tensor(peer.encode(TEXTS))
            got = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS)])
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            ours, theirs = [], []
            for _ in range(args.pairs):
                start = time.perf_counter()
                llm.embed(TEXTS)
                middle = time.perf_counter()
                peer.encode(TEXTS)
                ours.append(len(TEXTS) / (middle - start))
                theirs.append(len(TEXTS) / (time.perf_counter() - middle))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"swell {median(ours):.0f} texts/s")
    print(f"sentence-transformers {median(theirs):.0f} texts/s")
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
