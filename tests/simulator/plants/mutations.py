"""Small changes of a function's code, such as a negated condition or a statement that is left
out."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

_SWAPPED: dict[type[ast.AST], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_EMPTY = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "frozenset": "frozenset()"}
_EMPTY |= {"bool": "False", "int": "0", "float": "0.0", "RankedCommands": "[]"}
_NOT_RUN = {"annotation", "returns", "decorator_list", "args", "type_comment"}
"""Fields of nodes that are not executed when a function runs, except `args` of a call."""

Path = tuple[tuple[str, int | None], ...]
"""The fields, with indexes in lists, that lead from a function's node to another node."""
Change = tuple[Any, str]
"""The replacement of a node (None: it is removed from its list), and a description."""


@dataclass(frozen=True, eq=False)
class Code:
    """The source of a module."""

    file: str
    tree: ast.Module

    @staticmethod
    @functools.cache
    def of(module: ModuleType) -> Code:
        assert module.__file__ is not None
        return Code(module.__file__, ast.parse(inspect.getsource(module)))

    def compile(self, tree: ast.Module) -> CodeType:
        tree = ast.fix_missing_locations(tree)
        code: CodeType = compile(tree, self.file, "exec", dont_inherit=True)
        return code


@dataclass(frozen=True, eq=False)
class Site:
    """One change of one function."""

    code: Code
    qualname: str
    path: Path
    new: Any
    """The replacement of the node at `path`; None: the node is removed from its list."""
    what: str
    lines: tuple[int, ...]
    """First lines of statements: a run that executes the changed node executes one of them."""

    def compile(self) -> CodeType:
        """Returns the code of the changed function."""
        tree = copy.deepcopy(self.code.tree)
        holder: Any = _definition(tree, self.qualname)
        for name, index in self.path[:-1]:
            holder = getattr(holder, name)
            holder = holder if index is None else holder[index]
        field, index = self.path[-1]
        new = copy.deepcopy(self.new)
        if index is None:
            setattr(holder, field, new)
        elif new is None:
            del getattr(holder, field)[index]
        else:
            getattr(holder, field)[index] = new
        return find_code(self.code.compile(tree), self.qualname)


def find_code(code: CodeType, qualname: str) -> CodeType:
    """Returns the code of a function or method inside the code of its module. If several have this
    name, the last one counts."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    for each in reversed(inner):
        if each.co_qualname == qualname:
            return each
        if qualname.startswith(f"{each.co_qualname}."):
            return find_code(each, qualname)
    raise LookupError(f"no function {qualname}")


def _definition(tree: ast.Module, qualname: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node: Any = tree
    for name in qualname.split("."):
        [*_, node] = [each for each in node.body if getattr(each, "name", None) == name]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


# -------------------------------------------------------------------- executed statements


class _Instrumenter(ast.NodeTransformer):
    """Inserts a call of `__reached__` before each statement of a function."""

    def __init__(self, file: str) -> None:
        self._file = file

    def instrument(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        definition.body = self._statements(definition.body)

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            parts: list[ast.expr] = [ast.Constant(self._file), ast.Constant(statement.lineno)]
            where = ast.Tuple(parts, ast.Load())
            call = ast.Call(ast.Name("__reached__", ast.Load()), [where], [])
            if not isinstance(statement, ast.Nonlocal | ast.Global):
                found.append(ast.copy_location(ast.Expr(call), statement))
            found.append(self.visit(statement))
        return found

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, field, self._statements(body))
        for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self.generic_visit(each)
        return node


@functools.cache
def instrumented(module: ModuleType) -> CodeType:
    """Returns code of the module whose functions pass the file and line of each statement that they
    execute to `__reached__`."""
    code = Code.of(module)
    tree = copy.deepcopy(code.tree)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for body in (tree.body, *(owner.body for owner in classes)):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _Instrumenter(code.file).instrument(node)
    return code.compile(tree)


# -------------------------------------------------------------------- changes


def sites(code: Code, function: FunctionType) -> Iterator[Site]:
    """Yields all changes of a function; none of one that calls `super`, whose code needs its
    class."""
    if function.__code__.co_freevars:
        return
    qualname = function.__qualname__
    definition = _definition(code.tree, qualname)
    body = definition.body
    has_docstring = ast.get_docstring(definition) is not None
    everything = tuple(each.lineno for each in body[has_docstring:])
    for new, what in _of_whole(definition):
        yield Site(code, qualname, (("body", None),), new, what, everything)
    for index, statement in enumerate(body):
        for path, node, lines in _nodes(statement, (("body", index),), ()):
            for new, what in _changes(node, path[-1][1] is not None):
                text = f"line {getattr(node, 'lineno', lines[0])}: {what}"
                yield Site(code, qualname, path, new, text, lines)


def _of_whole(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Change]:
    """Yields bodies that do nothing, or return nothing, or return an argument unchanged."""
    returned = ast.unparse(definition.returns) if definition.returns is not None else "None"
    has_yield = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(definition))
    if has_yield or definition.name.startswith("__"):
        return
    results = []
    if returned == "None" or returned.endswith("| None"):
        results.append("None")
    results += [_EMPTY[base] for base in [returned.partition("[")[0]] if base in _EMPTY]
    results += ["True"] if returned == "bool" else []
    arguments = [a for a in definition.args.args if a.annotation is not None]
    same = [a.arg for a in arguments if a.annotation and ast.unparse(a.annotation) == returned]
    for result in (*results, *same[:1]):
        yield ast.parse(f"return {result}").body, f"it only returns {result}"


def _nodes(
    node: ast.AST, path: Path, lines: tuple[int, ...]
) -> Iterator[tuple[Path, Any, tuple[int, ...]]]:
    """Yields the nodes of a statement that decide or do something."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_log(node):
        return
    if isinstance(node, ast.stmt):
        lines = (node.lineno,)
    yield path, node, lines
    for field, value in ast.iter_fields(node):
        if field in _NOT_RUN and not isinstance(node, ast.Call):
            continue
        if isinstance(value, ast.AST):
            yield from _nodes(value, (*path, (field, None)), lines)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _nodes(each, (*path, (field, index)), lines)


def _is_log(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return ast.unparse(node.value).startswith("self._log.")


def _changes(node: Any, in_list: bool) -> Iterator[Change]:
    text = ast.unparse(node) if isinstance(node, ast.stmt | ast.expr) else ""
    text, new = text.partition("\n")[0], node
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in _SWAPPED:
            new = ast.Compare(left, [_SWAPPED[type(op)]()], right)
            yield new, f"{text} -> {ast.unparse(new)}"
        case ast.BoolOp(op=op, values=values):
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                new = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                yield new, f"{text} -> {ast.unparse(new)}"
        case ast.If(test=test) | ast.IfExp(test=test):
            for result in (True, False):
                new = copy.copy(node)
                new.test = ast.Constant(result)
                yield new, f"{text}: condition -> {result}"
            if isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.BoolOp):
                new = copy.copy(node)
                new.test = ast.UnaryOp(ast.Not(), test)
                yield new, f"{text}: condition negated"
        case ast.comprehension(ifs=[_, *_]):
            new = copy.copy(node)
            new.ifs = []
            yield new, f"without if {ast.unparse(node.ifs[0])}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand, f"{text} -> {ast.unparse(operand)}"
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value), f"{value} -> {not value}"
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1), f"{value} -> {value + 1}"
        case ast.BinOp(left=left, op=op, right=right):
            yield left, f"{text} -> {ast.unparse(left)}"
            if isinstance(op, ast.Add | ast.BitOr | ast.BitAnd | ast.Mult):
                yield right, f"{text} -> {ast.unparse(right)}"
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_NAMES:
            new = copy.copy(node)
            new.func = ast.Name(_OTHER_NAMES[name], ast.Load())
            yield new, f"{text} -> {ast.unparse(new)}"
        case ast.Call(args=[_, _, *_] as given):
            for index, (first, second) in enumerate(pairwise(given)):
                if ast.dump(first) != ast.dump(second):
                    new = copy.copy(node)
                    new.args = [*given[:index], second, first, *given[index + 2 :]]
                    yield new, f"{text} -> {ast.unparse(new)}"
        case ast.Tuple(elts=[_, _, *_] as parts, ctx=ast.Load()):
            for index in range(len(parts)):
                new = ast.Tuple([*parts[:index], *parts[index + 1 :]], ast.Load())
                yield new, f"{text} -> {ast.unparse(new)}"
        case ast.Continue():
            yield ast.Pass(), "without continue"
        case ast.keyword(arg=str(name)) if in_list:
            yield None, f"without {name}={ast.unparse(node.value)}"
        case ast.Expr(value=value):
            yield ast.Pass(), f"without {text}"
        case ast.AugAssign() | ast.Delete():
            yield ast.Pass(), f"without {text}"
        case ast.Assign(targets=[target]) if _is_kept(target):
            yield ast.Pass(), f"without {text}"


def _is_kept(target: ast.expr) -> bool:
    """Returns whether an assignment sets no local variable."""
    match target:
        case ast.Attribute() | ast.Subscript():
            return True
        case ast.Tuple(elts=targets):
            return all(map(_is_kept, targets))
    return False
