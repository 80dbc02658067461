"""A compressed body decodes to the same bytes however it is split, and no further than
requested."""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.api.bodies.content_encoding import DECODED_CHUNK_BYTES, MAX_MEMBERS, ZlibDecoder
from swell.cluster.text.errors import BadRequest


def raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


gzipped = partial(gzip.compress, mtime=0)
PACKERS = {"gzip": gzipped, "zlib": zlib.compress, "raw": raw}
CUTS = st.lists(st.integers(0, 400), max_size=6)


def unpacked(name: str, packed: bytes, cuts: list[int]) -> bytes:
    reader = ZlibDecoder("gzip" if name == "gzip" else "deflate")
    places = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    parts = [packed[start:end] for start, end in pairwise(places)]
    data = b"".join(piece for part in parts for piece in reader.pieces(part))
    reader.end()
    return data


@pytest.mark.parametrize("name", PACKERS)
@given(st.binary(max_size=300) | st.integers(0, 3 * DECODED_CHUNK_BYTES).map(bytes), CUTS)
def test_every_split_decodes_to_the_same_body(name: str, data: bytes, cuts: list[int]) -> None:
    assert unpacked(name, PACKERS[name](data), cuts) == data


@pytest.mark.parametrize("name", PACKERS)
@given(st.binary(max_size=100), CUTS, st.integers(1, 100))
def test_a_truncated_body_is_detected(
    name: str, data: bytes, cuts: list[int], missing: int
) -> None:
    packed = PACKERS[name](data)
    with pytest.raises(BadRequest):
        unpacked(name, packed[: max(0, len(packed) - missing)], cuts)


@pytest.mark.parametrize("name", PACKERS)
def test_nothing_beyond_the_limit_is_decompressed(name: str) -> None:
    pieces = ZlibDecoder("gzip" if name == "gzip" else "deflate").pieces(
        PACKERS[name](bytes(10**8))
    )
    assert [len(next(pieces)) for _ in range(3)] == [DECODED_CHUNK_BYTES] * 3


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), CUTS)
def test_several_members_are_one_body(bodies: list[bytes], cuts: list[int]) -> None:
    """RFC 1952, 2.2: a gzip file is a sequence of members."""
    assert unpacked("gzip", b"".join(map(gzipped, bodies)), cuts) == b"".join(bodies)


@pytest.mark.parametrize("rest", [b"\0", b"x", b"\x1f", b"\x1f\x8b", gzipped(b"b")[:-1]])
@given(cuts=CUTS)
def test_garbage_after_a_member_is_refused(rest: bytes, cuts: list[int]) -> None:
    with pytest.raises(BadRequest):
        unpacked("gzip", gzipped(b"a") + rest, cuts)


@pytest.mark.parametrize("name", ["zlib", "raw"])
@given(cuts=CUTS)
def test_a_deflated_body_has_one_part(name: str, cuts: list[int]) -> None:
    with pytest.raises(BadRequest):
        unpacked(name, PACKERS[name](b"a") + PACKERS[name](b"b"), cuts)


def test_empty_members_are_counted() -> None:
    nothing = gzipped(b"")
    assert unpacked("gzip", nothing * MAX_MEMBERS, []) == b""
    with pytest.raises(BadRequest, match="members"):
        unpacked("gzip", nothing * (MAX_MEMBERS + 1), [])
