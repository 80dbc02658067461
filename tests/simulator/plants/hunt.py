"""Searches for the first seed at which each planted bug breaks a law.

python -m tests.simulator.plants.hunt [NAME...] [--first 0] [--seeds 2000]
"""

from __future__ import annotations

import argparse
import logging

from tests.simulator.plants.planted import BUGS, find


def main() -> int:
    """Prints the first seed of each bug. Returns 1 if a bug was not found, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="planted bugs; default: all")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds are tried")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BUGS]:
        parser.error(f"unknown bugs: {unknown}; there are {list(BUGS)}")
    logging.disable(logging.CRITICAL)
    missed = 0
    for name in args.names or BUGS:
        seed = find(BUGS[name], range(args.first, args.first + args.seeds))
        missed += seed is None
        print(f"{name}: {'not found' if seed is None else f'seed {seed}'}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
