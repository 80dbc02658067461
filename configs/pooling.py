"""Reads from the files of a model's folder whether the model generates tokens or pools, and how it
pools.

A pooling model returns one vector for a text: its hidden states of the last layer are reduced to
one (the first, the last, or their mean), and a head turns that one into an embedding or into class
scores. Ingresses and workers read the same files, those that sentence-transformers writes:

    modules.json                        the modules of the model in order, and their folders
    1_Pooling/config.json               which hidden state
    2_Dense/config.json                 a further linear layer
    sentence_bert_config.json           max_seq_length, do_lower_case
    config_sentence_transformers.json   prompts, which are prepended to texts
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from swell.configs.section import ConfigError

Method = Literal["cls", "mean", "last"]
ReadFile = Callable[[str], Any]
"""Accepts a file name within the model's folder; returns its JSON, or None if there is no such
file."""

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "ModernBert")
"""Model families with bidirectional attention: each token attends to all tokens of its text."""
DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
_CLASSIFIER, _CAUSAL = "ForSequenceClassification", "ForCausalLM"
_EMBEDDERS = ("Model", "ForMaskedLM")
_METHODS: Mapping[str, Method] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODE = "pooling_mode_"
_OLD_METHODS: Mapping[str, str] = {"cls_token": "cls", "mean_tokens": "mean"}
_ACTIVATIONS = ("Identity", "Tanh")
_TOKENIZER_LIMIT = 1_000_000_000
"""A larger `model_max_length` of a tokenizer means no limit."""


class DenseSpec(msgspec.Struct, frozen=True):
    """A linear layer after the pooling, and its activation."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """One of `_ACTIVATIONS`."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one model pools."""

    family: str
    """One of `ENCODERS` and `DECODERS`."""
    task: Literal["embed", "classify"]
    hidden_size: int
    method: Method
    normalize: bool = False
    """Whether embeddings are normalized to length 1."""
    dense: tuple[DenseSpec, ...] = ()
    max_tokens: int | None = None
    """Longest text that the model was made for; None: limited only by its positions."""
    lower_case: bool = False
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    problem: str | None = None
    """`problem_type` of the model's config: it determines how scores become probabilities."""
    token_ids: tuple[int, int] | None = None
    """For a causal language model that ranks pairs: the ids of the negative and the positive token.
    The score of its one class compares the logit of the second with that of the first."""
    pair_template: tuple[str, str, str] | None = None
    """The texts before, between and after the two texts of a pair. None: the tokenizer joins
    them."""
    pair_is_reversed: bool = False
    """Whether the template has the document first."""
    score_activation: str | None = None
    """Activation that a cross-encoder's config sets for its scores: the name of a torch module."""

    @property
    def size(self) -> int:
        """Number of values of one vector."""
        if not self.embeds:
            return len(self.labels)
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def embeds(self) -> bool:
        return self.task == "embed"


def read_pooling(
    runner: str,
    method: str,
    read: ReadFile,
    classifier_tokens: Sequence[str] | None = None,
    pair_template: str | None = None,
) -> PoolingSpec | None:
    """Returns how the model pools, or None if it generates tokens. The arguments are the configured
    values (see `ModelConfig`). Raises ConfigError for a pooling model that cannot be served."""
    config = read("config.json") or {}
    architecture = str((config.get("architectures") or [""])[0])
    modules = [(_kind(one), one["path"]) for one in read("modules.json") or []]
    family, suffix = _split(architecture)
    pools = any(kind == "Pooling" for kind, _ in modules) or suffix in (_CLASSIFIER, *_EMBEDDERS)
    pools = pools or classifier_tokens is not None
    if runner == "generate" or (runner == "auto" and not pools):
        return None
    if family is None:
        known = ", ".join((*ENCODERS, *DECODERS))
        raise ConfigError(
            f"architecture {architecture!r} cannot be served for pooling; supported families: "
            f"{known}"
        )
    spec = PoolingSpec(
        family=family,
        hidden_size=int(config.get("hidden_size") or 0),
        task="classify" if suffix == _CLASSIFIER else "embed",
        method="cls" if family in ENCODERS else "last",
        max_tokens=_max_tokens(read),
        problem=config.get("problem_type"),
    )
    if classifier_tokens is not None:
        spec = _token_classifier(spec, architecture, classifier_tokens, read)
    else:
        spec = _embedder(spec, modules, read) if spec.embeds else _classifier(spec, config)
    if pair_template is not None:
        spec = _with_template(spec, pair_template)
    if method != "auto":
        spec = msgspec.structs.replace(spec, method=method)
    return spec


def _split(architecture: str) -> tuple[str | None, str]:
    """Splits an architecture into its family, or None if the family cannot pool, and its suffix."""
    for suffix in (_CLASSIFIER, _CAUSAL, *_EMBEDDERS):
        family = architecture.removesuffix(suffix)
        if family != architecture:
            if family in ENCODERS or (family in DECODERS and suffix != "ForMaskedLM"):
                return family, suffix
            return None, suffix if suffix == _CLASSIFIER else ""
    return None, ""


def _kind(module: Mapping[str, Any]) -> str:
    """Returns the class of a module of sentence-transformers, without its package."""
    return str(module["type"]).rpartition(".")[2]


def _embedder(spec: PoolingSpec, modules: list[tuple[str, str]], read: ReadFile) -> PoolingSpec:
    known = ("Transformer", "Pooling", "Dense", "Normalize")
    if unknown := [kind for kind, _ in modules if kind not in known]:
        raise ConfigError(
            f"modules.json has the module {unknown[0]!r}, which is not supported (known: "
            f"{', '.join(known)})"
        )
    prompts = read("config_sentence_transformers.json") or {}
    bert = read("sentence_bert_config.json") or {}
    paths = [path for kind, path in modules if kind == "Pooling"]
    return msgspec.structs.replace(
        spec,
        method=_method(f"{paths[0]}/config.json", read) if paths else spec.method,
        # As in vLLM if the folder does not specify it.
        normalize=any(kind == "Normalize" for kind, _ in modules) or not modules,
        dense=tuple(_dense(path, read) for kind, path in modules if kind == "Dense"),
        lower_case=bool(bert.get("do_lower_case")),
        prompts=prompts.get("prompts") or {},
        default_prompt=prompts.get("default_prompt_name"),
    )


def _method(name: str, read: ReadFile) -> Method:
    config = read(name) or {}
    modes = config.get("pooling_mode")
    if modes is None:
        old = [key.removeprefix(_OLD_MODE) for key, on in config.items() if on is True]
        modes = [_OLD_METHODS.get(mode, mode) for mode in old if mode != "include_prompt"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _METHODS:
        raise ConfigError(
            f"{name}: the pooling modes {modes} are not supported; set one of {', '.join(_METHODS)}"
        )
    if config.get("include_prompt") is False:
        raise ConfigError(
            f"{name}: include_prompt=false is not supported: prompts are pooled with their texts"
        )
    return _METHODS[modes[0]]


def _dense(path: str, read: ReadFile) -> DenseSpec:
    name = f"{path}/config.json"
    config = read(name) or {}
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS or config.get("use_residual"):
        raise ConfigError(
            f"{name}: a Dense module with activation_function={activation!r} and "
            f"use_residual={config.get('use_residual', False)} is not supported (known "
            f"activations: {', '.join(_ACTIVATIONS)}, without a residual)"
        )
    sizes = config["in_features"], config["out_features"]
    return DenseSpec(path, *sizes, bool(config.get("bias", True)), activation)


def _classifier(spec: PoolingSpec, config: Mapping[str, Any]) -> PoolingSpec:
    names = config.get("id2label") or {}
    count = len(names) or config.get("num_labels", 2)
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    own = own or config.get("sbert_ce_default_activation_function")
    mean = config.get("classifier_pooling") == "mean"
    return msgspec.structs.replace(
        spec,
        method="mean" if mean else spec.method,
        labels=tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count)),
        score_activation=None if own is None else str(own).rpartition(".")[2],
    )


def _token_classifier(
    spec: PoolingSpec, architecture: str, tokens: Sequence[str], read: ReadFile
) -> PoolingSpec:
    if not architecture.endswith(_CAUSAL):
        raise ConfigError(
            f"model.classifier_tokens={list(tokens)} is for causal language models, but the "
            f"folder has a {architecture}; leave it out"
        )
    file = read("tokenizer.json") or {}
    vocabulary = (file.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # a Unigram model has [token, score] pairs
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    added = {one["content"]: one["id"] for one in file.get("added_tokens") or []}
    known = {**vocabulary, **added}
    for token in tokens:
        if token not in known:
            raise ConfigError(
                f"model.classifier_tokens: {token!r} is not a token of the model's "
                "tokenizer.json; write it as that file has it"
            )
    no, yes = (int(known[token]) for token in tokens)
    return msgspec.structs.replace(
        spec, task="classify", method="last", labels=(tokens[1],), token_ids=(no, yes)
    )


def _with_template(spec: PoolingSpec, template: str) -> PoolingSpec:
    names = re.findall(r"\{(query|document)\}", template)
    if spec.embeds or sorted(names) != ["document", "query"]:
        raise ConfigError(
            "model.pair_template must have {query} and {document} once each, for a model "
            f"that ranks pairs; got {template[:100]!r}"
        )
    first, between, behind = re.split(r"\{query\}|\{document\}", template)
    return msgspec.structs.replace(
        spec,
        pair_template=(first, between, behind),
        pair_is_reversed=names[0] == "document",
    )


def _max_tokens(read: ReadFile) -> int | None:
    return min(_limits(read), default=None)


def _limits(read: ReadFile) -> Iterator[int]:
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        value = (read(name) or {}).get(key)
        if isinstance(value, int | float) and 0 < value < _TOKENIZER_LIMIT:
            yield int(value)
