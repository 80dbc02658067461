"""Checks every causal model of transformers: `python -m tests.zoo [KIND...] [--page
docs/reference/models.md]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="model types; all that there are by default")
    parser.add_argument("--splits", action="store_true", help="also over two stages and two ranks")
    parser.add_argument("--page", type=Path, help="write what is found into this page")
    args = parser.parse_args()

    from tests.zoo import configs, page, run

    outcomes = []
    splits = list(run.SPLITS) if args.splits else [""]
    for outcome in run.run_all(run.cases(args.kinds or configs.kinds(), splits)):
        outcomes.append(outcome)
        head = f"{outcome.status:8} {outcome.case!s:48} {outcome.seconds:5.1f} s"
        print(f"{head}  {outcome.note}", flush=True)
    if args.page:
        page.write(args.page, outcomes)
    print(dict(Counter(o.status for o in outcomes)))
    return 1 if any(o.status == "failed" for o in outcomes) else 0


sys.exit(main())
