"""The given settings are exactly what a user has written in a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.configs.schema import ConfigError, given_settings, load

OVERRIDES = st.dictionaries(
    st.sampled_from(["serve.port", "scheduler.max_rows", "cluster.max_engines"]),
    st.integers(1, 60_000),
)


@given(OVERRIDES)
def test_explicit_settings_load_equally_and_have_only_the_set_keys(
    overrides: dict[str, Any],
) -> None:
    found = given_settings("owner/name", overrides)
    assert load(found) == load("owner/name", overrides)
    keys = {f"{section}.{key}" for section, keys in found.items() for key in keys}
    assert keys == {"model.path", *overrides}


def test_relative_paths_of_a_file_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "a.yaml").write_text("model: {path: model}\ndrafts: {model: {path: model}}\n")
    found = given_settings(str(tmp_path / "a.yaml"), {"drafts.method": "model"})
    assert found["model"] == {"path": str(tmp_path / "model")}
    assert set(found["drafts"]) == {"model", "method"}
    assert load(found).drafts.model.path == str(tmp_path / "model")  # type: ignore[union-attr]


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_row"):
        given_settings("owner/name", {"scheduler.max_row": 3})
