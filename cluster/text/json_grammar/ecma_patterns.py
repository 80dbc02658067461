r"""Translates patterns of ECMA 262, which JSON schemas have, to the library's regular expressions.

The notations differ in classes (in the library's, `[a&&b]` is an intersection), in escapes (there,
`\z` is an anchor), and in the characters of `\d`, `\w`, `\s` and `.`. So each part is translated. A
part that has a meaning in other notations only, such as `\A` or `(?x)`, is refused.

Sets of characters exclude U+0000. Otherwise the library, which escapes characters of JSON strings,
would add `"` and `\` to a set that has all control characters.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"""\\(?:
        (?P<kind>[dDwWsS])
      | (?P<property>[pP]\{[A-Za-z0-9_=]+\})
      | (?P<control>[tnrfv])
      | c(?P<letter>[A-Za-z])
      | (?P<null>0(?![0-9]))
      | x(?P<byte>[0-9A-Fa-f]{2})
      | u(?P<high>[Dd][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[Dd][C-Fc-f][0-9A-Fa-f]{2})
      | u(?P<unit>[0-9A-Fa-f]{4})
      | u\{(?P<point>[0-9A-Fa-f]{1,8})\}
      | (?P<boundary>[bB])
      | (?P<reference>[1-9]|k<)
      | (?P<itself>[^A-Za-z0-9])
    )""",
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"[*+?]|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}")
_OPENED = re.compile(r"\((?:\?(?:(?P<plain>:|P?<[A-Za-z_$][\w$]*>|i:)|(?P<around><?[=!])|.?))?")
_WORD, _DIGIT = "0-9A-Za-z_", "0-9"
_SPACE = (
    r"\x{9}-\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
    r"\x{FEFF}"
)
_KINDS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_NOT_LINE_END = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
_ANY, _NONE = r"[\x{1}-\x{10FFFF}]", r"[^\x{0}-\x{10FFFF}]"
_NULL = r"\x{0}"
_NULL = r"\x{0}"
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_IGNORE_CASE = "(?i)"
"""Not part of ECMA 262, but it has this meaning wherever it has one."""


class InvalidPattern(ValueError):
    """A pattern that is not one of ECMA 262."""


class UnenforcedPattern(ValueError):
    """A pattern with look-around, a word boundary or a back reference: no grammar can enforce
    it."""


def library_pattern(pattern: str) -> str:
    """Returns the same pattern in the library's notation. Raises `InvalidPattern` or
    `UnenforcedPattern`."""
    flags = _IGNORE_CASE if pattern.startswith(_IGNORE_CASE) else ""
    return flags + _Translation(pattern, len(flags)).text()


class _Translation:
    def __init__(self, pattern: str, start: int) -> None:
        self._pattern = pattern
        self._at = start
        self._depth = 0
        self._is_repeatable = False
        """Whether a quantifier may follow."""

    def text(self) -> str:
        found = []
        while self._at < len(self._pattern):
            found.append(self._part())
        if self._depth:
            raise InvalidPattern("has an unclosed group")
        return "".join(found)

    def _part(self) -> str:
        char = self._pattern[self._at]
        if quantifier := _QUANTIFIER.match(self._pattern, self._at):
            return self._quantifier(quantifier)
        self._is_repeatable = char not in "^$|("
        match char:
            case "(":
                return self._opened()
            case ")":
                if not self._depth:
                    raise InvalidPattern("closes a group that it does not open")
                self._depth -= 1
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case ".":
                self._at += 1
                return _NOT_LINE_END
            case "{" if self._pattern.startswith("{,", self._at):
                raise InvalidPattern("has {, without a first number: write {0, or \\{")
        self._at += 1
        return char if char in "^$|)" else _literal(ord(char))

    def _quantifier(self, found: re.Match[str]) -> str:
        if not self._is_repeatable:
            raise InvalidPattern(f"has {found[0]} where nothing can be repeated")
        if found["most"] and int(found["least"]) > int(found["most"]):
            raise InvalidPattern(f"has {found[0]}, whose numbers are out of order")
        self._is_repeatable = False
        # Whether the fewest repetitions are tried first decides nothing about a whole text.
        is_lazy = self._pattern.startswith("?", found.end())
        self._at = found.end() + is_lazy
        return found[0]

    def _opened(self) -> str:
        found = _OPENED.match(self._pattern, self._at)
        assert found is not None
        if found["around"]:
            raise UnenforcedPattern("has a look-around")
        if found[0] != "(" and not found["plain"]:
            raise InvalidPattern(f"has a group {found[0]}")
        self._depth += 1
        self._at = found.end()
        return "(?i:" if found["plain"] == "i:" else "(?:"

    def _escape(self) -> str:
        found = self._escaped()
        if found["boundary"]:
            raise UnenforcedPattern("has a word boundary")
        if found["reference"]:
            raise UnenforcedPattern("has a back reference")
        point = _code_point(found)
        return f"[{_several(found)}]" if point is None else _literal(point)

    def _escaped(self) -> re.Match[str]:
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None:
            raise InvalidPattern(f"has the escape {self._pattern[self._at : self._at + 2]}")
        self._at = found.end()
        return found

    def _class(self) -> str:
        self._at += 1
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        found = []
        while not self._pattern.startswith("]", self._at):
            first, text = self._member()
            if not self._is_range():
                found.append(text)
                continue
            self._at += 1
            last, last_text = self._member()
            if first is None or last is None:  # one side is a set: the line is a character
                found += [text, _literal(ord("-")), last_text]
            elif first > last:
                raise InvalidPattern(f"has a range {chr(first)}-{chr(last)} out of order")
            else:
                found.append(f"{text}-{last_text}")
        self._at += 1
        if not found:
            return _ANY if is_negated else _NONE
        if is_negated:
            return f"[^{_NULL}{''.join(found)}]"
        return _NULL if {*found} == {_NULL} else f"[[{''.join(found)}]--{_NULL}]"

    def _is_range(self) -> bool:
        return self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 :][:1] != "]"

    def _member(self) -> tuple[int | None, str]:
        """Reads a character or a set of a class; the character is None for a set."""
        if self._at == len(self._pattern):
            raise InvalidPattern("has an unclosed character class")
        if self._pattern[self._at] != "\\":
            self._at += 1
            point: int | None = ord(self._pattern[self._at - 1])
        else:
            found = self._escaped()
            if found["reference"] or found["boundary"] == "B":
                raise InvalidPattern(f"has the escape {found[0]} in a class")
            point = _code_point(found)
            if point is None:
                return None, _several(found)
        assert point is not None
        return point, _literal(point)


def _code_point(found: re.Match[str]) -> int | None:
    """Returns the character of an escape; None if it stands for several."""
    if found["boundary"]:
        return 0x8
    if found["high"]:
        return 0x10000 + ((int(found["high"], 16) & 0x3FF) << 10) + (int(found["low"], 16) & 0x3FF)
    if digits := found["byte"] or found["unit"] or found["point"]:
        return int(digits, 16)
    if found["letter"]:
        return ord(found["letter"]) % 32
    if found["control"]:
        return _CONTROLS[found["control"]]
    if found["null"]:
        return 0
    return ord(found["itself"]) if found["itself"] else None


def _several(found: re.Match[str]) -> str:
    """Returns the characters of an escape, as a part of a class."""
    if found["property"]:
        return f"[\\{found['property']}--{_NULL}]"
    characters = _KINDS[found["kind"].lower()]
    return characters if found["kind"].islower() else f"[^{_NULL}{characters}]"


def _literal(point: int) -> str:
    if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
        raise InvalidPattern(f"has U+{point:04X}, which is not a character")
    char = chr(point)
    return char if (char.isascii() and char.isalnum()) or point > 0x9F else f"\\x{{{point:X}}}"
