"""Checks whether the schemas of a `oneOf` evidently exclude each other, so that it means
`anyOf`."""

from __future__ import annotations

from swell.cluster.text.json_grammar.object_merging import ObjectShape
from swell.cluster.text.json_grammar.schema_merging import (
    LiteralShape,
    NumberShape,
    Place,
    PlaceShape,
    SchemaMerger,
    Shape,
    StringShape,
    plain_texts,
)
from swell.cluster.text.json_grammar.schema_nodes import SchemaError

MAX_ONE_OF = 200
"""Limit on the schemas of a `oneOf` that are compared in pairs; lists of constants may be
longer."""
_MAX_DEPTH = 4
"""Limit on the depth of nested properties that are compared."""


def check_one_ofs(merger: SchemaMerger) -> None:
    """Raises SchemaError for a merged `oneOf` whose schemas may overlap."""
    while merger.one_ofs:
        path, options = merger.one_ofs.pop()
        if not _all_disjoint(merger, options):
            raise SchemaError(
                f"has {path}, which can only be enforced if its schemas clearly exclude each "
                "other; use anyOf"
            )


def _all_disjoint(merger: SchemaMerger, options: list[Place]) -> bool:
    texts = [plain_texts(option) for option in options]
    if all(one is not None for one in texts):
        every = [text for one in texts for text in one or ()]
        return len(set(every)) == len(every)
    if len(options) > MAX_ONE_OF:
        raise SchemaError(
            f"has {len(options)} schemas in oneOf; at most {MAX_ONE_OF} are compared: use anyOf"
        )
    return all(
        _are_disjoint(merger, one, two, _MAX_DEPTH)
        for index, one in enumerate(options)
        for two in options[index + 1 :]
    )


def _are_disjoint(merger: SchemaMerger, one: Place, two: Place, depth: int) -> bool:
    if one is None or two is None:
        return True
    return depth > 0 and all(
        _exclude(merger, first, second, depth)
        for first in merger.shapes(one)
        for second in merger.shapes(two)
    )


def _exclude(merger: SchemaMerger, one: Shape, two: Shape, depth: int) -> bool:
    if isinstance(one, PlaceShape):
        return depth > 0 and all(
            _exclude(merger, shape, two, depth - 1) for shape in merger.shapes(one.place)
        )
    if isinstance(two, PlaceShape):
        return _exclude(merger, two, one, depth)
    if type(one) is not type(two):
        return True
    if isinstance(one, LiteralShape) and isinstance(two, LiteralShape):
        return not set(one.texts) & set(two.texts)
    if isinstance(one, NumberShape) and isinstance(two, NumberShape):
        return one.numbers.intersect(two.numbers).is_empty
    if isinstance(one, StringShape) and isinstance(two, StringShape):
        both = one.texts is not None and two.texts is not None
        return both and not set(one.texts or ()) & set(two.texts or ())
    if isinstance(one, ObjectShape) and isinstance(two, ObjectShape):
        return any(
            _are_disjoint(merger, one.value_of(name), two.value_of(name), depth - 1)
            for name in one.required | two.required
        )
    return False
