"""Functions whose first call must not be made by several threads at once; torch's headers list
them."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from swell.configs.schema import Config, ModelConfig
from swell.worker import mkl_functions, worker

pytestmark = pytest.mark.slow

SOURCE = Path(torch.__path__[0]) / "include" / "ATen" / "cpu" / "vml.h"
OF_MKL = re.compile(r"^IMPLEMENT_VML_MKL\((\w+),", re.MULTILINE)


def test_the_functions_are_those_that_torch_leaves_to_mkl() -> None:
    assert SOURCE.exists(), "torch has moved its header: which functions does MKL compute now?"
    names = OF_MKL.findall(SOURCE.read_text())
    assert sorted(function.__name__ for function in mkl_functions.FUNCTIONS) == sorted(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_function_is_called_by_one_thread(dtype: torch.dtype) -> None:
    called = []

    def watched(function):
        def call(number: torch.Tensor) -> torch.Tensor:
            called.append((function, number.dtype, number.numel()))
            return function(number)

        return call

    watching = tuple(watched(function) for function in mkl_functions.FUNCTIONS)
    with patch.object(mkl_functions, "FUNCTIONS", watching):
        mkl_functions.initialize_vector_math()
    # A single number is not divided among threads.
    assert [(function, dtype, 1) for function in mkl_functions.FUNCTIONS] == [
        call for call in called if call[1] == dtype
    ]


def test_vector_math_is_initialized_before_a_worker_computes() -> None:
    class Settled(Exception):
        pass

    def settle() -> None:
        raise Settled

    with (
        patch.object(worker, "initialize_vector_math", settle),
        patch.object(worker, "device_of", side_effect=AssertionError("came first")),
        pytest.raises(Settled),
    ):
        worker.Worker(Config(model=ModelConfig(path="anything")))
