"""Fixtures that several test files of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worker import tiny_models
from tests.worker.fixed_graphs import fixed_graphs
from tests.worker.moe.matched_operations import matched_operations
from tests.worker.moe.moe_engines import PROMPTS, greedy

__all__ = ["fixed_graphs", "matched_operations"]


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function: family -> (its folder, the greedy answers of transformers to PROMPTS);
    each is made once."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            oracle = tiny_models.make(folder, family)
            made[family] = (folder, [greedy(oracle, prompt) for prompt in PROMPTS])
            assert len({tuple(answer) for answer in made[family][1]}) == len(PROMPTS)
        return made[family]

    return get
