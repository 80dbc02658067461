"""The kinds behave as declared: their tokenizers preserve text, and their templates render
conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from swell.cluster.text.tokens.tokenizer import load_eos_token_ids, load_tokenizer
from tests.model_kinds import MODEL_KINDS, model_kind

pytestmark = pytest.mark.slow

TEXT = "The sky is blue,\n    return x\t你好 😀 {}"
QUESTION = [{"role": "user", "content": "How is the sky?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "aB3dE6gH9",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "sky"}},
}
AFTER_CALL: list[dict[str, Any]] = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "7"},
]


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_a_model_kind_loads_like_a_model_folder(name: str) -> None:
    one = model_kind(name)
    read = load_tokenizer(str(one.folder()))
    ids = read.encode(TEXT)
    assert read.decode(ids, skip_special_tokens=True) == TEXT
    assert max(ids) < one.vocab_size
    assert set(one.end_ids) <= set(load_eos_token_ids(str(one.folder()), read))
    prompt = read.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert prompt == one.tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert "How is the sky?" in prompt


READ_WITHOUT_TORCH = """
import json, sys
from swell.cluster.text.tokens.tokenizer import import_without_torch, load_tokenizer
import_without_torch()
folders, text, question = json.load(sys.stdin)
for folder in folders:
    read = load_tokenizer(folder)
    asked = read.apply_chat_template(question, add_generation_prompt=True)
    print(json.dumps([read.encode(text), asked["input_ids"], read.eos_token_id]))
assert "torch" not in sys.modules
import torch
"""


def test_a_tokenizer_needs_no_torch() -> None:
    """A tokenizer needs no torch: an ingress, which does not import torch, reads every kind like a
    process that does."""
    folders = [str(model_kind(name).folder()) for name in MODEL_KINDS]
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_TORCH],
        input=json.dumps([folders, TEXT, QUESTION]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    for folder, line in zip(folders, done.stdout.splitlines(), strict=True):
        read = load_tokenizer(folder)
        prompt = read.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
        assert json.loads(line) == [read.encode(TEXT), prompt, read.eos_token_id]


@pytest.mark.parametrize("name", [name for name in MODEL_KINDS if model_kind(name).tools])
def test_a_template_shows_tools_and_calls(name: str) -> None:
    shown = model_kind(name).tokenizer.apply_chat_template(
        AFTER_CALL, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    before, _, behind = shown.partition("How is the sky?")
    assert "look" in before + behind
    assert "sky" in behind and "7" in behind
