"""`python -m tests.benchmarks.draft_model`: output tokens a second with drafts by a small model,
over those without.

The model is nano in the weights of a larger one: all added weights are zero, so it answers as nano
does, and a step takes as long as one of a model of that size. Its draft models are nano itself,
which is always right, and the first layers of nano, which are often wrong. As in `drafts.py`, two
engines answer the same prompts in turn, greedy, and the answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM
from tests.benchmarks.drafts import NANO, compare

HIDDEN, INTERMEDIATE = 1024, 6144
"""The sizes of 75 million parameters; nano has 0.9 million."""
Weights = dict[str, torch.Tensor]


def write(folder: Path, weights: Weights, **keys: Any) -> str:
    """Writes a copy of nano with these weights and these values in config.json; returns its
    folder."""
    shutil.copytree(NANO, folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)


def _sizes() -> tuple[dict[str, Any], dict[int, int]]:
    """Returns nano's config, and a map from its sizes to the enlarged ones."""
    config = json.loads((NANO / "config.json").read_text())
    return config, {config["hidden_size"]: HIDDEN, config["intermediate_size"]: INTERMEDIATE}


def enlarge_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Enlarges a tensor with zeros. Norms divide by the mean over all elements, so their weights
    shrink."""
    config, sizes = _sizes()
    shape = [sizes.get(size, size) for size in tensor.shape]
    if "q_proj" in name:  # the heads, and so its outputs, are not enlarged
        shape[0] = len(tensor)
    if "o_proj" in name:
        shape[1] = tensor.shape[1]
    found = torch.zeros(shape, dtype=tensor.dtype)
    found[tuple(slice(size) for size in tensor.shape)] = tensor
    is_norm = name.endswith(("norm.weight", "layernorm.weight"))
    return found * (config["hidden_size"] / HIDDEN) ** 0.5 if is_norm else found


def enlarged(folder: Path, weights: Weights, **keys: Any) -> str:
    """Writes an enlarged model; `keys` are other changes of config.json. The epsilons of norms
    shrink, too."""
    config, _ = _sizes()
    return write(
        folder,
        {name: enlarge_tensor(name, tensor) for name, tensor in weights.items()},
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        rms_norm_eps=config["rms_norm_eps"] * config["hidden_size"] / HIDDEN,
        **keys,
    )


def first_layers(folder: Path, weights: Weights, count: int) -> str:
    def is_kept(name: str) -> bool:
        parts = name.split(".")
        return parts[1] != "layers" or int(parts[2]) < count

    kept = {name: tensor for name, tensor in weights.items() if is_kept(name)}
    return write(folder, kept, num_hidden_layers=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    weights = load_file(str(NANO / "model.safetensors"))
    with tempfile.TemporaryDirectory() as top:
        large = enlarged(Path(top, "large"), weights)
        models = {
            "nano": str(NANO),
            "three layers of nano": first_layers(Path(top, "three"), weights, 3),
        }
        print("| draft model: answers | rows | without, tokens/s | with | ratio | accepted |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, small in models.items():
            options = {"drafts.method": "model", "drafts.model": {"path": small}}
            with LLM(large) as plain, LLM(large, **options) as drafting:
                for rows in (1, 8):
                    line = compare(plain, drafting, "mixed", rows, args.pairs)
                    print(line.replace("mixed", f"{name}: mixed"), flush=True)


if __name__ == "__main__":
    main()
