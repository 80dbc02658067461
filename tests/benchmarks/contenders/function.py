"""A function of ours that returns figures: `MODULE FUNCTION`, called for each line."""

import importlib
import sys

from lines import Lines


def main(lines):
    function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    lines.send(ready=True)
    for _ in lines:
        lines.send(**function())


if __name__ == "__main__":
    main(Lines())
