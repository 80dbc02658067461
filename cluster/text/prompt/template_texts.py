"""Separates the control tokens of a rendered conversation that the template wrote from those in
texts of the client.

A template is a program: it trims texts, cuts them, writes them as JSON. So the conversation is
rendered again with changed texts, to see which control tokens depend on them. A rendering is
trusted if, without its changes, it gives the same text as the first one:

1. In each text the first and last characters of control tokens are replaced by characters that
   occur nowhere; so are characters that the tokenizer normalizes to these. The template's own
   control tokens are those in this rendering.
2. If a template looks for control tokens in texts (`</think>` in an earlier answer), rendering 1
   gives another text. Then each control token in a text is enclosed in two marks.

If neither gives the same text, rendering 2 is used: in it, control tokens in texts are always text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.control_tokens import ControlTokens, Segment

Change = Callable[[str], str]
"""A change of one text of the client."""
_PRIVATE = range(0xE000, 0xF900)
"""Private-use characters, which no standard gives a meaning."""
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})", re.IGNORECASE)


def changed(value: Any, change: Change) -> Any:
    """Applies `change` to all strings of a JSON value, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {changed(key, change): changed(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [changed(one, change) for one in value]
    return value


def texts_of(value: object) -> Iterator[str]:
    """Yields all strings of a JSON value, including keys."""
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
    field: str = "messages",
) -> list[Segment] | None:
    """Splits the rendered `text` into segments; only the template's own control tokens are control
    segments. Returns None if all control tokens are its own. `texts` are those of the client,
    in `field`; `render` renders them changed, and raises BadRequest if the template refuses that.
    """
    edges = sorted(control.edges(texts))
    if not edges and not (control.normalizes and _have_control(texts, control)):
        return None
    *stand_ins, begin, end = _unused(len(edges) + 2, [text, *texts], field)
    whole = control.split(text)
    mask = str.maketrans(dict(zip(edges, stand_ins, strict=True)))
    masked = _rendered(render, lambda one: one.translate(mask), stand_ins)
    # A normalizer may create the ends of a control token out of several characters.
    hidden = not (
        control.normalizes and _have_control([one.translate(mask) for one in texts], control)
    )
    if masked is not None and hidden:
        unmask = str.maketrans(dict(zip(stand_ins, edges, strict=True)))
        split = [(one.text.translate(unmask), one) for one in control.split(masked)]
        own = _joined(
            Segment(shown, one.token if shown == one.text else None) for shown, one in split
        )
        if "".join(one.text for one in own) == text:
            return None if own == whole else own
    marked = _rendered(render, lambda one: _marked(one, control, begin, end), (begin, end))
    if marked is not None:
        own = _without_marks(control.split(marked), begin, end)
    elif masked is None:
        raise BadRequest(
            "messages contain texts of control tokens that the chat template does not accept as "
            "text; leave them out, or set model.special_tokens_in_text=control",
            "messages",
            "chat_template_error",
        )
    return None if own == whole else own


def _rendered(render: Callable[[Change], str], change: Change, added: Sequence[str]) -> str | None:
    """Renders with `change`. Restores `added` characters that the template escaped as ASCII JSON.
    Returns None if the template refuses such texts."""
    try:
        text = render(change)
    except BadRequest:
        return None
    for one in added:
        text = text.replace(f"\\u{ord(one):04x}", one)
    return text


def _marked(text: str, control: ControlTokens, begin: str, end: str) -> str:
    return "".join(
        f"{begin}{one.text}{end}" if one.token else one.text for one in control.split(text)
    )


def _without_marks(segments: Sequence[Segment], begin: str, end: str) -> list[Segment]:
    """Removes the marks. A control token between two marks belongs to a text; a mark that the
    template has separated from its token is ignored."""
    own: list[Segment] = []
    for index, one in enumerate(segments):
        marked = (
            one.token is not None
            and 0 < index < len(segments) - 1
            and segments[index - 1].text.endswith(begin)
            and segments[index + 1].text.startswith(end)
        )
        text = one.text.replace(begin, "").replace(end, "")
        own.append(Segment(text, None if marked else one.token))
    return _joined(own)


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    """Joins adjacent segments without control tokens."""
    joined: list[Segment] = []
    text = ""
    for one in segments:
        if one.token is None:
            text += one.text
            continue
        joined += [Segment(text)] * bool(text) + [one]
        text = ""
    return joined + [Segment(text)] * bool(text)


def _have_control(texts: Iterable[str], control: ControlTokens) -> bool:
    return any(one.token for text in texts for one in control.split(text))


def _unused(count: int, texts: Sequence[str], field: str) -> list[str]:
    """Returns characters that occur in no text, not even escaped."""
    used: set[str] = set()
    for text in texts:
        used.update(text)
        used.update(chr(int(code, 16)) for code in _ESCAPED.findall(text))
    free = list(islice((char for char in map(chr, _PRIVATE) if char not in used), count))
    if len(free) < count:
        raise BadRequest(
            f"{field}: all except {len(free)} of the {len(_PRIVATE)} private-use characters of "
            f"Unicode (U+E000 to U+F8FF) are used, and at least {count} must be unused; leave some "
            "out, or set model.special_tokens_in_text=control",
            field,
        )
    return free
