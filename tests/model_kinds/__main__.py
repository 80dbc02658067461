"""`python -m tests.model_kinds FOLDER`: writes every kind as a model folder that `swell serve`
accepts."""

import sys
from pathlib import Path

from tests.model_kinds import MODEL_KINDS, model_kind

for name in MODEL_KINDS:
    model_kind(name).write(Path(sys.argv[1]) / name)
    print(Path(sys.argv[1]) / name)
