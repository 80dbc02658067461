"""`python -m tests.benchmarks.multi_step`: output tokens a second with several steps per plan over
those with one.

Two engines with the model nano, greedy, answer the same prompts in turn, as in `drafts.py`; the
answers must be equal. `inproc`: the workers are in the engine's process; `ray`: each plan and each
result is a message between two processes.
"""

from __future__ import annotations

import argparse
from typing import Any

from swell.cluster.local import LLM
from tests.benchmarks.drafts import NANO, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--executors", default="inproc,ray")
    args = parser.parse_args()
    print("| workers | steps per plan: answers | rows | one, tokens/s | several | ratio | |")
    print("|---|---|---:|---:|---:|---:|---|")
    for executor in args.executors.split(","):
        shared: dict[str, Any] = {"parallel.executor": executor}
        for steps in (2, 4, 8):
            several = shared | {"scheduler.steps_per_plan": steps}
            with LLM(str(NANO), **shared) as plain, LLM(str(NANO), **several) as other:
                for rows in (1, 8, 64):
                    line = compare(plain, other, "mixed", rows, args.pairs)
                    print(f"| {executor} | {steps}: {line.removeprefix('| ')}", flush=True)


if __name__ == "__main__":
    main()
