"""Lists the served models in the format of Anthropic's API: `GET /v1/models` with the header
`anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from swell.cluster.text.errors import BadRequest, bad_value
from swell.configs.error_text import shown

ANTHROPIC_VERSION = "anthropic-version"
"""The header that every request of Anthropic's clients has."""
QUERY = ("after_id", "before_id", "limit")
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000
_OLDEST, _NEWEST = 0, 253_402_300_799
"""The times, in seconds since 1970, whose year has four digits."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "model"
    id: str
    display_name: str
    created_at: str
    """RFC 3339, in UTC."""
    lifecycle: str = "active"
    max_input_tokens: int


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(name: str, created_s: int, max_model_len: int) -> ModelInfo:
    created = datetime.fromtimestamp(min(max(created_s, _OLDEST), _NEWEST), UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=f"{created:%Y-%m-%dT%H:%M:%SZ}",
        max_input_tokens=max_model_len,
    )


def model_page(models: Sequence[ModelInfo], query: Mapping[str, str]) -> ModelPage:
    """Returns the models after `after_id` or before `before_id`, at most `limit`. Raises
    `BadRequest`."""
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise BadRequest("after_id and before_id are both given; send one of them", "before_id")
    if before is not None:
        earlier = models[: _place(models, "before_id", before)]
        page, has_more = earlier[-limit:], len(earlier) > limit
    else:
        later = models if after is None else models[_place(models, "after_id", after) + 1 :]
        page, has_more = later[:limit], len(later) > limit
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ModelPage(data=list(page), has_more=has_more, first_id=first, last_id=last)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MAX_LIMIT):
        raise BadRequest(f"limit={shown(text)} must be between 1 and {_MAX_LIMIT}", "limit")
    return int(text)


def _place(models: Sequence[ModelInfo], name: str, id: str) -> int:
    for place, model in enumerate(models):
        if model.id == id:
            return place
    raise bad_value(name, id, "is not a model of this server; see GET /v1/models")
