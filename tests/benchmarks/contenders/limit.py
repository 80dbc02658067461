"""The measured speed limit of a batch: `MODEL_NAME ROWS INPUT_TOKENS OUTPUT_TOKENS`."""

import os
import sys

from lines import Lines


def main(lines):
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages, as in our processes
    from tests.benchmarks import limits
    from tests.benchmarks.models import SHAPES
    from tests.benchmarks.steps import steps

    shape, (rows, inputs, outputs) = SHAPES[sys.argv[1]], map(int, sys.argv[2:])
    made = steps(rows, inputs, outputs)
    products = limits.Products(shape)
    lines.send(ready=True)
    for _ in lines:
        rate = limits.memory_rate()
        seconds = limits.batch_seconds(shape, products, made, rate)
        lines.send(tokens_per_s=rows * outputs / seconds, memory_gb_per_s=rate / 1e9)


if __name__ == "__main__":
    main(Lines())
