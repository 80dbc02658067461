"""`python -m tests.pages.pictures`: draws the pictures of `docs/design/` as SVG.

A picture is a list of boxes and arrows. It has its own white ground, so that it is legible on pages
of any colour.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "design"
CHAR_PX = 7.0
"""The mean width of a character of the font size below."""
LINE_PX = 16
_COLOURS = {
    "plain": ("#eef3fa", "#4a6fa5"),
    "group": ("#fafafa", "#b8c0cc"),
    "busy": ("#fde8c8", "#b7791f"),
    "idle": ("#f1f3f5", "#9aa5b1"),
}
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" font-family="sans-serif" font-size="13" role="img">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" \
orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="#55606e"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>
"""


class Box(NamedTuple):
    """A rectangle with a text: lines separated by `|`, in the middle; a group has its text at the
    top."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: str = "plain"

    @property
    def lines(self) -> list[str]:
        return self.text.split("|")

    def line_at(self, index: int) -> tuple[float, float]:
        """Returns the middle of the base line of a line of the text."""
        if self.kind == "group":
            return self.x + self.width / 2, self.y + LINE_PX * (index + 1)
        top = self.y + (self.height - LINE_PX * len(self.lines)) / 2
        return self.x + self.width / 2, top + LINE_PX * (index + 0.75)


class Arrow(NamedTuple):
    """A straight arrow with a text near its middle."""

    start: tuple[float, float]
    end: tuple[float, float]
    text: str = ""
    dx: float = 0
    dy: float = -6
    """The place of the text, relative to the middle of the arrow."""
    both: bool = False
    tip: bool = True

    @property
    def text_at(self) -> tuple[float, float]:
        (x, y), (to_x, to_y) = self.start, self.end
        return (x + to_x) / 2 + self.dx, (y + to_y) / 2 + self.dy


class Picture(NamedTuple):
    title: str
    width: int
    height: int
    boxes: list[Box]
    arrows: list[Arrow]


def svg(picture: Picture) -> str:
    parts = [_HEAD.format(**picture._asdict())]
    for box in picture.boxes:
        fill, stroke = _COLOURS[box.kind]
        parts.append(
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
            f'rx="4" fill="{fill}" stroke="{stroke}"/>\n'
        )
        parts += (_text(line, *box.line_at(i)) for i, line in enumerate(box.lines))
    for arrow in picture.arrows:
        (x, y), (to_x, to_y) = arrow.start, arrow.end
        tips = ' marker-end="url(#tip)"' if arrow.tip else ""
        tips += ' marker-start="url(#tip)"' if arrow.both else ""
        parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="#55606e"{tips}/>\n'
        )
        parts.append(_text(arrow.text, *arrow.text_at))
    return "".join([*parts, "</svg>\n"])


def _text(text: str, x: float, y: float) -> str:
    if not text:
        return ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="#1b2733">{escape(text)}</text>\n'


def processes() -> Picture:
    engines = [
        box
        for x, rank in ((330, 0), (510, 1))
        for box in (
            Box(x, 210, 160, 130, f"engine {rank}", "group"),
            Box(x + 15, 236, 130, 36, "EngineCore"),
            Box(x + 15, 296, 60, 36, "worker"),
            Box(x + 85, 296, 60, 36, "worker"),
        )
    ]
    return Picture(
        "Processes of a cluster with two engines of two workers",
        700,
        360,
        [
            Box(20, 40, 100, 40, "clients"),
            Box(240, 30, 130, 60, "ingress|one on each host"),
            Box(480, 30, 130, 60, "coordinator"),
            Box(20, 150, 110, 50, "manager"),
            *engines,
            Box(20, 262, 140, 56, "Ray|actors, placement"),
        ],
        [
            Arrow((120, 60), (240, 60), "HTTP"),
            Arrow((480, 60), (370, 60), "roster, loads"),
            Arrow((320, 90), (400, 210), "requests, tokens", -82, 4, True),
            Arrow((350, 90), (560, 210), "", both=True),
            Arrow((580, 210), (560, 90), "reports, waves", 62, 4, True),
            Arrow((75, 200), (75, 262), "starts", 28, 4),
            Arrow((160, 290), (330, 290), "processes"),
            *(Arrow((x, 272), (x, 296), both=True) for x in (375, 445, 555, 625)),
        ],
    )


def request_path() -> Picture:
    down = ("HTTP server|limits", "body, access|conversion", "InputProcessor|tokens, grammar")
    up = ("OutputProcessor|text, stops", "model runner|sampler", "executor|plans")
    return Picture(
        "The path of a request, from the client to the GPU and back",
        760,
        310,
        [
            *(Box(20 + 186 * i, 40, 150, 54, text) for i, text in enumerate(down)),
            Box(578, 40, 150, 54, "AsyncLLM|RequestPlacer"),
            *(Box(20 + 186 * i, 190, 150, 54, text) for i, text in enumerate(up)),
            Box(578, 190, 150, 54, "scheduler|KV blocks"),
        ],
        [
            *(Arrow((170 + 186 * i, 67), (206 + 186 * i, 67)) for i in range(3)),
            Arrow((653, 94), (653, 190), "EngineCoreRequest", -66, 4),
            *(Arrow((578 - 186 * i, 217), (542 - 186 * i, 217), both=True) for i in range(2)),
            Arrow((653, 244), (653, 280), tip=False),
            Arrow((653, 280), (95, 280), "EngineCoreOutputs, at most one for each step", tip=False),
            Arrow((95, 280), (95, 244)),
            Arrow((95, 190), (95, 94), "response, or events of a stream", 112, 4),
        ],
    )


def membership() -> Picture:
    return Picture(
        "States of a member of the roster, and the changes between them",
        760,
        300,
        [
            Box(20, 125, 90, 40, "ready"),
            Box(220, 125, 110, 40, "active"),
            Box(520, 30, 110, 40, "repairing"),
            Box(520, 125, 110, 40, "leaving"),
            Box(520, 240, 110, 40, "lost", "idle"),
            Box(220, 240, 110, 40, "left", "idle"),
        ],
        [
            Arrow((110, 145), (220, 145), "join"),
            Arrow((330, 135), (520, 135), "leave"),
            Arrow((520, 155), (330, 155), "cancel_leave", 0, 16),
            Arrow((320, 125), (520, 42), "Broken", -40, -6),
            Arrow((520, 62), (330, 128), "end_repair", 46, 14),
            Arrow((560, 125), (560, 70), "Broken", -30, 4),
            Arrow((590, 70), (590, 125), "end_repair", 42, 4),
            Arrow((630, 50), (700, 50), "remove", 2, -6, tip=False),
            Arrow((700, 50), (700, 260), tip=False),
            Arrow((700, 260), (630, 260)),
            Arrow((275, 165), (275, 240), "detach", -32, 4),
            Arrow((520, 165), (330, 250), "detach", -46, 4),
            Arrow((575, 165), (575, 240), "remove", 34, 4),
            Arrow((330, 165), (520, 250), "remove", 62, 4),
        ],
    )


def waves() -> Picture:
    rows = ((0, "bbbb.."), (1, "iibbbb"), (2, "iiiiii"))
    kinds = {"b": ("busy", "request"), "i": ("idle", "dummy"), ".": ("idle", "dummy")}
    boxes = [
        Box(140 + 90 * step, 60 + 56 * rank, 80, 40, kinds[mark][1], kinds[mark][0])
        for rank, marks in rows
        for step, mark in enumerate(marks)
    ]
    names = [Box(20, 60 + 56 * rank, 90, 40, f"engine {rank}") for rank, _ in rows]
    return Picture(
        "One wave of three engines that share experts: each takes part in every step",
        760,
        270,
        [*names, *boxes],
        [
            Arrow((140, 40), (670, 40), "wave: until no engine has a request"),
            Arrow((140, 245), (220, 245), "step", 0, -8),
        ],
    )


def kv_blocks() -> Picture:
    shared = [Box(140 + 90 * i, 110, 80, 40, f"block {i}", "busy") for i in range(3)]
    own = [
        Box(410, 40, 80, 40, "block 3", "busy"),
        Box(410, 180, 80, 40, "block 4", "busy"),
        Box(500, 180, 80, 40, "block 5", "busy"),
    ]
    return Picture(
        "KV blocks of two requests with one prefix",
        760,
        260,
        [
            Box(20, 40, 90, 40, "request A"),
            Box(20, 180, 90, 40, "request B"),
            *shared,
            *own,
            Box(600, 40, 140, 40, "free, still cached", "idle"),
            Box(600, 110, 140, 40, "free", "idle"),
        ],
        [
            Arrow((110, 70), (140, 115)),
            Arrow((110, 190), (140, 145)),
            Arrow((400, 115), (415, 80)),
            Arrow((400, 145), (415, 180)),
            Arrow((490, 60), (600, 60), "A finishes"),
            Arrow((670, 80), (670, 110), "evicted", 34, 4),
        ],
    )


PICTURES = {
    "processes": processes,
    "request-path": request_path,
    "membership": membership,
    "waves": waves,
    "kv-blocks": kv_blocks,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(draw()))


if __name__ == "__main__":
    main()
