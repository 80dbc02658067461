"""No text into which a class is converted contains a secret. The classes are found by the types of
their fields. Fields with the name of a secret must have such a type, so a new one cannot be
forgotten."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatch
from functools import cache
from typing import Any

import msgspec
import pytest

from swell.configs.runtime.secret import (
    HIDDEN,
    HoldsSecrets,
    SecretBytes,
    SecretText,
    secret_fields,
)
from tests.support.untrusted.secret_texts import (
    SECRET_TYPES,
    Holder,
    annotated_nodes,
    holders,
    sample_dataclass,
    sample_struct,
    shows,
    texts_of,
)
from tests.test_layers import FILES

SECRET = b"Kq9vX2mZ7pLw4RtY8sNb" * 2
NAMED = re.compile(r"(^|_)(secrets?|salts?|passwords?|passwd|api_keys?|credentials?|private)(_|$)")
NAMED_BYTES = re.compile(r"(^|_)(keys?|tokens?|hash(es)?|digests?)(_|$)")
"""Names of secrets if the value is bytes. A text called `key` is a name, and integer tokens are not
secret."""
NO_SECRETS: dict[tuple[str, str], str] = {
    # (file, name of the field or parameter) -> why it is not a secret.
    ("*", "cache_salt"): "of a request, which is shown with it or not at all",
    ("cluster/client/routing/router.py", "salt"): "the same",
    ("cluster/client/routing/prefix_index.py", "salt"): "the same",
    ("engine/kv/block_hash.py", "salt"): "the same",
    ("*", "block_hashes"): "of a prefix: an index alone has them",
    ("engine/kv/*.py", "block_hash"): "the same",
    ("engine/kv/block_hash.py", "hashes"): "the same",
    ("engine/kv/block_pool.py", "_block_hashes"): "the same",
    ("cluster/client/*.py", "key"): "of a conversation, on a ring of hashes",
    ("cluster/control/*.py", "key"): "of an entry in Ray's GCS",
    ("cluster/text/schema/strict_json.py", "token"): "a part of a text",
    ("cluster/api/store/session_store.py", "tokens"): "ids of tokens",
    ("coordinator/transport/authenticator.py", "public_key"): "what it says",
}


@cache
def annotations() -> dict[str, list[tuple[str, str]]]:
    """Returns name and type of all fields and parameters of each file."""
    return {file: [part for _, parts in annotated_nodes(file) for part in parts] for file in FILES}


def named_as_secrets() -> list[tuple[str, str, str]]:
    """Returns (file, name, type) of fields and parameters that are named like secrets."""
    found = []
    for file in FILES:
        for name, kind in annotations()[file]:
            is_text = re.search(r"\b(str|bytes)\b", kind) is not None
            is_bytes = re.search(r"\bbytes\b", kind) is not None
            if (is_text and NAMED.search(name)) or (is_bytes and NAMED_BYTES.search(name)):
                found.append((file, name, kind))
    return found


def test_fields_named_like_secrets_have_a_secret_type() -> None:
    unknown = [
        one
        for one in named_as_secrets()
        if not any(fnmatch(one[0], file) and fnmatch(one[1], name) for file, name in NO_SECRETS)
    ]
    assert unknown == [], "write SecretBytes or SecretText, or say in NO_SECRETS why it is none"


def test_each_exception_is_needed() -> None:
    found = named_as_secrets()
    for file, name in NO_SECRETS:
        assert any(fnmatch(one[0], file) and fnmatch(one[1], name) for one in found), (file, name)


def test_the_known_holders_are_found() -> None:
    """Otherwise the search would miss other holders too."""
    found = {one.name for one in holders()}
    assert found >= {
        *("ChannelKeys", "CoordinatorContact", "CoordinatorEndpoint", "GroupPlan", "GroupSecret"),
        *("Regroup", "Authenticator", "Inbox", "ApiKeys", "Read", "Begin", "HeartbeatReply"),
        *("HostRequest", "LinkListeners", "Client"),
    }


@pytest.mark.parametrize("holder", holders(), ids=lambda holder: f"{holder.file}:{holder.name}")
def test_no_text_of_a_holder_shows_its_secret(holder: Holder) -> None:
    kind: Any = holder.kind
    assert not issubclass(kind, BaseException), "its message would have what it is given"
    if issubclass(kind, msgspec.Struct):
        assert not secret_fields(kind) or issubclass(kind, HoldsSecrets)
        value = sample_struct(kind, SECRET)
    elif dataclasses.is_dataclass(kind):
        value = sample_dataclass(kind, SECRET)
    else:
        assert not issubclass(kind, tuple), "the text of a tuple has all of it"
        for name in ("__repr__", "__str__", "__format__"):
            assert getattr(kind, name) is getattr(object, name), f"{kind} has a text of its own"
        return
    for way, text in texts_of(value):
        assert not shows(text, SECRET), f"{way}: {text[:300]}"


def test_structs_with_secrets_are_checked() -> None:
    """Structs are found by their runtime types, which shows that SECRET_TYPES is complete."""
    known = {one.name for one in holders()}
    for file in FILES:
        source = " ".join(kind for _, kind in annotations()[file])
        assert set(re.findall(r"\w*(?:Secret(?:Bytes|Text)|TableKey)\b", source)) <= (SECRET_TYPES)
    aliases = {
        name
        for file in FILES
        for name in re.findall(r"^(\w+) = Secret(?:Bytes|Text)$", _source(file), re.MULTILINE)
    }
    assert aliases | {"SecretBytes", "SecretText"} == SECRET_TYPES
    assert {kind.__name__ for kind in _subclasses(HoldsSecrets) if _is_ours(kind)} <= known


def _source(file: str) -> str:
    from tests.test_layers import ROOT

    return (ROOT / file).read_text()


def _subclasses(kind: type) -> list[type]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_subclasses(sub))]


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("swell.")


# ------------------------------------------------------------------------- the base class


class Inner(HoldsSecrets, frozen=True):
    name: str
    key: SecretBytes
    other: SecretText | None = None
    many: list[SecretText] = []


class Open(msgspec.Struct):
    key: SecretBytes


class Outer(msgspec.Struct):
    inner: Inner


def test_a_struct_hides_only_its_secret_fields() -> None:
    value = Inner("n", SECRET, SECRET.decode(), [SECRET.decode()])
    assert repr(value) == f"Inner(name='n', key={HIDDEN}, other={HIDDEN}, many={HIDDEN})"
    assert not any(shows(text, SECRET) for _, text in texts_of(Outer(value)))
    assert value == Inner("n", SECRET, SECRET.decode(), [SECRET.decode()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Inner) == value


@pytest.mark.parametrize("way", [name for name, _ in texts_of(0)])
def test_a_text_with_a_secret_is_noticed(way: str) -> None:
    """Each way of printing reveals the secret if the base class is missing."""
    assert shows(dict(texts_of(Open(SECRET)))[way], SECRET)
