"""Frames omit the default values at the end of a message, and every reader restores them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.transport.codec import FrameDecoder, encode
from swell.engine.wire import EngineAnswer, EngineCoreOutputs, EngineCoreRequest, EngineMessage
from swell.worker.sampler_wire import PoolingParams, SamplerParams

_OF_TYPE: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    msgspec.Raw: st.integers(0, 9).map(lambda i: msgspec.Raw(msgspec.msgpack.encode(i))),
}


def _values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for values of a field's type."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _OF_TYPE:
        return _OF_TYPE[kind]
    if origin is Annotated:
        return _values_of(args[0])
    if origin in (Union, types.UnionType):
        return st.one_of([_values_of(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(_values_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_values_of(args[0]), _values_of(args[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    return _structs_of(kind)


def _structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Returns a strategy for values of a Struct, in which many fields have their default value."""
    fields = msgspec.structs.fields(kind)
    required = {field.name: _values_of(field.type) for field in fields if field.required}
    optional = {field.name: _values_of(field.type) for field in fields if not field.required}
    given_fields = st.fixed_dictionaries(required, optional=optional)
    return given_fields.map(lambda values: kind(**values))


def elements(message: Any) -> list[Any]:
    """Returns the frame of a message as a reader without types decodes it."""
    decoded: list[Any] = msgspec.msgpack.decode(encode(message))
    return decoded


@given(message=_structs_of(EngineCoreRequest))
def test_decoded_requests_equal_the_sent_ones(message: EngineCoreRequest) -> None:
    decoder: FrameDecoder[Any] = FrameDecoder(EngineMessage)
    assert decoder.decode(encode(message)) == message
    whole = msgspec.msgpack.encode(message)
    assert decoder.decode(whole) == message, "of a sender that leaves nothing out"
    assert len(encode(message)) <= len(whole)


@given(message=_structs_of(EngineCoreOutputs))
def test_decoded_outputs_equal_the_sent_ones(message: EngineCoreOutputs) -> None:
    assert FrameDecoder[Any](EngineAnswer).decode(encode(message)) == message


def test_a_minimal_request_has_only_its_required_fields() -> None:
    assert elements(EngineCoreRequest("r", [5, 6], SamplerParams(), 16)) == [0, "r", [5, 6], [], 16]


def test_fields_after_the_last_non_default_one_are_omitted() -> None:
    sampler = SamplerParams(top_p=0.9, pooling=PoolingParams(dimensions=8))
    request = EngineCoreRequest("r", [5], sampler, 16, priority=3)
    pooling = [0, 8]
    in_sampler = [0.0, 0, 0.9, 0.0, 0, 1.0, 0.0, 0.0, {}, [], [], None, None, None, pooling]
    assert elements(request) == [0, "r", [5], in_sampler, 16, 0, [], [], [], 3]


def test_list_elements_are_encoded_with_all_fields() -> None:
    class Several(msgspec.Struct, array_like=True, omit_defaults=True):
        items: list[SamplerParams]
        name: str = ""

    ((item,),) = elements(Several([SamplerParams()]))
    assert len(item) == len(SamplerParams.__struct_fields__)


def test_other_structs_and_plain_values_are_encoded_completely() -> None:
    class Whole(msgspec.Struct, array_like=True, tag=7):
        number: int = 0

    class ByName(msgspec.Struct, omit_defaults=True):
        number: int = 0

    for value in (Whole(), ByName(), ByName(5), [1, 2], "text", msgspec.Raw(b"\x05")):
        assert encode(value) == msgspec.msgpack.encode(value)


class _Older(msgspec.Struct, array_like=True, omit_defaults=True, tag=0):
    name: str
    count: int = 1


class _Newer(msgspec.Struct, array_like=True, omit_defaults=True, tag=0):
    name: str
    count: int = 1
    words: list[str] = []


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (_Newer("a", 2, ["w"]), _Older("a", 2)),
        (_Newer("a", 1, ["w"]), _Older("a")),
        (_Newer("a"), _Older("a")),
        (_Older("a", 2), _Newer("a", 2)),
        (_Older("a"), _Newer("a")),
    ],
)
def test_older_and_newer_builds_read_each_other(sent: Any, read: Any) -> None:
    assert FrameDecoder[Any](type(read)).decode(encode(sent)) == read


def test_defaults_of_another_but_equal_type_are_omitted() -> None:
    """A default that is given as an equal value of another type is omitted: the reader decodes a
    temperature of 0 as 0.0."""
    assert elements(SamplerParams(temperature=0, seed=0, top_p=1)) == []
