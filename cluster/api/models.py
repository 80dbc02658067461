"""`/v1/models`."""

from __future__ import annotations

from swell.cluster.api.protocol_base import Body


class ModelCard(Body, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "swell"
    root: str | None = None
    """Its own name: there are no adapters, and the folder is the operator's business."""
    parent: str | None = None
    max_model_len: int


class ModelList(Body, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
