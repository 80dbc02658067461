"""The device on which tests of whole engines compute: the CPU, or with SWELL_TEST_DEVICE=cuda the
GPU (`make test-gpu`)."""

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
    """Whether there is a device for each worker of one engine."""
    workers = math.prod(settings.get(key, 1) for key in _SPLITS)
    return DEVICE == "cpu" or workers <= torch.cuda.device_count()


def on_device(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, by their keys with dots, on the device. Skips the test if it has too few
    GPUs."""
    if not is_enough(settings):
        pytest.skip(f"{torch.cuda.device_count()} GPUs are too few for an engine with {settings}")
    return {"model.device": DEVICE, **settings}
