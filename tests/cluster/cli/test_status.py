"""`swell status` prints all that operators are told of what is wrong."""

from __future__ import annotations

import itertools
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.cli import admin_commands
from swell.cluster.cli.main import main

TEXTS = ("error", "reason")
NUMBERS = ("failures", "next_try_s")
UNIQUE = itertools.count(1001)
BESIDE = {"autoscaling.last_decision.reason"}
"""What has been decided lately is in `GET /admin/cluster` alone."""


def troubled(kind: type, path: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """A body in which everything is wrong that can be, and what must be read of it, by its
    path."""
    body: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        place = f"{path}{field.name}"
        hint = get_type_hints(kind)[field.name]
        kinds = [hint, *get_args(hint)]
        struct = next((each for each in kinds if msgspec.inspect.is_struct_type(each)), None)
        if struct is not None:
            inner, texts = troubled(struct, f"{place}.")
            body[field.name] = inner if list not in map(origin, kinds) else [inner]
            shown |= texts
        elif field.name in TEXTS:
            body[field.name] = shown[place] = f"trouble of {place}"
        elif field.name in NUMBERS:
            body[field.name] = next(UNIQUE)
            shown[place] = str(body[field.name])
        elif field.required:
            body[field.name] = example(hint)
    return body, shown


def origin(hint: Any) -> Any:
    return getattr(hint, "__origin__", None)


def example(hint: Any) -> Any:
    return {int: 1, float: 1.0, str: "name", bool: True}.get(hint, [])


def test_every_error_and_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, shown = troubled(ClusterState)
    state = msgspec.convert(body, ClusterState)

    class Fake:
        def __init__(self, *_args: object) -> None: ...

        async def get(self, *_args: object) -> ClusterState:
            return state

    monkeypatch.setattr(admin_commands, "Client", Fake)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert len(shown) > 7, shown
    assert {place for place, text in shown.items() if text not in out} - BESIDE == set()
