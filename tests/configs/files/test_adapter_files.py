"""Adapter files: PEFT's files are read, and everything else is refused with a reason."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.configs.files.adapter_files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    WEIGHTS_NAME,
    adapter_digest,
    adapters_of,
    check_adapter,
    read_adapter,
)
from swell.configs.lora import MAX_ADAPTERS, LoraConfig
from swell.configs.schema import ConfigError, load
from tests.support.weights import adapters

_KNOWN_VALUES = {
    *("peft_type", "bias", "init_lora_weights", "target_modules", "r", "rank_pattern"),
    *("alpha_pattern", "lora_alpha"),
}
"""Keys for which some values are accepted."""
Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"
SHAPES = {Q: (12, 8), GATE: (20, 8)}
HEADER = b'{"x":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'


def write(folder: Path, **settings: Any) -> Path:
    return adapters.make_adapter(folder, SHAPES, **settings)


def settings_of(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def read(folder: Path, max_rank: int = 16) -> Any:
    return read_adapter("mine", str(folder), max_rank)


def test_each_module_has_its_rank_and_scale(tmp_path: Path) -> None:
    write(tmp_path, rank=4, alpha=8, rank_pattern={"gate_proj": 9})
    found = read(tmp_path).modules
    assert {name: (one.rank, one.scale) for name, one in found.items()} == {
        Q: (4, 2.0),
        GATE: (9, pytest.approx(8 / 9)),
    }
    settings_of(tmp_path, use_rslora=True, alpha_pattern={"layers.0.self_attn.q_proj": 3})
    found = read(tmp_path).modules
    assert found[Q].scale == pytest.approx(3 / 2)
    assert found[GATE].scale == pytest.approx(8 / 3)


def test_a_pattern_of_targets_is_not_run(tmp_path: Path) -> None:
    """A pattern of target modules is not evaluated. PEFT accepts one; the weights show which
    modules it matched."""
    write(tmp_path)
    settings_of(tmp_path, target_modules="(a+)+$")
    found = read(tmp_path)
    assert set(found.modules) == set(SHAPES)
    assert found.adapts(Q) and not found.adapts("model.layers.9.mlp.up_proj")


def test_patterns_name_modules_by_their_last_parts(tmp_path: Path) -> None:
    write(tmp_path, rank=4, alpha=8)
    for pattern, scale in {
        "q_proj": 1.0,
        "^model.layers.0.self_attn.q_proj": 1.0,
        "^q_proj": 2.0,
        "_proj": 2.0,
        "0.self_attn.q_proj": 1.0,
    }.items():
        settings_of(tmp_path, alpha_pattern={pattern: 4})
        assert read(tmp_path).modules[Q].scale == scale, pattern


def test_targets_are_the_last_parts_of_modules(tmp_path: Path) -> None:
    write(tmp_path, targets=["q_proj", "mlp.gate_proj"])
    settings_of(tmp_path, target_modules=["q_proj", "mlp.gate_proj"])
    write(tmp_path)
    settings_of(tmp_path, target_modules=["self_attn.q_proj", "mlp.gate_proj"])
    found = read(tmp_path)
    assert found.adapts("model.layers.7.self_attn.q_proj")
    assert not found.adapts("model.layers.7.self_attn.oq_proj")
    assert not found.adapts("model.layers.7.self_attn.k_proj")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type='IA3'"),
    "no method": ({"peft_type": None}, "peft_type=None"),
    "DoRA": ({"use_dora": True}, "use_dora=True"),
    "biases": ({"bias": "all"}, "bias='all'"),
    "biases of its own": ({"lora_bias": True}, "lora_bias=True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "transposed weights": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "some layers": ({"layers_to_transform": [0]}, "layers_to_transform"),
    "the first layer": ({"layers_to_transform": 0}, "layers_to_transform=0"),
    "a future number": ({"shift": 0.0}, r"shift=0\.0"),
    "copied layers": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "parameters": ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
    "excluded modules": ({"exclude_modules": ["q_proj"]}, "exclude_modules"),
    "trained tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "a key of the future": ({"use_magic": {"a": 1}}, "use_magic"),
    "a key of half a character": ({"use_\ud800": 1}, "use_.ud800"),
    "a long key": ({"k" * 10_000: 1}, "'k{80}'\\.\\.\\.=1"),
    "weights that were changed": ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
    "a long pattern": ({"target_modules": "a" * 10_001}, "10001 names or characters"),
    "no targets": ({"target_modules": []}, "target_modules has 0"),
    "targets missing": ({"target_modules": None}, "target_modules"),
    "targets of another file": ({"target_modules": ["k_proj"]}, "does not contain"),
    "a text as rank": ({"r": "4"}, "r"),
    "no rank": ({"r": None}, "r"),
    "rank 0": ({"r": 0}, "rank 0 is outside"),
    "a negative rank": ({"r": -4}, "rank -4 is outside"),
    "a huge rank": ({"r": 10**30}, "r"),
    "another rank": ({"r": 5}, "the rank 5"),
    "a rank pattern": ({"rank_pattern": {"q_proj|k_proj": 4}}, "not the name of a module"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+$": 4}}, "not the name of a module"),
    "rank 0 of a pattern": ({"rank_pattern": {"q_proj": 0}}, "rank 0 is outside"),
    "alpha 0": ({"lora_alpha": 0}, "lora_alpha=0"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha=nan"),
    "alpha infinite": ({"lora_alpha": math.inf}, "lora_alpha=inf"),
    "a huge alpha": ({"alpha_pattern": {"q_proj": 1e300}}, "lora_alpha=1e\\+300"),
    "an endless alpha": ({"lora_alpha": 10**400}, "lora_alpha|JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_features_are_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, text = REFUSED[name]
    write(tmp_path)
    settings_of(tmp_path, **changes)
    with pytest.raises(ConfigError, match=text) as caught:
        read(tmp_path)
    assert "'mine'" in str(caught.value) and len(str(caught.value)) < 600


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
_KEYS = st.sampled_from(
    sorted(
        key
        for changes, _ in REFUSED.values()
        for key in changes
        if key not in _KNOWN_VALUES and len(key) < 40 and key.isascii()
    )
)


@settings(max_examples=150)
@given(key=_KEYS | st.text("abcdefgh_", min_size=1, max_size=8), value=_VALUES)
def test_a_key_without_support_must_be_empty(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A key that is not read may only have an empty value: null, false and empty values request
    nothing; a number does, even 0, which may be an index."""
    folder = tmp_path_factory.mktemp("adapter")
    write(folder)
    settings_of(folder, **{key: value})
    asks_for_nothing = value is None or value is False or value in ("", [], {})
    with contextlib.nullcontext() if asks_for_nothing else pytest.raises(ConfigError, match=key):
        read(folder)


CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "long": b" " * (MAX_CONFIG_BYTES + 1),
    "long number": b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_broken_configuration_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(CONFIGS[name])
    with pytest.raises(ConfigError, match=r"adapter_config.json"):
        read(tmp_path)


def size(value: int) -> bytes:
    return value.to_bytes(8, "little")


FILES: dict[str, bytes] = {
    "empty": b"",
    "a few bytes": b"abc",
    "zeros": bytes(64),
    "a header longer than the file": size(2**62) + b"{}",
    "a header longer than allowed": size(MAX_HEADER_BYTES + 1) + b"{}",
    "no JSON": size(3) + b"\xff{}",
    "deep": size(90_000) + b"[" * 90_000,
    "a list": size(2) + b"[]",
    "no tensors": size(2) + b"{}",
    "another name": size(len(HEADER)) + HEADER + bytes(4),
    "a pickle": b"\x80\x04\x95cos\nsystem\n.",
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_of_weights_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(FILES[name])
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors|the tensor 'x'"):
        read(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128], **changes}


PLACES: dict[str, dict[str, Any]] = {
    "behind the end": entry(data_offsets=[10**6, 10**6 + 128]),
    "negative": entry(data_offsets=[-128, 0]),
    "reversed": entry(data_offsets=[128, 0]),
    "too short": entry(data_offsets=[0, 64]),
    "odd": entry(data_offsets=[1, 129]),
    "integers": entry(dtype="I32"),
    "one dimension": entry(shape=[32]),
    "three dimensions": entry(shape=[1, 4, 8]),
    "nothing": entry(shape=[0, 8], data_offsets=[0, 0]),
    "a negative size": entry(shape=[-4, -8]),
    "a huge size": entry(shape=[2**40, 2**40]),
    "an unknown key": entry(more=1),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_in_the_wrong_place_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[f"base_model.model.{Q}.lora_A.weight"] = PLACES[name]
    text = json.dumps(header).encode()
    path.write_bytes(size(len(text)) + text + data[8 + length :])
    with pytest.raises(ConfigError):
        read(tmp_path)


NAMES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a magnitude": lambda t: t.update({f"base_model.model.{Q}.lora_magnitude_vector": t["a"]}),
    "an embedding": lambda t: t.update(
        {"base_model.model.model.embed_tokens.lora_embedding_A": t["a"]}
    ),
    "a whole weight": lambda t: t.update({"base_model.model.lm_head.weight": t["a"]}),
    "another prefix": lambda t: t.update({f"{Q}.lora_A.weight": t["a"]}),
    "a path": lambda t: t.update({"base_model.model.../../x.lora_A.weight": t["a"]}),
    "one matrix alone": lambda t: t.pop(f"base_model.model.{Q}.lora_B.weight"),
}


@pytest.mark.parametrize("name", NAMES)
def test_other_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    a, b = torch.zeros(4, 8), torch.zeros(12, 4)
    key = f"base_model.model.{Q}.lora_"
    tensors = {f"{key}A.weight": a, f"{key}B.weight": b, "a": a + 1}
    NAMES[name](tensors)
    del tensors["a"]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    given = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    adapters.write_adapter(tmp_path, given, tensors)
    with pytest.raises(ConfigError, match=r"is not supported|has no lora_B"):
        read(tmp_path)


def test_an_adapter_of_a_large_rank_is_refused(tmp_path: Path) -> None:
    write(tmp_path, rank=17)
    with pytest.raises(ConfigError, match=r"rank 17, above lora.max_rank=16; raise it"):
        read(tmp_path)
    assert read(tmp_path, 17).modules[Q].rank == 17


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read"):
        read(tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match="convert it to safetensors"):
        read(tmp_path)


def spoil(file: Path, how: str) -> None:
    file.unlink()
    if how == "a fifo":
        os.mkfifo(file)
    elif how == "a device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as large:
            large.truncate(2**40)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("how", ["a fifo", "a device", "huge"])
def test_endless_files_are_refused_and_not_read(tmp_path: Path, name: str, how: str) -> None:
    """Reading such a file would block, or would use up the memory."""
    write(tmp_path)
    spoil(tmp_path / name, how)
    why = f"{name} .*({2**40} bytes|not a regular file)"
    with pytest.raises(ConfigError, match=why):
        read(tmp_path)
    with pytest.raises(ConfigError, match=why):
        adapter_digest("mine", str(tmp_path))


def test_a_digest_covers_both_files(tmp_path: Path) -> None:
    lora = LoraConfig(adapters={"mine": str(write(tmp_path))})
    first = adapters_of(lora)["mine"]
    assert adapters_of(lora) == {"mine": first}
    assert check_adapter("mine", str(tmp_path), 16) == first
    settings_of(tmp_path, lora_alpha=3)
    second = adapters_of(lora)["mine"]
    write(tmp_path, seed=1)
    assert len({first.digest, second.digest, adapters_of(lora)["mine"].digest}) == 3


def test_adapter_folders_are_relative_to_the_configuration(tmp_path: Path) -> None:
    write(tmp_path / "mine")
    path = tmp_path / "serve.yaml"
    path.write_text("model: {path: m}\nlora: {adapters: {mine: mine, hub: elsewhere}}\n")
    lora = load(str(path)).lora
    assert lora.adapters == {"mine": str(tmp_path / "mine"), "hub": "elsewhere"}
    assert lora.max_rank == 16


WRONG: dict[str, dict[str, Any]] = {
    "the name 'm'": {"lora.adapters": {"m": "x"}},
    "model.backend=transformers": {"model.backend": "transformers"},
    "model.runner=pooling": {"model.runner": "pooling"},
    "parallel.expert=true": {"parallel.expert": True},
    "max_rank=65": {"lora.max_rank": 65},
    "max_rank=0": {"lora.max_rank": 0},
    "adapters": {"lora.adapters": {str(n): "x" for n in range(MAX_ADAPTERS + 1)}},
    "lora.adapters": {"lora.adapters": {"": "x"}},
    "control characters": {"lora.adapters": {"a\nb": "x"}},
}


@pytest.mark.parametrize("text", WRONG)
def test_a_configuration_that_no_model_serves_is_refused(text: str) -> None:
    settings = {"lora.adapters": {"mine": "x"}, **WRONG[text]}
    with pytest.raises(ConfigError, match=text):
        load({"model": {"path": "m"}}, settings)
