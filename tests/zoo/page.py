"""Writes docs/reference/models.md: the result of every architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import transformers

from tests.zoo.run import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
HEAD = """# Models

This page is for people who want to know whether a model is served: all causal language models
of transformers {version}, and all models that wrap one with towers for images, each with
the reason if loading it is refused. It is written by

    python -m tests.zoo --splits --page docs/reference/models.md

For every architecture this program builds a small random model, with attention windows and chunks
shorter than its prompts, runs it through an engine (chunked prompts, several rows a step,
decoding), and compares tokens and log probabilities with eager transformers, in float32. A model
either has equal results, or is refused with a reason. `make test` tests a fixed part of the list.

- **native**: `model.backend=native`, which `auto` selects where it exists.
- **generic**: `model.backend=transformers`, with the paged cache of Swell; **stages** and
  **ranks**: the same with `parallel.pipeline=2` and `parallel.tensor=2`.
- **why refused**: the reason, if the model is refused.
- A wrapper (`...ForConditionalGeneration`) is served without its towers: only the text model is
  loaded, and the log names the towers that are skipped. If the text model is an architecture with
  a native model (Mistral 3, LLaVA, InternVL), that is used. Requests with images are refused.
- The config is a small variant of the default of its class. If the default has no sliding window, a
  second model with one was run; a different result is in parentheses. Other values of its keys are
  checked by the same rules when a model is loaded.
- Quantized checkpoints: [quantization.md](quantization.md). GGUF files:
  [gguf.md](../operate/gguf.md).
- Pooling models (embeddings, rerankers, classifiers): [pooling.md](../guide/pooling.md).
- LoRA adapters of the dense native models: [adapters.md](../guide/adapters.md).

{served} of {total} model types are served ({native} of them natively), and {refused} are refused.

"""
COLUMNS = ("model_type", "architecture", "native", "generic", "stages", "ranks", "why refused")
WHY_CHARS = 220


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    architecture: str
    native: str
    generic: str
    stages: str
    ranks: str
    why: str

    def __str__(self) -> str:
        return "| " + " | ".join(astuple(self)) + " |"


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Replaces the page's rows by `outcomes`; rows without an outcome stay if they are of the same
    version."""
    text = path.read_text() if path.is_file() else ""
    rows = rows_of(text) if version_of(text) == transformers.__version__ else {}
    for kind in sorted({o.case.kind for o in outcomes}):
        row, old = row_of(kind, outcomes), rows.get(kind)
        splits = {o.case.split for o in outcomes if o.case.kind == kind}
        if old is not None and splits == {""} and "yes" in row.generic:
            row = replace(row, stages=old.stages, ranks=old.ranks)
        rows[kind] = row
    path.write_text(render([rows[kind] for kind in sorted(rows)]))


def render(rows: Sequence[Row]) -> str:
    served = [row for row in rows if row.native.startswith("yes") or row.generic.startswith("yes")]
    head = HEAD.format(
        version=transformers.__version__,
        total=len(rows),
        served=len(served),
        native=sum(row.native.startswith("yes") for row in rows),
        refused=len(rows) - len(served),
    )
    table = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *map(str, rows)]
    return head + "\n".join(table) + "\n"


def row_of(kind: str, outcomes: Iterable[Outcome]) -> Row:
    own = [o for o in outcomes if o.case.kind == kind]
    why = {short(o.note): None for o in own if o.status == "refused" and not o.case.split}
    return Row(
        kind,
        own[0].architecture,
        _cell(own, "native", ""),
        _cell(own, "transformers", ""),
        _cell(own, "transformers", "2 stages"),
        _cell(own, "transformers", "2 ranks"),
        "; ".join(why),
    )


def _cell(own: Iterable[Outcome], backend: str, split: str) -> str:
    words = {"equal": "yes", "refused": "no", "failed": "FAILED"}
    found = {
        o.case.variant: words[o.status]
        for o in own
        if o.case.backend == backend and o.case.split == split
    }
    plain = found.pop("", "-")
    others = [f"{word} ({variant})" for variant, word in found.items() if word != plain]
    return ", ".join([plain, *others])


def short(note: str) -> str:
    """Returns only the reason: the row itself names what is refused, and the message has the way
    out."""
    text = re.sub(r"^architecture '\w+' (cannot be served|is not a causal LM[^:]*): ", "", note)
    text = re.sub(r", which the paged KV cache does not support;.*$", "", text)
    text = text.replace("|", "/").replace("model 'FOLDER' ", "")
    return text if len(text) <= WHY_CHARS else f"{text[:WHY_CHARS]}..."


def rows_of(text: str) -> dict[str, Row]:
    """Returns the page's table, by model type."""
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cell[0]: Row(*cell) for cell in cells if tuple(cell) != COLUMNS}


def version_of(text: str) -> str:
    found = re.search(r"models\s+of transformers ([^\s,]+)", text)
    return found.group(1) if found else ""
