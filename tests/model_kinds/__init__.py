"""Tokenizers of every common kind, each with its chat template and a tiny random model.

`python -m tests.model_kinds FOLDER` writes them as model folders. The templates follow the
published rules of their models.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.model_kinds import tokenizers

TEMPLATES = Path(__file__).parent / "templates"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
THINK = ["<think>", "</think>"]
LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
MISTRAL = [
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
]
TEKKEN = ["<unk>", "<s>", "</s>", *MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
PHI4 = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PHI4_PLAIN = ["<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|/tool|>", "<|tool_response|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
DEEPSEEK_PLAIN = [
    *["<｜User｜>", "<｜Assistant｜>"],
    *[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ],
    *["<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"],
    *["<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"],
]
GLM = [
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]
GLM_PLAIN = [
    *QWEN_PLAIN,
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"],
]
KIMI = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
    "[UNK]",
]
KIMI_PLAIN = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
HARMONY = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
]


class ModelKind:
    """One kind of tokenizer with its template and formats."""

    def __init__(
        self,
        name: str,
        build: Callable[[], Tokenizer],
        *,
        eos: str,
        bos: str | None = None,
        ends: tuple[str, ...] = (),
        tools: str | None = None,
        reasoning: str | None = None,
    ) -> None:
        """`ends`: tokens besides `eos` that end an answer, as in generation_config.json. `tools`,
        `reasoning`: the formats that must be detected from the template."""
        self.name = name
        self.tools = tools
        self.reasoning = reasoning
        self._build = build
        self._eos = eos
        self._bos = bos
        self._ends = (eos, *ends)

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text().removesuffix("\n")

    @cached_property
    def tokenizer(self) -> Any:
        """Returns the tokenizer as an object of transformers."""
        from transformers import PreTrainedTokenizerFast

        made = PreTrainedTokenizerFast(
            tokenizer_object=self._build(),
            eos_token=self._eos,
            bos_token=self._bos,
            clean_up_tokenization_spaces=False,
        )
        made.chat_template = self.template
        return made

    @property
    def end_ids(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(text) for text in self._ends]

    @property
    def vocab_size(self) -> int:
        """Returns the model's vocabulary size: a few rows more than the tokenizer has tokens, as in
        many models."""
        return (len(self.tokenizer) // 16 + 1) * 16

    def folder(self) -> Path:
        """Returns the folder of a model with random weights; made once, removed with the
        process."""
        return _folder(self.name)

    def write(self, folder: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.end_ids[0],
            **SHAPE,
        )
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        torch.random.set_rng_state(state)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": self.end_ids}))


_ALL = [
    ModelKind("llama2", lambda: tokenizers.sentencepiece(legacy=True), bos="<s>", eos="</s>"),
    ModelKind(
        "llama3",
        lambda: tokenizers.byte_level(LLAMA3, bos="<|begin_of_text|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>"),
        tools="llama3",
    ),
    ModelKind(
        "qwen3",
        lambda: tokenizers.byte_level(QWEN, [*QWEN_PLAIN, *THINK]),
        eos="<|im_end|>",
        ends=("<|endoftext|>",),
        tools="hermes",
        reasoning="think",
    ),
    ModelKind(
        "qwen3_coder",
        lambda: tokenizers.byte_level(QWEN, QWEN_PLAIN),
        eos="<|im_end|>",
        ends=("<|endoftext|>",),
        tools="qwen3_coder",
    ),
    ModelKind(
        "mistral_v3",
        lambda: tokenizers.sentencepiece(MISTRAL, legacy=False),
        bos="<s>",
        eos="</s>",
        tools="mistral",
    ),
    ModelKind(
        "mistral_v7",
        lambda: tokenizers.byte_level(TEKKEN, bos="<s>"),
        bos="<s>",
        eos="</s>",
        tools="mistral",
    ),
    ModelKind(
        "mistral_v13",
        lambda: tokenizers.byte_level(
            [*TEKKEN, "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"], bos="<s>"
        ),
        bos="<s>",
        eos="</s>",
        tools="mistral",
        reasoning="mistral",
    ),
    ModelKind("gemma", tokenizers.gemma, bos="<bos>", eos="<eos>", ends=("<end_of_turn>",)),
    ModelKind(
        "phi3",
        lambda: tokenizers.sentencepiece(PHI3, legacy=True),
        bos="<s>",
        eos="<|endoftext|>",
        ends=("<|end|>",),
    ),
    ModelKind(
        "phi4",
        lambda: tokenizers.byte_level(PHI4, PHI4_PLAIN),
        eos="<|endoftext|>",
        ends=("<|end|>",),
        tools="phi4",
    ),
    ModelKind(
        "deepseek_r1",
        lambda: tokenizers.byte_level(DEEPSEEK, [*DEEPSEEK_PLAIN, *THINK], bos=DEEPSEEK[0]),
        bos=DEEPSEEK[0],
        eos=DEEPSEEK[1],
        tools="deepseek_v3",
        reasoning="think-open",
    ),
    ModelKind(
        "deepseek_v3",
        lambda: tokenizers.byte_level(DEEPSEEK, [*DEEPSEEK_PLAIN, *THINK], bos=DEEPSEEK[0]),
        bos=DEEPSEEK[0],
        eos=DEEPSEEK[1],
        tools="deepseek_v31",
        reasoning="think",
    ),
    ModelKind(
        "glm4",
        lambda: tokenizers.byte_level(GLM, [*GLM_PLAIN, *THINK]),
        eos="<|endoftext|>",
        ends=("<|user|>", "<|observation|>"),
        tools="glm",
        reasoning="think",
    ),
    ModelKind(
        "kimi_k2",
        lambda: tokenizers.byte_level(KIMI, KIMI_PLAIN),
        bos="[BOS]",
        eos="[EOS]",
        ends=("<|im_end|>",),
        tools="kimi_k2",
    ),
    ModelKind(
        "gpt_oss",
        lambda: tokenizers.byte_level(HARMONY),
        bos="<|startoftext|>",
        eos="<|return|>",
        ends=("<|endoftext|>", "<|call|>"),
        tools="harmony",
        reasoning="harmony",
    ),
]
_BY_NAME = {one.name: one for one in _ALL}
MODEL_KINDS = tuple(_BY_NAME)


def model_kind(name: str) -> ModelKind:
    return _BY_NAME[name]


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="swell-model-kinds-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def _folder(name: str) -> Path:
    folder = _root() / name
    model_kind(name).write(folder)
    return folder
