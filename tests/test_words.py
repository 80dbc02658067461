"""Docstrings, comments, messages, names of tests and pages are plain English: the banned openings
and phrases do not occur."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Sequence

from tests.test_layers import ROOT

CHECKED = (
    "cluster",
    "configs",
    "coordinator",
    "engine",
    "examples",
    "kernels",
    "package",
    "tests",
    "worker",
)
"""Folders whose docstrings and comments are checked."""

MESSAGES_CHECKED = (
    "cluster",
    "configs",
    "coordinator",
    "engine",
    "kernels",
    "package",
    "worker",
)
"""Folders whose string literals are checked: errors, log lines, help texts, descriptions."""

OPENINGS = re.compile(
    r"(Of|What|Those|It|Its|That|Which|Who|Whose|Whom|Whatever|Whoever|Whichever|Where|As|So|Else|By"
    r"|And|But)\b"
)
"""A docstring begins with a verb or with a noun, not with one of these."""

IMPERATIVES = re.compile(
    r"(Add|Announce|Append|Ask|Become|Build|Call|Cancel|Check|Choose|Claim|Close|Collect|Compute"
    r"|Connect|Continue|Convert|Correct|Count|Create|Decide|Delete|Deploy|Drop|Encode|End|Exit"
    r"|Extend|Fail|Find|Forget|Free|Generate|Get|Give|Handle|Hide|Interrupt|Keep|Kill|Let|Listen"
    r"|Load|Make|Mark|Measure|Move|Open|Parse|Print|Put|Raise|Read|Record|Refuse|Remove|Replace"
    r"|Report|Request|Reserve|Reset|Restart|Return|Run|Send|Serve|Set|Show|Sleep|Start|Stop|Store"
    r"|Stream|Summarize|Take|Tell|Terminate|Try|Undo|Update|Upgrade|Use|Wait|Wake|Write|Yield)"
    r"\b(?! of\b)"
)
"""The docstring of a function says what it does: "Returns", not "Return"."""

PHRASES = {
    "inverted negation": r"(?<!there )(?<!that )\b(is|are|was|were|has|have) no"
    r" (?!longer\b|more\b|less\b)",
    "so many": r"\bso (many|much|long)\b",
    "alone": r"\balone\b",
    "anew": r"\banew\b",
    "whatever": r"\b(whatever|whoever|whichever|whom)\b",
    "is to be": r"\b(is|are|was|were) to (be|have)\b",
    "shall": r"\bshall\b",
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b(?! (a|the|its) (reverse |HTTP )?(proxy|proxies|load balancer))",
    "but for": r"\bbut for\b",
    "of which": r"\bof (which|whom|those|what)\b",
    "therein": r"\b(therein|thereof|thereby|hitherto|hence|thus|save for|else than|nought)\b",
    "again and again": r"\b(again and again|in vain|for ever)\b",
    "somebody": r"\b(somebody|anybody|everybody)\b",
    "so few": r"\bso few\b",
    "sentence with Of": r"(?<=\. )Of (all|two|several|the|those|a|an|its|each|more)\b",
    "inverted clause": r"\b(nor|neither) (is|are|does|do|has|have|can)\b",
}
"""Name -> a pattern that is not written, in any case."""
MESSAGE_PHRASES = PHRASES | {
    "inverted negation": r"(?<!there )\b(is|are|was|were) no (?!longer\b|more\b|less\b)",
    "are taken": r"\b(is|are) taken\b",
    "lies outside": r"\blies? outside\b",
    "outside of": r"\boutside of\b",
}
"""Banned phrases of messages. "The model has none" is allowed in a message."""

NAME_PHRASES = PHRASES | {
    "inverted negation": r"(?<!there )\b(is|are|was|were) no (?!longer\b|more\b|less\b)",
    "are none": r"\b(is|are|was|were) none\b",
    "has not": r"\b(has|have) not($| is\b| are\b)",
    "has ended": r"\b(has|have) ended\b",
    "gives": r"\b(give|gives|gave|given)\b",
    "takes": r"\b(take|takes|took|taken)\b"
    r"(?! (over|part|turns|effect|long|too long|one delay|virtual time)\b)",
    "told": r"\b(tell|tells|told)\b",
    "says": r"\b(say|says|said)\b",
    "wants": r"\b(want|wants|wanted)\b",
    "asked for": r"\b(ask|asks|asked) for\b",
    "heard": r"\b(hear|hears|heard)\b",
    "goes on": r"\b(go|goes|went) (on|back)\b",
    "comes back": r"\b(come|comes|came) (back|again)\b",
    "holds up": r"\b(hold|holds|held) up\b",
    "are those of": r"\b(is|are) (that|those) of\b",
    "nobody": r"\b(nobody|somebody|anybody)\b",
    "further": r"\bfurther\b",
    "otherwise": r"\botherwise\b",
    "again and again": r"\b(again and again|ever more|for ever|in vain)\b",
    "outside of": r"\boutside of\b",
    "no subject": r"^(one (that|who|whose)|they|none|not|neither)\b",
}
"""Banned phrases of the names of tests. A name may contain "has no", as messages may."""

HELPER_PHRASES = {
    name: NAME_PHRASES[name]
    for name in (
        *(
            "inverted negation",
            "alone",
            "anew",
            "whatever",
            "shall",
            "beside",
            "behind",
            "of which",
        ),
        *("told", "says", "wants", "heard", "goes on", "are those of", "further"),
    )
}
"""Banned phrases of the names of fixtures, helper functions and classes of tests."""

PAGE_PHRASES = {
    name: PHRASES[name]
    for name in (
        *("anew", "shall", "beside", "but for", "therein", "again and again", "somebody", "so few"),
        "sentence with Of",
    )
} | {
    "are told": r"\b(is|are|was|were|be|been) told\b",
    "wants": r"\bwanted\b",
    "is to be": r"\b(is|are|was|were) to be\b",
    "whatever": r"\b(whatever|whoever|whichever)\b",
}
"""Banned phrases of pages."""

NOT_MESSAGES: dict[str, tuple[str, ...]] = {}
"""File -> literals in it that only look like one of these phrases."""


COMMENT_OR_STRING = re.compile(
    r"'''(?:\\.|[^\\])*?'''"
    r'|"""(?:\\.|[^\\])*?"""'
    r"|'(?:\\.|[^'\\\n])*'"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|#(?P<comment>[^\n]*)",
    re.DOTALL,
)
"""Matches the next comment, or a string literal, which may contain a `#`. The module `tokenize`
reads every token, which takes ten times as long."""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the tree and all of its statements, without expressions, which are most nodes."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            part = getattr(node, field, None)
            nodes += part if isinstance(part, list) else ()


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of all docstrings, also of fields and constants."""
    for node in statements(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of all comments."""
    line, start = 1, 0
    for match in COMMENT_OR_STRING.finditer(source):
        line, start = line + source.count("\n", start, match.start()), match.start()
        if match["comment"] is not None:
            yield line, match["comment"].lstrip("# ")


def prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring: all docstrings and all comments."""
    yield from ((line, text, True) for line, text in docstrings(ast.parse(source)))
    yield from ((line, text, False) for line, text in comments(source))


def without_names(text: str) -> str:
    """Prose without what is quoted in backticks, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"``?[^`]*``?", "`x`", text))


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal of several words that is not a docstring. In an
    f-string, `{}` stands for a value."""
    tree = ast.parse(source)
    known = {text for _, text in docstrings(tree)}
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        text = ""
        if isinstance(node, ast.JoinedStr):
            values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
            nodes += [value.value for value in values]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        else:
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
        if " " in text and text not in known:
            yield node.lineno, text


def _complaints(line: int, text: str, is_opening: bool, phrases: dict[str, str]) -> Iterator[str]:
    plain = without_names(text)
    opening = OPENINGS.match(plain) if is_opening else None
    if opening:
        yield f"{line}: begins with {opening[0]!r}: {plain[:80]}"
    for name, pattern in phrases.items():
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            yield f"{line}: {name}: {plain[max(0, match.start() - 40) :][:100]}"


def complaints(source: str) -> list[str]:
    """One line for each banned opening or phrase in a file's docstrings and comments."""
    return [
        complaint
        for line, text, is_docstring in prose(source)
        for complaint in _complaints(line, text, is_docstring, PHRASES)
    ]


def imperatives(source: str) -> list[str]:
    """One line for each docstring of a function that begins with an imperative."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = (node for node in statements(ast.parse(source)) if isinstance(node, functions))
    texts = ((node.lineno, ast.get_docstring(node) or "") for node in found)
    return [f"{line}: {text[:80]}" for line, text in texts if IMPERATIVES.match(text)]


def message_complaints(source: str, exempt: Container[str] = ()) -> list[str]:
    """One line for each banned opening or phrase in a file's string literals."""
    return [
        complaint
        for line, text in messages(source)
        if text not in exempt
        for complaint in _complaints(line, text, True, MESSAGE_PHRASES)
    ]


def words_of_test_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and words of the name of each test."""
    for node in statements(ast.parse(source)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " ")


def name_complaints(source: str) -> list[str]:
    """One line for each banned opening or phrase in the names of a file's tests."""
    return [
        complaint
        for line, text in words_of_test_names(source)
        for complaint in _complaints(line, text.capitalize(), True, NAME_PHRASES)
    ]


def helper_complaints(source: str) -> list[str]:
    """One line for each banned phrase in the names of a file's fixtures, functions and classes that
    are not tests."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [
        complaint
        for node in statements(ast.parse(source))
        if isinstance(node, kinds) and not node.name.startswith("test_")
        for complaint in _complaints(node.lineno, _words(node.name), False, HELPER_PHRASES)
    ]


def _words(name: str) -> str:
    """Returns the words of a name in snake case or camel case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).strip()


def page_complaints(text: str) -> list[str]:
    """One line for each banned phrase on a page, except in code blocks."""
    prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    return [
        complaint
        for number, line in enumerate(prose.splitlines(), 1)
        for complaint in _complaints(number, line, False, PAGE_PHRASES)
    ]


def names(folders: Sequence[str]) -> list[str]:
    """Paths of the Python files in folders."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_words_are_plain() -> None:
    found = {name: complaints((ROOT / name).read_text()) for name in names(CHECKED)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_docstrings_of_functions_are_indicative() -> None:
    found = {name: imperatives((ROOT / name).read_text()) for name in names(MESSAGES_CHECKED)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_messages_are_plain() -> None:
    found = {
        name: message_complaints((ROOT / name).read_text(), NOT_MESSAGES.get(name, ()))
        for name in names(MESSAGES_CHECKED)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_names_of_tests_are_plain() -> None:
    found = {name: name_complaints((ROOT / name).read_text()) for name in names(["tests"])}
    assert {name: lines for name, lines in found.items() if lines} == {}, (
        "name the subject, then what it does: a_path_with_an_existing_first_part_is_not_a_hub_id"
    )


def test_names_of_helpers_are_plain() -> None:
    found = {name: helper_complaints((ROOT / name).read_text()) for name in names(["tests"])}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_pages_are_plain() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)): page_complaints(page.read_text()) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_complaints() -> None:
    assert complaints('"""Of a request."""') == ["1: begins with 'Of': Of a request."]
    assert len(complaints("# This is no queue, which is to be seen anew.")) == 3
    assert len(complaints("# Somebody waits in vain for so few rows. Of all, one.")) == 4
    assert complaints('"""Returns the queue. There is no other: `so many alone`."""') == []


def test_imperatives() -> None:
    source = 'class A:\n    """Load."""\n    async def f(self):\n        """%s the queue."""\n'
    assert imperatives(source % "Keep") == ["3: Keep the queue."]
    assert imperatives(source % "Keeps") == imperatives(source % "Load of") == []


def test_name_complaints() -> None:
    private = (
        "what_one_load_wants",
        "several_text_models_are_none",
        "models_that_take_none_say_so",
        "tokens_that_the_model_has_not_are_refused",
        "a_path_whose_first_part_exists_is_no_hub_id",
        "vectors_that_are_no_numbers_fail_their_request_alone",
        "of_equal_matches_the_newest_counts",
        "it_sleeps_with_the_engine",
        "one_that_was_named_is_not_kept",
    )
    for name in private:
        assert name_complaints(f"def test_{name}(): ..."), name
    plain = "a_request_without_tokens_has_no_blocks", "a_new_manager_takes_over", "helper"
    for name in plain:
        assert name_complaints(f"async def test_{name}(): ...") == [], name
    assert name_complaints("def what_is_no_test(): ...") == []


def test_helper_complaints() -> None:
    for name in ("wanted", "say_hello", "_tell", "hear", "run_alone", "go_on"):
        assert helper_complaints(f"class A:\n    def {name}(self): ...") != [], name
    assert helper_complaints("class HeardOnce: ...") == ["1: heard: Heard Once"]
    assert helper_complaints("def take(): ...\ndef test_wanted(): ...") == []


def test_page_complaints() -> None:
    assert page_complaints("# Page\n\n```\nbut for\n```\nrefused, but for `false`\n") == [
        "6: but for: refused, but for `x`"
    ]


def test_message_complaints() -> None:
    source = 'raise ValueError(f"{name} is no folder; at most {limit} are taken" + "seen anew")'
    assert message_complaints(source) == [
        "1: anew: seen anew",
        "1: inverted negation: {} is no folder; at most {} are taken",
        "1: are taken: {} is no folder; at most {} are taken",
    ]
    assert len(message_complaints("""text = f"{'is no folder' if a else b} is there" """)) == 1
    assert message_complaints(source, {"seen anew", "{} is no folder; at most {} are taken"}) == []
    assert message_complaints('"""Is no queue."""\ntext = "the model has no tokenizer"') == []
    assert len(message_complaints('text = "Those of them that were right."')) == 1
