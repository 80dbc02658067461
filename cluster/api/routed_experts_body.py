"""The experts that computed the tokens of an answer, as a client gets them. Not OpenAI's."""

from __future__ import annotations

from base64 import b64encode

from msgspec import UNSET, UnsetType

from swell.cluster.api.protocol_base import Body
from swell.cluster.client.routed_experts import RoutedExpertsTable


class RoutedExpertsBody(Body, kw_only=True):
    """An array of the tokens of prompt and answer but the last, which no expert has computed."""

    shape: list[int]
    """Tokens, layers that have experts, experts of a token in a layer: best first."""
    layers: list[int]
    """The numbers of these layers in the model."""
    dtype: str
    """uint8, or int16, little-endian."""
    data: str
    """The array, row by row, in base64."""


def routed_experts_body(table: RoutedExpertsTable | None) -> RoutedExpertsBody | UnsetType:
    if table is None:
        return UNSET
    return RoutedExpertsBody(
        shape=[table.num_tokens, len(table.layers), table.top_k],
        layers=table.layers,
        dtype="int16" if table.wide else "uint8",
        data=b64encode(table.data).decode(),
    )
