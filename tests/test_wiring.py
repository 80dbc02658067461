"""An object gets what it needs from its constructor or with a call, not from a side channel."""

from __future__ import annotations

import ast

from tests.test_layers import FILES, ROOT

WRITERS = {"clear", "pop", "popitem", "setdefault", "update"}
"""Methods that change a dictionary."""
CONTEXT = "cluster/api/request_context.py"


def scope_writes(source: str) -> list[int]:
    """Returns the lines that change an ASGI scope, or the state of a request."""
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if _writes_scope(node)})


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
    found = {name: lines for name in FILES if (lines := scope_writes((ROOT / name).read_text()))}
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
    assert scope_writes(source) == [2, 3, 4, 5, 6, 7]
