"""Opens mutants of small GGUF files, within a limit of memory:

    python -m tests.support.gguf.mutants FOLDER COUNT

A mutant differs in its metadata, in its tensors, or in its bytes. A seed determines it. The program
prints how many mutants were unpacked, and how many were refused.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from swell.configs.files.gguf.header import GgufError
from swell.configs.files.gguf.unpacked import unpacked
from tests.support.gguf.files import TYPES, write_gguf
from tests.support.gguf.small import ARCHITECTURES, small_model

MEMORY_BYTES = 2**30
CPU_S = 300
MAX_LINE_CHARS = 1000

_NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3 + struct.pack("<IQ", 4, 0)
_VALUES: list[Any] = [
    *(0, 1, -1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 1e-45, 3.4028234663852886e38, 1e39, -1e300, 0.5),
    *(float("nan"), float("inf"), float("-inf"), True, False),
    *("", "x", "a\nb", "\u2028\u202e", "llama", "gpt2", "x" * 200_000, "\0"),
    *([], [0], [1, 1], [1, 2], ["a"], ["a", "a"], [""], [0.5], [float("nan")], [True], [[1], [2]]),
    *([[]], list(range(50_000)), _NESTED, struct.pack("<IIQ", 9, 8, 2**62)),
    *(struct.pack("<IIQ", 9, kind, 2**22) for kind in (0, 8, 9)),
    *(struct.pack("<IB", 7, 2), struct.pack("<I", 13)),
]
_LONG = [-(2**63), 2**31, 2**32, 2**63 - 1, 2**64 - 1, 1e39, -1e300]
"""The values that an item of a list cannot have."""
_COUNTS = [0, 1, 2, 2**8, 2**16, 2**22, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
_KEYS = [
    "general.architecture",
    "general.alignment",
    *(f"general.sampling.{key}" for key in ("temp", "top_k", "min_p")),
    *(f"split.{key}" for key in ("count", "no", "tensors.count")),
    *(f"tokenizer.{key}" for key in ("chat_template", "ggml.pre", "ggml.model", "ggml.tokens")),
    *(f"tokenizer.ggml.{key}" for key in ("scores", "token_type", "merges", "add_bos_token")),
    *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "padding", "unknown")),
    *(f"ARCH.rope.{key}" for key in ("dimension_count", "freq_base", "freq_base_swa")),
    *(f"ARCH.rope.scaling.{key}" for key in ("type", "factor", "original_context_length")),
    "ARCH.rope.scaling.attn_factor",
    *(f"ARCH.{key}" for key in ("expert_count", "block_count", "attn_logit_softcapping")),
    *(f"ARCH.attention.{key}" for key in ("head_count", "key_length", "sliding_window")),
]
_NAMES = [
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    *("token_embd.weight", "output.weight", "x", "a\nb", "", "blk.0.x.weight", "blk."),
    *(f"blk.{number}.attn_q.weight" for number in ("9", "99999999", "-1", "9" * 5000, "٣", "00")),
    *("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.bias", "blk.1.attn_norm.bias"),
]


_model = cache(small_model)


def _metadata_mutant(metadata: dict[str, Any], own: random.Random) -> dict[str, Any]:
    changed = dict(metadata)
    for _ in range(own.choice((1, 1, 2, 4))):
        key = own.choice([*changed, *_KEYS]).replace("ARCH", metadata["general.architecture"])
        value = changed.get(key)
        match own.randrange(4):
            case 0 if key in changed:
                del changed[key]
            case 1 if isinstance(value, list) and value:
                item = own.choice(_VALUES)
                items = list(value)
                is_alike = type(item) is type(items[0]) and item not in _LONG
                items[own.randrange(len(items))] = item if is_alike else items[0]
                changed[key] = items
            case 2 if isinstance(value, list) and value:
                changed[key] = value[: own.randrange(len(value))]
            case _:
                changed[key] = own.choice(_VALUES)
    return changed


def _tensors_mutant(tensors: dict[str, Any], own: random.Random) -> dict[str, Any]:
    changed = dict(tensors)
    for _ in range(own.choice((1, 1, 2))):
        name = own.choice(list(changed))
        kind, shape, data = changed[name]
        match own.randrange(5):
            case 0:
                del changed[name]
            case 1:
                changed[own.choice(_NAMES)] = changed.pop(name)
            case 2:
                lengths = [own.choice((1, 2, 16, 32, *_COUNTS)) for _ in range(own.randrange(1, 5))]
                changed[name] = kind, lengths, data
            case 3:
                changed[name] = own.choice(list(TYPES)), shape, data
            case _:
                numbers = [
                    own.choice((0.0, 1.0, 8.0, float("nan"), float("inf"))) for _ in range(8)
                ]
                changed[own.choice(_NAMES[:3])] = "F32", (8,), struct.pack("<8f", *numbers)
    return changed


def _bytes_mutant(data: bytes, own: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(own.choice((1, 1, 2, 8))):
        at = int(len(changed) * own.random() ** 3)  # most of them are in the first entries
        match own.randrange(5):
            case 0:
                changed[at : at + 1] = own.randbytes(1)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", own.choice(_COUNTS))
            case 2:
                changed[at : at + 4] = struct.pack("<I", own.choice((*range(13), 2**31, 2**32 - 1)))
            case 3:
                changed[at : at + own.randrange(1, 64)] = b""
            case _:
                changed[at:at] = own.randbytes(own.randrange(1, 64))
    return bytes(changed[: own.randrange(len(changed))] if own.random() < 0.05 else changed)


def write_mutant(path: Path, seed: int) -> None:
    """Writes the mutant of a seed. Its tensors may lie in a hole of the file."""
    own = random.Random(seed)
    metadata, tensors = _model(own.choice(ARCHITECTURES))
    place = own.randrange(3)
    if place == 0:
        metadata = _metadata_mutant(metadata, own)
    if place == 1:
        tensors = _tensors_mutant(dict(tensors), own)
    write_gguf(path, metadata, tensors)
    if place == 2:
        path.write_bytes(_bytes_mutant(path.read_bytes(), own))
    if own.random() < 0.3:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 2**42)


def outcome(path: Path) -> str:
    """Returns `unpacked` or `refused`. Raises AssertionError for a refusal that is not one line."""
    try:
        folder = unpacked(path)
    except GgufError as error:
        text = str(error)
        assert len(text) < MAX_LINE_CHARS and len(text.splitlines()) == 1, text[:MAX_LINE_CHARS]
        assert str(path) in text, text
        return "refused"
    config = json.loads((folder / "config.json").read_text(), parse_constant=_not_a_number)
    assert config["num_hidden_layers"] == 2 and config["vocab_size"] > 0
    json.loads((folder / "generation_config.json").read_text(), parse_constant=_not_a_number)
    json.loads((folder / "tokenizer.json").read_text(), parse_constant=_not_a_number)
    return "unpacked"


def _not_a_number(text: str) -> None:
    raise AssertionError(f"{text} is not valid JSON")


def main(folder: Path, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    tempfile.tempdir = str(folder)
    found: Counter[str] = Counter()
    for seed in range(count):
        path = folder / "m.gguf"
        write_mutant(path, seed)
        try:
            found[outcome(path)] += 1
        except Exception as error:
            error.add_note(f"the mutant of seed {seed}")
            raise
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
