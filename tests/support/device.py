"""The device for tests of whole engines: the CPU, or the GPU with SWELL_TEST_DEVICE=cuda (`make
test-gpu`)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

DEVICE = os.environ.get("SWELL_TEST_DEVICE", "cpu")
_SPLITS = ("parallel.tensor", "parallel.pipeline")


def is_enough(settings: Mapping[str, Any]) -> bool:
    """Returns whether there is a device for each worker of one engine."""
    workers = math.prod(settings.get(key, 1) for key in _SPLITS)
    return DEVICE == "cpu" or workers <= torch.cuda.device_count()


def on_device(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same settings, with dotted keys, on the device. Skips the test if there are too
    few GPUs."""
    if not is_enough(settings):
        pytest.skip(f"{torch.cuda.device_count()} GPUs are too few for an engine with {settings}")
    return {"model.device": DEVICE, **settings}
