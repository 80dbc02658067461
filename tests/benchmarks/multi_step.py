"""`python -m tests.benchmarks.multi_step`: output tokens a second with several steps per plan over
those with one.

Two engines of this process with the model nano, greedy, answer the same prompts in turn, as in
`drafts.py`; the answers must be equal. Their workers are in the same process: the time saved is
that in which the engine schedules and reads.
"""

from __future__ import annotations

import argparse

from swell.cluster.local import LLM
from tests.benchmarks.drafts import NANO, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    print("| steps per plan: answers | rows | one, tokens/s | several | ratio | |")
    print("|---|---:|---:|---:|---:|---|")
    for steps in (2, 4, 8):
        several = {"scheduler.steps_per_plan": steps}
        with LLM(str(NANO)) as plain, LLM(str(NANO), **several) as other:
            for rows in (1, 8, 64):
                line = compare(plain, other, "mixed", rows, args.pairs)
                print(line.replace("mixed", f"{steps}: mixed"), flush=True)


if __name__ == "__main__":
    main()
