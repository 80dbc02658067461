"""The experts that computed the tokens of an answer, as clients receive them. Not part of OpenAI's
API."""

from __future__ import annotations

from base64 import b64encode

from msgspec import UNSET, UnsetType

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.client.requests.routed_experts import RoutedExpertsTable


class RoutedExpertsBody(Body, kw_only=True):
    """An array over the tokens of the prompt and the answer, except the last token, which has not
    passed through the model."""

    shape: list[int]
    """Number of tokens, of layers with experts, and of experts for each token in a layer (best
    first)."""
    layers: list[int]
    """The indices of these layers in the model."""
    dtype: str
    """"uint8", or "int16" (little-endian)."""
    data: str
    """The array in row-major order, in base64."""


def routed_experts_body(table: RoutedExpertsTable | None) -> RoutedExpertsBody | UnsetType:
    if table is None:
        return UNSET
    return RoutedExpertsBody(
        shape=[table.num_tokens, len(table.layers), table.top_k],
        layers=table.layers,
        dtype="int16" if table.wide else "uint8",
        data=b64encode(table.data).decode(),
    )
