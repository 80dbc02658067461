"""`python -m tests.kinds FOLDER`: writes every kind as a model folder that `swell serve`
accepts."""

import sys
from pathlib import Path

from tests.kinds import KINDS, kind

for name in KINDS:
    kind(name).write(Path(sys.argv[1]) / name)
    print(Path(sys.argv[1]) / name)
