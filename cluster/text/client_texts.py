"""Which control tokens of a rendered conversation the template has written, and which came with a
text of the client.

A template is a program: it trims texts, cuts them, writes them as JSON. So the conversation is
rendered again with other texts, and what follows them is not the template's own. The answer is
taken from a rendering that says the same as the first one:

1. In each text the characters with which a control token begins or ends are replaced by characters
   that occur nowhere. The template's control tokens are those that this rendering has.
2. Where a template looks for control tokens in texts (`</think>` in an earlier answer), the first
   says something else. Then each control token in a text gets a mark before and one behind it.

If neither says the same, the second counts: control tokens of texts are text in it in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from swell.cluster.text.control_tokens import ControlTokens, Segment
from swell.cluster.text.sampling_params import BadRequest

Change = Callable[[str], str]
"""Of one text of the client."""
_PRIVATE = range(0xE000, 0xF900)
"""Characters without a meaning."""
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})", re.IGNORECASE)


def changed(value: Any, change: Change) -> Any:
    """A value of JSON with other texts, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {changed(key, change): changed(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [changed(one, change) for one in value]
    return value


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from texts_of(key)
            yield from texts_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)


def own_segments(
    text: str,
    texts: Sequence[str],
    control: ControlTokens,
    render: Callable[[Change], str],
) -> list[Segment] | None:
    """The rendered `text` in segments, of which the template's own control tokens are control;
    None: all control tokens are its own. `texts` are those of the client; `render` renders them
    changed, and raises BadRequest where the template refuses that."""
    edges = sorted(edge for edge in control.edges if any(edge in one for one in texts))
    if not edges:
        return None
    *stand_ins, begin, end = _unused(len(edges) + 2, [text, *texts])
    whole = control.split(text)
    mask = str.maketrans(dict(zip(edges, stand_ins, strict=True)))
    masked = _rendered(render, lambda one: one.translate(mask), stand_ins)
    if masked is not None:
        unmask = str.maketrans(dict(zip(stand_ins, edges, strict=True)))
        own = [Segment(one.text.translate(unmask), one.is_control) for one in control.split(masked)]
        if "".join(one.text for one in own) == text:
            return None if own == whole else own
    marked = _rendered(render, lambda one: _marked(one, control, begin, end), (begin, end))
    if marked is not None:
        own = _without_marks(control.split(marked), begin, end)
    elif masked is None:
        raise BadRequest(
            "messages hold texts of control tokens that the chat template does not take as text; "
            "leave them out, or set model.special_tokens_in_text=control",
            "messages",
            "chat_template_error",
        )
    return None if own == whole else own


def _rendered(render: Callable[[Change], str], change: Change, added: Sequence[str]) -> str | None:
    """With `added` characters as they are, where the template writes texts as JSON in ASCII. None:
    the template refuses such texts."""
    try:
        text = render(change)
    except BadRequest:
        return None
    for one in added:
        text = text.replace(f"\\u{ord(one):04x}", one)
    return text


def _marked(text: str, control: ControlTokens, begin: str, end: str) -> str:
    return "".join(
        f"{begin}{one.text}{end}" if one.is_control else one.text for one in control.split(text)
    )


def _without_marks(segments: Sequence[Segment], begin: str, end: str) -> list[Segment]:
    """A control token between two marks is a text's; a mark that a template has separated from its
    token says nothing."""
    own: list[Segment] = []
    text = ""
    for index, one in enumerate(segments):
        marked = (
            one.is_control
            and 0 < index < len(segments) - 1
            and segments[index - 1].text.endswith(begin)
            and segments[index + 1].text.startswith(end)
        )
        if one.is_control and not marked:
            own += [Segment(text)] * bool(text) + [one]
            text = ""
        else:
            text += one.text.replace(begin, "").replace(end, "")
    return own + [Segment(text)] * bool(text)


def _unused(count: int, texts: Sequence[str]) -> list[str]:
    """Characters that no text has, not even escaped."""
    used: set[str] = set()
    for text in texts:
        used.update(text)
        used.update(chr(int(code, 16)) for code in _ESCAPED.findall(text))
    free = list(islice((char for char in map(chr, _PRIVATE) if char not in used), count))
    if len(free) < count:
        raise BadRequest(
            f"messages hold all but {len(free)} of the {len(_PRIVATE)} private-use characters of "
            f"Unicode (U+E000 to U+F8FF), and at least {count} must be free; leave them out, or "
            "set model.special_tokens_in_text=control",
            "messages",
        )
    return free
