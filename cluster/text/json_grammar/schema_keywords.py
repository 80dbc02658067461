"""Handles keywords of a JSON schema that grammars do not support.

Keywords that constrain nothing, such as `uniqueItems: false`, are removed. Keywords that another
keyword can express are converted to it, such as `unevaluatedProperties: false` where nothing else
adds properties. Every other unsupported keyword of the standard that constrains a value is refused
with its path or, with `serve.schema_keywords: ignore`, removed and reported. Keywords and formats
outside the standard are annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swell.cluster.text.json_grammar.ecma_patterns import (
    InvalidPattern,
    UnenforcedPattern,
    library_pattern,
)
from swell.cluster.text.json_grammar.evaluated_properties import (
    EvaluatedProperties,
    evaluated_properties,
)
from swell.cluster.text.json_grammar.schema_nodes import (
    DEFINITIONS,
    SCHEMA_KEYS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    References,
    Schema,
    SchemaError,
    at,
    checked,
    children,
    listed,
    mapped,
    shown_value,
)
from swell.cluster.text.json_grammar.schema_values import bounds, check_values
from swell.cluster.text.json_grammar.string_patterns import (
    fixed_texts,
    looks_around,
    search_expression,
    split_lookahead,
)
from swell.cluster.text.json_types import JsonObject, JsonSchema, JsonValue

MAX_SCHEMA_DEPTH = 100
"""Limit on nested levels of schemas, not counted across references."""
MAX_NODES = 50_000
"""Limit on the schemas in a schema: 256 KiB hold no more."""

FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    )
)
"""Formats that are enforced; every other one is an annotation."""

_COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"))
"""Keywords that may add properties and items to those that a schema names itself."""


class SchemaKeywords:
    """Converts the schemas of one request."""

    def __init__(self, *, ignore: bool = False) -> None:
        """`ignore` is True if `serve.schema_keywords` is `ignore`."""
        self.ignored: dict[str, None] = {}
        """Paths of the keywords that were removed."""
        self._prefix = ""
        self._ignore = ignore
        self._num_nodes = 0
        self._references = References({})

    def clean(self, schema: JsonSchema, prefix: str = "") -> JsonSchema:
        """Returns the schema in keywords that grammars support, without unused definitions.
        `prefix` is the path of the schema, for `ignored`. Raises SchemaError for a schema that no
        grammar can enforce."""
        self._prefix, self._num_nodes = prefix, 0
        references = self._references = References(schema)
        root = self._node(schema, "", 0)
        if root is False:
            raise SchemaError("is a schema that no answer can match")
        cleaned: JsonSchema = {} if root is True else root
        return self._with_definitions(cleaned, schema, references)

    def _with_definitions(
        self, cleaned: JsonSchema, schema: JsonSchema, references: References
    ) -> JsonSchema:
        """Adds the cleaned definitions that are referred to, directly or indirectly."""
        cleaned = {key: value for key, value in cleaned.items() if key not in DEFINITIONS}
        found: dict[str, JsonSchema] = {}
        level: list[tuple[str, Any]] = [("", cleaned)]
        while level:
            path, node = level.pop()
            if not isinstance(node, dict):
                continue
            level += children(node, path)
            for key in DEFINITIONS if path else ():
                level += [(at(at(path, key), name), one) for name, one in node.get(key, {}).items()]
            if "$ref" not in node:
                continue
            steps, target = references.resolve(node["$ref"], at(path, "$ref"))
            key, name = _definition(steps)
            if key and name not in found.setdefault(key, {}):
                raw = target if name.startswith("#") else schema[key][name]
                found[key][name] = self._node(raw, at(key, name), 0)
                level.append((at(key, name), found[key][name]))
        return {**cleaned, **found}

    def _node(self, schema: Any, path: str, depth: int) -> Schema:
        node = checked(schema, path)
        if isinstance(node, bool):
            return node
        self._num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH or self._num_nodes > MAX_NODES:
            raise SchemaError(
                f"contains more than {MAX_SCHEMA_DEPTH} levels or {MAX_NODES} schemas"
            )
        if depth and "$id" in node and "'$ref'" in repr(node):
            raise SchemaError(f"has {at(path, '$id')} in a part with references; leave out the $id")
        cleaned = dict(node)
        for keyword in sorted(_RULES.keys() & node.keys(), key=_ORDER.__getitem__):
            if keyword in _CONCERNED and _CONCERNED[keyword] not in _kinds(node):
                cleaned = _without(cleaned, keyword)
                continue
            rest = _RULES[keyword](self, cleaned, path)
            if rest is None:
                return False
            cleaned = rest
        try:
            check_values(cleaned)
        except SchemaError as error:
            raise SchemaError(f"at {path} {error}" if path else str(error)) from None
        return self._parts(cleaned, path, depth + 1)

    def _parts(self, node: JsonSchema, path: str, depth: int) -> JsonSchema:
        for key in SCHEMA_KEYS:
            if isinstance(node.get(key), list) and key == "items":
                node[key] = [
                    self._node(one, f"{at(path, key)}[{index}]", depth)
                    for index, one in enumerate(node[key])
                ]
            elif key in node:
                node[key] = self._node(node[key], at(path, key), depth)
        for key in SCHEMA_LISTS:
            if key in node:
                node[key] = [
                    self._node(one, f"{at(path, key)}[{index}]", depth)
                    for index, one in enumerate(listed(node, key, path))
                ]
        for key in (*SCHEMA_MAPS, *(DEFINITIONS if path else ())):
            if key in node:
                node[key] = {
                    name: self._node(one, at(at(path, key), name), depth)
                    for name, one in mapped(node, key, path).items()
                }
        return node

    def evaluated(self, node: JsonObject, path: str) -> EvaluatedProperties | None:
        """Returns the properties that the other keywords of a node evaluate. Returns None if they
        depend on the object."""
        found = evaluated_properties(node, self._references, path)
        if found is not None:
            self._num_nodes += found.num_schemas + len(found.names) + len(found.patterns)
        return found

    def resolve(self, reference: Any, path: str) -> Schema:
        return self._references.resolve(reference, path)[1]

    def refuse(self, node: JsonObject, path: str, *keywords: str) -> JsonObject:
        """Raises SchemaError for keywords that no grammar can enforce, or removes them if they are
        ignored."""
        for keyword in keywords:
            if keyword not in node:
                continue
            where = at(path, keyword)
            if not self._ignore:
                raise SchemaError(
                    f"has {where}={shown_value(node[keyword])}, which cannot be enforced while an "
                    "answer is generated: leave it out, or set serve.schema_keywords=ignore"
                )
            self.ignored[at(self._prefix, where)] = None
        return _without(node, *keywords)


def _definition(steps: tuple[str, ...]) -> tuple[str, str]:
    """Returns keyword and name of the definition that a reference points into; an anchor gets a
    definition of its own."""
    if len(steps) == 1 and steps[0].startswith("#"):
        return DEFINITIONS[0], steps[0]
    return (steps[0], steps[1]) if len(steps) > 1 and steps[0] in DEFINITIONS else ("", "")


_Rule = Callable[[SchemaKeywords, JsonSchema, str], JsonSchema | None]
"""Maps keyword, node and path to the node without the keyword, or to None if no value fits."""


def _without(node: JsonSchema, *keywords: str) -> JsonSchema:
    return {key: value for key, value in node.items() if key not in keywords}


def _is_true(schema: JsonValue) -> bool:
    """Returns whether a schema constrains nothing."""
    return schema is True or schema == {}


_EVERY_KIND = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def _kinds(node: JsonObject) -> frozenset[Any]:
    """Returns the kinds of values that the `type` of a node allows. Every integer is a number."""
    names = node.get("type", [*_EVERY_KIND])
    kinds = {
        name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)
    }
    return frozenset(kinds | ({"integer"} if "number" in kinds else set()))


def _not(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema | None:
    inner = node["not"]
    if inner is False or (isinstance(inner, dict) and _is_true(inner.get("not"))):
        return _without(node, "not")
    if isinstance(inner, dict) and not _kinds(inner) & _kinds(node):
        return _without(node, "not")
    return None if _is_true(inner) else keywords.refuse(node, path, "not")


def _if(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    rest = _without(node, "if", "then", "else")
    branches = [node[key] for key in ("then", "else") if key in node]
    if "if" not in node or all(map(_is_true, branches)):
        return rest
    if node["if"] is False or _is_true(node["if"]):
        branch = node.get("then" if _is_true(node["if"]) else "else", True)
        return rest if _is_true(branch) else _beside(rest, path, branch)
    return keywords.refuse(node, path, "if", "then", "else")


def _unique_items(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    most = node.get("maxItems")
    if node["uniqueItems"] is False or (isinstance(most, int) and most <= 1):
        return _without(node, "uniqueItems")
    return keywords.refuse(node, path, "uniqueItems")


def _contains(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    names = ("contains", "minContains", "maxContains")
    rest = _without(node, *names)
    least = bounds([node], "minContains", "maxContains")[0] if "minContains" in node else 1
    if "contains" not in node or (least == 0 and "maxContains" not in node):
        return rest
    if _is_true(node["contains"]):
        counts: JsonSchema = {"minItems": node.get("minContains", 1)}
        counts |= {"maxItems": node["maxContains"]} if "maxContains" in node else {}
        return _beside(rest, path, counts)
    return keywords.refuse(node, path, *names)


def _dependent(keyword: str) -> _Rule:
    def rule(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
        value = node[keyword]
        if isinstance(value, dict) and all(
            one in ([], [name]) or _is_true(one) for name, one in value.items()
        ):
            return _without(node, keyword)
        return keywords.refuse(node, path, keyword)

    return rule


def _property_names(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    limits = _limits_of_names(keywords, node["propertyNames"], at(path, "propertyNames"))
    rest = _without(node, "propertyNames")
    if limits is None:
        return keywords.refuse(node, path, "propertyNames")
    if len(limits) != 1 or "enum" not in limits[0] or "patternProperties" in node:
        parts = [_object_of(limit) for limit in limits]
        return _beside(rest, path, *parts) if parts else rest
    # A name that is not in the list is neither an additional nor a known property.
    texts = limits[0]["enum"]
    properties, others = mapped(node, "properties", path), node.get("additionalProperties", True)
    named = {name: properties.get(name, others) for name in texts if isinstance(name, str)}
    return {
        **rest,
        "properties": {**{name: False for name in properties if name not in named}, **named},
        "additionalProperties": False,
    }


_UNSUPPORTED_NAMES = frozenset(
    ("anyOf", "oneOf", "not", "then", "else", "$dynamicRef", "$recursiveRef")
)
"""Keywords that may constrain a name in a way that no keyword of an object expresses."""
_MAX_NAME_SCHEMAS = 100


def _limits_of_names(keywords: SchemaKeywords, names: object, path: str) -> list[JsonSchema] | None:
    """Returns the constraints on names, each as `enum` or `pattern`. Returns None if there are
    others. Annotations, and keywords of other kinds of values, constrain no name."""
    limits: list[JsonSchema] = []
    waiting, seen = [names], set[int]()
    while waiting:
        one = checked(waiting.pop(), path)
        if isinstance(one, bool):
            limits += [] if one else [{"enum": []}]
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        others = {key for key in _UNSUPPORTED_NAMES & set(one) if (key, one[key]) != ("not", False)}
        if others or one.get("format") in FORMATS or len(seen) > _MAX_NAME_SCHEMAS:
            return None
        if "string" not in _kinds(one):
            limits.append({"enum": []})
        limits += [{"enum": listed(one, "enum", path)}] if "enum" in one else []
        limits += [{"enum": [one["const"]]}] if "const" in one else []
        least, most = bounds([one], "minLength", "maxLength")
        patterns = [one["pattern"]] if "pattern" in one else []
        if least or most is not None:
            patterns.append(rf"^[\s\S]{{{least},{'' if most is None else most}}}$")
        if not all(map(_is_searched, patterns)):
            return None
        limits += [{"pattern": pattern} for pattern in patterns]
        waiting += listed(one, "allOf", path)
        if "$ref" in one:
            waiting.append(keywords.resolve(one["$ref"], at(path, "$ref")))
    return limits


def _object_of(limit: JsonSchema) -> JsonSchema:
    """Returns the schema of objects whose names have a constraint."""
    if "enum" in limit:
        return _only(limit["enum"])
    return {"patternProperties": {limit["pattern"]: True}, "additionalProperties": False}


def _beside(node: JsonSchema, path: str, *schemas: JsonSchema) -> JsonSchema:
    """Returns the node with further schemas in its `allOf`."""
    return {**node, "allOf": [*listed(node, "allOf", path), *schemas]}


def _only(texts: list[Any]) -> JsonSchema:
    """Returns the schema of objects that have only properties with these names."""
    named = {text: True for text in texts if isinstance(text, str)}
    return {"properties": named, "additionalProperties": False}


def _is_searched(pattern: JsonValue) -> bool:
    """Returns whether a grammar can search names for the pattern."""
    try:
        return (
            isinstance(pattern, str)
            and not looks_around(pattern)
            and bool(search_expression(pattern))
        )
    except ValueError:
        return False


def _unevaluated_properties(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    name = "unevaluatedProperties"
    if _is_true(node[name]) or "additionalProperties" in node:
        return _without(node, name)
    if not _COMBINED & set(node):
        return {**_without(node, name), "additionalProperties": node[name]}
    found = keywords.evaluated(node, path)
    if found is None:
        return keywords.refuse(node, path, name)
    if found.are_all:
        return _without(node, name)
    evaluated = {"properties": dict.fromkeys(found.names, True)}
    evaluated |= {"patternProperties": dict.fromkeys(found.patterns, True)}
    return _beside(_without(node, name), path, {**evaluated, "additionalProperties": node[name]})


def _unevaluated_items(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    name = "unevaluatedItems"
    if _is_true(node[name]) or isinstance(node.get("items"), dict | bool):
        return _without(node, name)
    if not (_COMBINED | {"contains", "items"}) & set(node):
        return {**_without(node, name), "items": node[name]}
    return keywords.refuse(node, path, name)


def _format(_keywords: SchemaKeywords, node: JsonSchema, _path: str) -> JsonSchema:
    known = isinstance(node.get("format"), str) and node["format"] in FORMATS
    return node if known else _without(node, "format")


def _pattern(keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    pattern = node["pattern"]
    if not isinstance(pattern, str):
        raise SchemaError(
            f"has {at(path, 'pattern')}={shown_value(pattern)}, which must be a string"
        )
    split = split_lookahead(pattern)
    try:
        for part in () if split is None else (split.rest, *(one.pattern for one in split.ahead)):
            library_pattern(part)
    except UnenforcedPattern:
        split = None
    except InvalidPattern as error:
        raise SchemaError(
            f"has {at(path, 'pattern')}={shown_value(pattern)}, which {error} and is not a pattern "
            "of ECMA 262"
        ) from None
    if split is None:
        return keywords.refuse(node, path, "pattern")
    # A pattern with a lookahead constrains a text more than its format, such as zod's for emails.
    return _without(node, "format") if split.ahead else node


def _pattern_properties(_keywords: SchemaKeywords, node: JsonSchema, path: str) -> JsonSchema:
    """Converts a pattern that is a list of names to properties."""
    properties, patterns = dict(mapped(node, "properties", path)), {}
    for pattern, schema in mapped(node, "patternProperties", path).items():
        texts = fixed_texts(pattern)
        if texts is None:
            patterns[pattern] = schema
            continue
        for text in texts:
            known = properties.get(text, True)
            properties[text] = schema if known is True else {"allOf": [known, schema]}
    rest = _without(node, "patternProperties")
    rest |= {"patternProperties": patterns} if patterns else {}
    return {**rest, "properties": properties}


def _refused(keyword: str) -> _Rule:
    return lambda keywords, node, path: keywords.refuse(node, path, keyword)


_RULES: dict[str, _Rule] = {
    # First, since it depends on the other keywords, which the other rules rewrite.
    "unevaluatedProperties": _unevaluated_properties,
    "not": _not,
    "if": _if,
    "then": _if,
    "else": _if,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _contains,
    "maxContains": _contains,
    "dependencies": _dependent("dependencies"),
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "propertyNames": _property_names,
    "unevaluatedItems": _unevaluated_items,
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "$dynamicRef": _refused("$dynamicRef"),
    "$recursiveRef": _refused("$recursiveRef"),
}

_CONCERNED = {
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), "array"),
    "unevaluatedItems": "array",
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object"),
    "pattern": "string",
}
"""Maps keywords to the only kind of values that they constrain."""
_ORDER = {keyword: place for place, keyword in enumerate(_RULES)}

CLEANED = frozenset(_RULES) - {"format", "pattern", "patternProperties"}
"""Keywords that no cleaned schema contains."""
