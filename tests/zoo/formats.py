"""Runs every quantized format with several architectures: `python -m tests.zoo.formats --page
docs/reference/quantization.md`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.loader import load_weights
from swell.worker.model_interfaces import moe_layers
from swell.worker.models import build_model
from tests.worker.quantization import writers
from tests.worker.quantization.copies import copies, is_projection

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "quantization.md"
BEGIN, END = "<!-- table: python -m tests.zoo.formats -->\n", "<!-- end of the table -->\n"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "phi3", "olmo2")
"""The architectures of the table: names in `tiny_models`."""


def outcome(form: str, family: str) -> str:
    """Returns the backends whose parameters equal those of the dequantized copy: `native`,
    `generic` or both. Returns `no` if the architecture is refused, and `FAILED` for other
    parameters."""
    with tempfile.TemporaryDirectory() as name:
        quantized, plain = copies(Path(name), writers.FORMATS[form], family, is_projection)
        served = []
        for backend, label in (("native", "native"), ("transformers", "generic")):
            try:
                expected = _parameters(plain, backend)
            except ValueError:
                continue
            found = _parameters(quantized, backend)
            if not all(torch.equal(found[name], expected[name]) for name in expected):
                return "FAILED"
            served.append(label)
    return ", ".join(served) or "no"


def _parameters(folder: Path, backend: str) -> dict[str, torch.Tensor]:
    config = ModelConfig(path=str(folder), backend=backend)
    mesh = Mesh.build(ParallelConfig(), 0)
    model: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    load_weights(model, config)
    experts = {
        f"{layer}.{expert}.{part}": weight
        for layer, moe in enumerate(moe_layers(model))
        for expert, weights in moe.local_experts.items()
        for part, weight in enumerate(weights)
    }
    return {**dict(model.named_parameters()), **experts}


def table(cells: Mapping[tuple[str, str], str]) -> str:
    rows = [["format", *FAMILIES], ["---"] * (len(FAMILIES) + 1)]
    rows += [[f"`{form}`", *(cells[form, each] for each in FAMILIES)] for form in writers.FORMATS]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """Returns (format, architecture) -> the page's cell."""
    lines = page[page.index(BEGIN) + len(BEGIN) : page.index(END)].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        (row[0].strip("`"), family): cell
        for row in rows
        for family, cell in zip(head[1:], row[1:], strict=True)
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.formats", description=__doc__)
    parser.add_argument("--page", type=Path, help="replace the table of this page")
    args = parser.parse_args(arguments)
    cells = {}
    for form in writers.FORMATS:
        for family in FAMILIES:
            cells[form, family] = outcome(form, family)
            print(f"{form:28} {family:12} {cells[form, family]}", flush=True)
    if args.page:
        text = args.page.read_text()
        pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
        args.page.write_text(pattern.sub(lambda _: BEGIN + table(cells) + END, text))
    return 1 if "FAILED" in cells.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
