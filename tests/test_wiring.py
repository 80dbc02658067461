"""An object gets what it needs from its constructor or with a call, not from a side channel."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from functools import cache

from tests.test_layers import FILES, ROOT

WRITERS = {"clear", "pop", "popitem", "setdefault", "update"}
"""Methods that change a dictionary."""
CONTEXT = "cluster/api/request_context.py"


def scope_writes(tree: ast.AST) -> list[int]:
    """Returns the lines that change an ASGI scope, or the state of a request."""
    return sorted({node.lineno for node in ast.walk(tree) if _writes_scope(node)})


def _writes_scope(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _is_scope(value)
        case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
            return ast.unparse(value).endswith("request.state")
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            return name in WRITERS and _is_scope(value)
    return False


def _is_scope(value: ast.expr) -> bool:
    while isinstance(value, ast.Subscript):  # scope["state"]["key"]
        value = value.value
    return ast.unparse(value).rpartition(".")[2] == "scope"


def test_only_the_request_context_is_in_the_scope() -> None:
    """The steps of a request share facts in its typed `RequestContext`."""
    found = {name: lines for name, tree in _trees().items() if (lines := scope_writes(tree))}
    assert set(found) == {CONTEXT} and len(found[CONTEXT]) == 1, found


def test_writes_to_a_scope_are_seen() -> None:
    """Otherwise the law would not apply to any of them."""
    source = """
scope["a"] = 1
request.scope["state"]["a"] = 1
scope.setdefault("state", {})["a"] = True
scope["state"].update(a=1)
request.state.a = 1
del self.scope["a"]
other = {**scope, "a": 1}
other["a"] = scope["a"]
request.scope.get("a")
"""
    assert scope_writes(ast.parse(source)) == [2, 3, 4, 5, 6, 7]


# --------------------------------------------------------------------- attributes of other objects

SHARED_STATE = {
    # Class -> why others assign its attributes. It is neither a dataclass nor a struct.
    "PagedAttentionHook": "the step of a model of transformers, whose calls have fixed signatures",
    "RayProcesses": "what the functions that start and stop Ray learn about this start",
    "Request": "one request: the scheduler, the drafter and the KV cache each keep a part of it",
    "_Current": "thread-local: the recording of the current thread",
    "_HeadInput": "the input of a head of transformers, whose calls have fixed signatures",
    "_RecordedMasks": "thread-local: the masks of the current forward pass",
}

OF_LIBRARIES = {
    # Pattern of files -> attributes of objects of libraries.
    "cluster/api/ingress.py": {"redirect_slashes"},
    "cluster/api/server/*": {
        *("disconnected", "waiting_for_100_continue", "expected_content_length", "keep_alive"),
        "chunked_encoding",
    },
    "cluster/text/prompt/control_tokens.py": {"normalizer", "pre_tokenizer", "post_processor"},
    "configs/runtime/log.py": {"propagate"},
    "coordinator/transport/*": {
        *("curve_server", "curve_publickey", "curve_secretkey", "curve_serverkey", "zap_domain"),
        *("handshake_ivl", "maxmsgsize", "linger", "sndhwm", "rcvhwm", "router_handover"),
        *("identity", "heartbeat_ivl", "heartbeat_timeout", "tcp_maxrt", "connect_timeout"),
    },
    "kernels/backends.py": {
        *("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"),
    },
    "kernels/cpu/*": {"argtypes", "restype", "calls", "count"},
    "worker/comm/*": {"rootRank", "asyncOp", "blocking", "_timeout", "_threads", "_devices"},
    "worker/drafting/mtp_model.py": {"num_hidden_layers"},
    "worker/models/*": {
        *("classifier_token_ids", "tie_word_embeddings", "_attn_implementation", "weight"),
    },
    "worker/sharded/state.py": {"data"},
    "worker/worker.py": {"done"},
}

BY_NAME = {
    # File -> the objects of libraries whose attributes it sets by name.
    "cluster/cli/start/ray_processes.py": "functions of Ray, while it starts",
    "kernels/cpu/capture/recording.py": "fields of a C struct",
    "worker/drafting/mtp_model.py": "keys of a config of transformers",
    "worker/models/generic/causal_lm.py": "modules of transformers",
    "worker/models/generic/attention.py": "modules of transformers",
    "worker/models/generic/build.py": "modules of transformers",
    "worker/models/generic/parallel.py": "modules of transformers",
}


@cache
def _trees() -> dict[str, ast.Module]:
    return {name: ast.parse((ROOT / name).read_text(), name) for name in FILES}


@cache
def _classes() -> list[ast.ClassDef]:
    return [one for tree in _trees().values() for one in classes_of(tree)]


def classes_of(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def foreign_writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of each assigned attribute of an object other than `self` or `cls`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and ast.unparse(node.value) not in ("self", "cls")
        ):
            yield node.lineno, node.attr


def writes_by_name(tree: ast.AST) -> list[int]:
    """Returns the lines with `setattr` on an object other than `self`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("setattr", "object.__setattr__")
        and ast.unparse(node.args[0]) != "self"
    ]


_FIXED = ("Callable", "ClassVar")
"""Types of fields that only the class itself may assign."""


def assignable_attributes(classes: Collection[ast.ClassDef], shared: Collection[str]) -> set[str]:
    """Returns the names of attributes that any code may assign: the fields of records, except
    callables, and the attributes of the classes in `shared`. Records are dataclasses and structs
    that are not frozen."""
    by_name = {each.name: each for each in classes}
    names: set[str] = set()
    for each in classes:
        if each.name in shared:
            names |= _declared(each)
        elif _is_record(each, by_name) and not _is_frozen(each, by_name):
            names |= {
                field.target.id
                for field in each.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and not any(kind in ast.unparse(field.annotation) for kind in _FIXED)
            }
    return names


def _declared(one: ast.ClassDef) -> set[str]:
    """Returns the attributes of a class: annotated in its body, or assigned by its methods."""
    annotated = {ast.unparse(each.target) for each in one.body if isinstance(each, ast.AnnAssign)}
    return annotated | {
        node.attr
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def _bases(one: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Returns the bases of a class that are ours."""
    names = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in one.bases)
    return [by_name[name] for name in names if name in by_name and name != one.name]


def _is_record(one: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> bool:
    return (
        any("dataclass" in ast.unparse(decorator) for decorator in one.decorator_list)
        or any(ast.unparse(base).endswith("Struct") for base in one.bases)
        or any(_is_record(base, by_name) for base in _bases(one, by_name))
    )


def _is_frozen(one: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> bool:
    calls = [each for each in one.decorator_list if isinstance(each, ast.Call)]
    keywords = [*one.keywords, *(keyword for call in calls for keyword in call.keywords)]
    frozen = [ast.unparse(each.value) for each in keywords if each.arg == "frozen"]
    if frozen:
        return frozen == ["True"]
    return any(_is_frozen(base, by_name) for base in _bases(one, by_name))


def test_no_object_is_wired_after_its_construction() -> None:
    """An object is complete when its constructor returns. Later changes are methods of its class,
    except for the fields of records and the tables above."""
    allowed = assignable_attributes(_classes(), SHARED_STATE)
    found = [
        f"{name}:{line} assigns .{attribute}"
        for name, tree in _trees().items()
        for line, attribute in foreign_writes(tree)
        if attribute not in allowed | _of_libraries(name)
    ]
    assert found == [], "pass it to the constructor or with the call, or add a method to the class"


def test_attributes_are_set_by_name_only_on_objects_of_libraries() -> None:
    found = {name for name, tree in _trees().items() if writes_by_name(tree)}
    assert found == set(BY_NAME)


def _of_libraries(name: str) -> set[str]:
    rows = (names for pattern, names in OF_LIBRARIES.items() if fnmatch(name, pattern))
    return {attribute for names in rows for attribute in names}


def test_the_exceptions_are_needed() -> None:
    written = {
        name: {attribute for _, attribute in foreign_writes(tree)}
        for name, tree in _trees().items()
    }
    for pattern, attributes in OF_LIBRARIES.items():
        here = {each for name in FILES if fnmatch(name, pattern) for each in written[name]}
        assert attributes <= here, pattern
    everywhere = {attribute for attributes in written.values() for attribute in attributes}
    for shared in SHARED_STATE:
        assert everywhere & assignable_attributes(_classes(), [shared]), shared


def test_wiring_is_seen() -> None:
    """Otherwise the laws would not apply to any assignment."""
    source = """
@dataclass
class Record:
    a: int
    on_a: Callable[[], None] | None = None
@dataclass(frozen=True)
class Value:
    b: int
class Plain:
    def __init__(self):
        self.c = None
class Message(Struct):
    d: int
class Reply(Message, frozen=True):
    e: int
class Kept:
    f: int
    def __init__(self):
        self.g = 1
"""
    tree = ast.parse(source)
    assert assignable_attributes([*classes_of(tree)], ["Kept"]) == {"a", "d", "f", "g"}
    writes = "self.a = 1\nself.x.b = 1\nx.c, y.d = 1, 2\nx.e += 1\ndel x.f\nprint(x.g)\n"
    found = [(2, "b"), (3, "c"), (3, "d"), (4, "e"), (5, "f")]
    assert sorted(foreign_writes(ast.parse(writes))) == found
    named = "setattr(self, n, 1)\nsetattr(x, n, 1)\nobject.__setattr__(x.y, n, 1)\n"
    assert writes_by_name(ast.parse(named)) == [2, 3]
