"""The one schema of Swell's configuration.

A configuration is frozen, and an unknown key is refused with its path. Every class of the system
receives only its own section. Derived values are properties. Always build a `Config` with `load`:
msgspec checks ranges when it converts, not when a Struct is constructed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swell.configs.autoscaling import AutoscalingConfig, check_autoscaling
from swell.configs.drafts import DraftsConfig, check_drafts
from swell.configs.error_text import did_you_mean, shown
from swell.configs.files import model_path
from swell.configs.files.yaml_text import read_yaml, read_yaml_file
from swell.configs.lora import LoraConfig, check_lora
from swell.configs.parallel import ParallelConfig as ParallelConfig
from swell.configs.parallel import check_parallel
from swell.configs.runtime.network import check_interface, ingress_ports, parse_ports
from swell.configs.scheduler import SchedulerConfig, check_scheduler
from swell.configs.section import ConfigError as ConfigError
from swell.configs.section import (
    FilledText,
    LogprobsMode,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    Template,
    Text,
)
from swell.configs.serve import MAX_BODY_BYTES as MAX_BODY_BYTES
from swell.configs.serve import SERVE_FILES as SERVE_FILES
from swell.configs.serve import ServeConfig as ServeConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@,]+/?\Z", re.IGNORECASE)
"""The origin of a web page: scheme, host and port."""
_PRIVATE = re.compile(r"(?<=//).*@|[?#].*")
"""Parts of a URL that may contain a password or a token."""
_HTTP_URL = re.compile(r"https?://[^/\s@?#]+(/[^\s?#]*)?\Z", re.IGNORECASE)
"""A URL without a user, a password or a query, because reports of exports show this URL."""
_MAX_RULE_CHARS = 200
MAX_DRAIN_S = 4 * 3600.0
"""Longest drain that a request or the configuration may set."""


class ModelConfig(Section, frozen=True):
    path: FilledText
    """A local folder with config.json, a GGUF file (the first one if it is split), or a hub id."""
    name: Text | None = None
    """The id under which the API serves the model; None: the last part of `path`, without the
    suffix of a GGUF file."""
    load_format: Literal["auto", "dummy", "sharded"] = "auto"
    """`sharded` reads the files of `swell save-sharded`, one per worker; `auto` does so if the
    folder has their index. `dummy` makes random weights and reads only config.json (for
    measurements)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the checkpoint's own type; bfloat16 for a GGUF file with quantized weights."""
    quantize: Literal["none", "keep", "int8", "int4"] = "none"
    """How matrices of linear layers are stored. `none`: with `dtype`. `keep`: as the integers of a
    quantized checkpoint, on GPUs also as its small floats, where products can use them; other
    matrices have `dtype` (docs/reference/quantization.md). `int8`, `int4`: they are quantized after
    they are loaded, to integers of 8 or 4 bits, and a float16 scale for each 32 neighbouring inputs
    of an output (8.5 or 4.5 bits per weight). The head then has 8 bits in any case. Embeddings
    without a head, norms, biases, routers, experts, adapters and draft models are not quantized
    (docs/tune/quantization.md)."""
    activations: Literal["auto", "exact", "int8", "fp8"] = "exact"
    """How products with quantized weights are computed. `exact`: with weights that are dequantized
    to `dtype`. `int8`, only on CPUs: the inputs of a row are rounded to integers of 8 bits, too,
    with a scale for each group of the weight (32 inputs; with `keep`, up to 256), which is faster
    and less precise. `fp8`, only on GPUs: the inputs of a row are rounded to FP8 with one scale,
    for weights of a checkpoint in FP8 with one scale for the matrix or for each output. `auto`: on
    CPUs `int8` for weights in groups of up to 64 inputs, whose cost in quality was measured
    (docs/tune/quantization.md); otherwise `exact`. Read only if `quantize` is set."""
    max_model_len: Positive | None = None
    """Longest prompt plus answer, in tokens; None: what the model and the cache allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto`: a GPU if the worker's host has one, else the CPU."""
    seed: NonNegative = 0
    """Seed of dummy weights."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """`auto`: a native model if there is one, else transformers' model with Swell's KV cache."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """Task of the model: `generate` samples tokens, `pooling` returns a vector for a text. `auto`:
    determined by its folder (`modules.json`, the architecture), as in vLLM."""
    pooling: Literal["auto", "cls", "mean", "last"] = "auto"
    """Hidden state from which the vector is made: the first token's, the mean, or the last token's.
    `auto`: as the folder says, else the first token for encoders, and the last for decoders."""
    classifier_tokens: Annotated[list[FilledText], Meta(min_length=2, max_length=2)] | None = None
    """For a causal language model that ranks pairs (Qwen3-Reranker: ["no", "yes"]): two tokens
    whose logits after a pair are compared. The score is the probability of the second token."""
    pair_template: Template | None = None
    """Prompt with which a ranking model reads a pair: a text with {query} and {document}. None: the
    tokenizer joins the two texts."""
    prompt_embeds: bool = False
    """Accepts prompts as embeddings (`prompt_embeds` of `/v1/completions`). A client that sends
    them bypasses the tokenizer."""
    routed_experts: bool = False
    """Lets requests ask for the experts that computed their tokens (`return_routed_experts`). The
    choices of all layers are recorded for every token, with its KV, even if no request asks."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Values of `logprobs`: log probabilities or logits. `raw`: of the model. `processed`: of the
    distribution that is sampled, after penalties, masks and filters (docs/guide/logprobs.md)."""
    compute_nans_in_logits: bool = False
    """Counts the NaN among the logits of each sampled token: an error shows the number."""
    generation_config: Literal["auto", "none"] = "auto"
    """`auto`: the temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the
    model's generation_config.json are the defaults of requests, as in vLLM. `none`: neutral
    defaults. End tokens are read from the file in both cases."""
    special_tokens_in_text: Literal["text", "control"] = "text"
    """Meaning of a control token such as `<|im_end|>` in a message: `text`, so that no user can
    forge a turn, or a `control` token. Prompts of `/v1/completions` always have control tokens."""
    enforce_eager: bool = False
    """Computes every step operation by operation. Otherwise steps are captured and replayed (CUDA
    graphs on a GPU, recorded calls on a CPU), which is faster. The answers are the same."""
    exact: bool = False
    """Whether the bits of an answer must not depend on the requests that are computed with it, nor
    on the steps in which it is computed. On a GPU this chooses products, attention and sums over
    workers whose order is fixed, which are slower than the default. On a CPU all results are exact
    in any case. A model or a machine that cannot compute exactly is refused."""
    numerics: Literal["auto", "portable"] = "auto"
    """`portable`: the model is refused unless all its products are of Swell's CPU kernels, compiled
    with FMA: these find the same bits on unlike processors of one architecture, so answers may move
    between such hosts. `auto`: any model, on any host (docs/design/failover.md)."""
    cpu_threads: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Threads of one worker's matrix products on CPU; 0: the cores that it may use on its host (its
    affinity, and the CPU quota of its container), divided by the number of workers of all engines
    on that host."""

    @property
    def served_name(self) -> str:
        return self.name or model_path.short_name(self.path)


class CacheConfig(Section, frozen=True):
    block_tokens: Positive = 16
    """Number of tokens of one KV block."""
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Type in which K and V are stored. `auto`: `model.dtype`. `int8`, `fp8` (E4M3): 8 bits, with a
    float32 scale for each token and KV head, so that about twice as many blocks fit into the same
    memory as with bfloat16, or four times as many as with float32. `int8` is the more exact one
    (docs/tune/kv-cache.md)."""
    memory_bytes: Positive | None = None
    """Bytes of the KV cache of one worker; None: determined by `memory_fraction`."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Fraction of the device's free memory for the KV cache, after the weights are loaded; None:
    0.8 on a CPU, and 1 on a GPU. On a GPU free is what the largest steps leave, which are computed
    once at the start, except 2 % of the GPU. On a CPU the limit of a container counts, and the
    cache is never larger than `scheduler.max_rows` requests of `model.max_model_len` tokens can
    use."""
    prefix_caching: bool = True
    """Whether requests reuse the KV blocks of equal prefixes."""
    session_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Fraction of the KV cache in which prefixes of sessions are kept longer than those of other
    requests. Running requests may still use all of the cache."""
    offload_bytes: NonNegative = 0
    """Bytes of host memory of one worker for prefixes that are evicted from the KV cache. Copying
    them back takes far less time than computing them again."""
    offload_disk_bytes: NonNegative = 0
    """Bytes of a file for prefixes that are evicted from the host memory, or without host memory
    from the KV cache. The disk space is allocated at the start."""
    offload_folder: Text | None = None
    """Folder of this file; None: the system's folder for temporary files. The file is unlinked, so
    it disappears with the worker."""
    handover_folder: Text | None = None
    """Folder, visible to all hosts, in which prefill engines (`parallel.prefill_engines`) write KV
    for decode engines. None: no handover."""
    handover_bytes: Positive = 4 * 1024**3
    """Maximum size of the handover files of all workers with the same rank. If they leave no room,
    decode engines compute prompts again."""


def check_handover(parallel: ParallelConfig, cache: CacheConfig) -> None:
    """Checks the rules for prefill engines."""
    if not parallel.prefill_engines:
        return
    needs = f"parallel.prefill_engines={parallel.prefill_engines} needs"
    if cache.handover_folder is None:
        raise ConfigError(
            f"{needs} cache.handover_folder, a folder that all hosts can read and write"
        )
    if not cache.prefix_caching:
        raise ConfigError(f"{needs} cache.prefix_caching=true")


class ClusterConfig(Section, frozen=True):
    min_engines: Processes = 1
    """The fewest engines to which operators and the autoscaler may scale. If engines share experts
    (`parallel.expert`), each reserves memory for its share of the experts of this many."""
    max_engines: Processes = 64
    """The most engines that the cluster may have. If engines share experts (`parallel.expert`),
    workers on GPUs reserve memory for the exchange of tokens between all of them."""
    stall_timeout_s: Seconds = 30.0
    """A process that has work and makes no progress for this long counts as stalled."""
    start_timeout_s: Seconds = 600.0
    """An engine that is not ready after this long has failed to start; a request whose engine was
    lost waits this long for another one."""
    drain_timeout_s: Annotated[float, Meta(gt=0, le=MAX_DRAIN_S)] = 30.0
    """How long an engine that is being removed may finish its requests; at most four hours, so that
    every drain finishes."""
    cpus_per_worker: Annotated[float, Meta(gt=0, le=65_536)] = 0.01
    """Ray `CPU` that a worker on CPU reserves; tiny, so that small machines can run many
    workers."""
    gpus_per_worker: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Ray `GPU` that a worker on a GPU reserves. With a part of a GPU, several engines of one
    worker share it, and each takes this part of its memory at most."""
    load_report_s: Seconds = 0.05
    """Longest delay before a change of load is reported."""
    heartbeat_s: Seconds = 1.0
    """Interval of reports without changes."""
    interface: Text | None = None
    """The network between the processes of the cluster: the name of an interface, such as `eth1`,
    or an IPv4 network, such as `10.1.0.0/16`. On each host all of them listen on its first address
    there. None: on the address of the host's Ray node."""
    ports: Text | None = None
    """`A-B`: the ports on which they listen, at least 16 and not used by other programs
    (`docs/operate/network.md`). None: 20000-31999 for the coordinator, any port for the others."""

    @property
    def port_range(self) -> range | None:
        """`ports` as a range."""
        return None if self.ports is None else parse_ports(self.ports)


class Config(Section, frozen=True):
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    drafts: DraftsConfig = DraftsConfig()
    serve: ServeConfig = ServeConfig()
    cluster: ClusterConfig = ClusterConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    lora: LoraConfig = LoraConfig()


def load(source: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Builds a `Config` from a YAML file, a model folder, a GGUF file, a hub id, or a mapping.

    `overrides` maps `section.key` to a value and has precedence over the source. A relative path in
    a YAML file is resolved relative to that file first. Raises `ConfigError`.
    """
    data, base = read_source(source)
    overrides = overrides or {}
    for key, value in overrides.items():
        override(data, key, value)
    try:
        return _resolve_paths(check(data), base)
    except ConfigError as error:
        is_overridden = any(f"{key}.".startswith(f"{error.key}.") for key in overrides)
        if is_overridden or not isinstance(source, str) or not _is_yaml(source):
            raise
        raise ConfigError(f"configuration {source!r}: {error}", error.key) from None


def check(data: Mapping[str, Any]) -> Config:
    """Converts a mapping to a configuration and checks it, without access to any file. Raises
    `ConfigError`."""
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise _explain(error, data) from None
    _check(config)
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `section.key=value` of the command line; the value is parsed as YAML."""
    key, sign, value = text.partition("=")
    if not sign or "." not in key:
        raise ConfigError(
            f"--set {shown(text)}: expected section.key=value, for example scheduler.max_rows=64"
        )
    if not value:
        return key.strip(), None
    try:
        written = value.encode()
    except UnicodeEncodeError:  # the terminal has another encoding
        raise ConfigError(f"--set {shown(text)}: the value is not UTF-8") from None
    return key.strip(), read_yaml(written, f"--set {shown(text)}: the value")


def read_source(source: str | Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Returns the raw mapping and the folder to which paths are relative."""
    if isinstance(source, Mapping):
        sections = {key: _copied(part) for key, part in source.items()}
        return sections, Path.cwd()
    path = Path(os.path.expanduser(source))
    if not _is_yaml(source):
        return {"model": {"path": source}}, Path.cwd()
    if "\0" in source:
        raise ConfigError(
            f"configuration {source!r} cannot be read: a file name cannot contain a null character"
        )
    try:
        data = read_yaml_file(path)
    except OSError as error:
        raise ConfigError(f"configuration {source!r} cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"configuration {source!r} has no sections; expected a file that begins with a "
            "section such as 'model:'"
        )
    odd = next(_odd_keys(data), None)
    if odd is not None:
        raise ConfigError(
            f"configuration {source!r}: the key {odd} is not a text; put it in quotes"
        )
    return data, path.resolve().parent


def _is_yaml(source: str) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


def _odd_keys(data: Mapping[Any, Any], where: str = "") -> Iterator[str]:
    """Yields the keys that YAML reads as numbers, booleans or dates."""
    for key, value in data.items():
        if not isinstance(key, str):
            yield f"{key} of {where!r}" if where else f"{key}"
        elif isinstance(value, dict):
            yield from _odd_keys(value, f"{where}.{key}" if where else key)


def given_settings(source: str, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections with the keys that the source or the overrides contain, and the values
    that `load` gives them. Raises `ConfigError`."""
    whole = msgspec.to_builtins(load(source, overrides))
    data, _ = read_source(source)
    for key, value in overrides.items():
        override(data, key, value)
    return {section: {key: whole[section][key] for key in keys} for section, keys in data.items()}


def _copied(section: Any) -> Any:
    return dict(section) if isinstance(section, Mapping) else section


def override(data: dict[str, Any], key: str, value: Any) -> None:
    section, *names = key.split(".")
    if section not in Config.__struct_fields__ or not all(names) or not names:
        known = Config.__struct_fields__
        hint, listed = did_you_mean(section, known), ", ".join(known)
        raise ConfigError(f"unknown section in {shown(key)}{hint}; the sections are: {listed}")
    part = data
    for place, name in enumerate((section, *names[:-1])):
        inside = part[name] = _copied(part.get(name, {}))
        if not isinstance(inside, dict):
            whole = ".".join((section, *names[:place]))
            raise ConfigError(f"section {whole!r} must contain keys and values")
        part = inside
    part[names[-1]] = value


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any]) -> ConfigError:
    """Turns msgspec's error into one that has the key as `section.key`, and its value."""
    text, _, where = str(error).partition(" - at `")
    where = where.rstrip("`").rpartition("$")[2].lstrip(".").replace("[...]", "")
    if "unknown field" in text:
        name = text.partition("`")[2].rpartition("`")[0]
        sections = {key: globals()[kind] for key, kind in Config.__annotations__.items()}
        kind = sections.get(where) if where else Config
        known = kind.__struct_fields__ if kind else ()
        full = ".".join(filter(None, [where, name]))
        listed = ", ".join(known) or "see configs/schema.py"
        others = [key for key, one in sections.items() if name in one.__struct_fields__]
        hint = did_you_mean(name, known, [f"{key}.{name}" for key in others])
        return ConfigError(f"unknown key {shown(full)}{hint}; known keys there: {listed}", full)
    if "missing required field" in text:
        name = text.partition("`")[2].rpartition("`")[0]
        full = ".".join(filter(None, [where, name]))
        return ConfigError(f"the required key {full!r} is missing", full)
    if "matching regex" in text:
        text = "expected a text without control characters"
    value: Any = data
    for key in where.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if len(text) > _MAX_RULE_CHARS:  # the text repeats the value
        text = f"{text[:_MAX_RULE_CHARS]}..."
    head = f"{where}={shown(value)}" if value is not None else where or "configuration"
    return ConfigError(f"{head}: {text}", where)


def _check(config: Config) -> None:
    """Checks the rules between keys, and those that a type cannot express."""
    for origin in config.serve.cors_origins:
        if origin != "*" and not _ORIGIN.match(origin):
            raise ConfigError(
                f"serve.cors_origins: {origin!r} is not an origin; write only scheme, host and "
                "port, such as 'https://app.example' or 'http://localhost:3000', or '*' for all"
            )
    endpoint = config.serve.otlp_endpoint
    if endpoint is not None and not _HTTP_URL.match(endpoint):
        raise ConfigError(
            f"serve.otlp_endpoint={shown(_PRIVATE.sub('...', endpoint))} is not an http or https "
            "URL without user and query; write it like 'http://collector:4318'"
        )
    _check_network(config)
    check_drafts(config.drafts)
    check_parallel(config.parallel)
    check_handover(config.parallel, config.cache)
    check_scheduler(config.scheduler, config.drafts.method, config.parallel.expert)
    cluster, parallel = config.cluster, config.parallel
    if cluster.min_engines > cluster.max_engines:
        raise ConfigError(
            f"cluster.min_engines={cluster.min_engines} is above "
            f"cluster.max_engines={cluster.max_engines}; lower the first or raise the second"
        )
    if not cluster.min_engines <= parallel.data <= cluster.max_engines:
        raise ConfigError(
            f"parallel.data={parallel.data} is outside the range from "
            f"cluster.min_engines={cluster.min_engines} to "
            f"cluster.max_engines={cluster.max_engines}; change one of the three"
        )
    if cluster.gpus_per_worker < 1 and (parallel.world > 1 or parallel.expert):
        raise ConfigError(
            f"cluster.gpus_per_worker={cluster.gpus_per_worker:g}: workers of a group would share "
            "a GPU, which NCCL refuses; set it to 1, or set parallel.tensor=1, "
            "parallel.pipeline=1 and parallel.expert=false"
        )
    check_autoscaling(config.autoscaling, cluster.min_engines, cluster.max_engines)
    model = config.model
    check_lora(config.lora, model.served_name, model.backend, model.runner, parallel.expert)


def _check_network(config: Config) -> None:
    interface, ports = config.cluster.interface, config.cluster.ports
    try:
        if interface is not None:
            check_interface(interface)
        chosen = config.cluster.port_range
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.serve.host == "interface" and config.serve.proxy_port:
        raise ConfigError(
            f"serve.proxy_port={config.serve.proxy_port}: Ray Serve's proxy needs one address for "
            "all hosts; set serve.host to it, for example to '0.0.0.0'"
        )
    kept = ingress_ports(chosen) or range(0)
    for key, allowed in (("port", kept), ("proxy_port", range(0))):
        port = getattr(config.serve, key)
        if port in (chosen or ()) and port not in allowed:
            raise ConfigError(
                f"serve.{key}={port} is in cluster.ports={ports}, which other sockets use; choose "
                "a port outside that range"
                + (
                    f", or one of {kept[0]}-{kept[-1]}, which are reserved for ingresses"
                    if allowed
                    else ""
                )
            )


def _resolve_paths(config: Config, base: Path) -> Config:
    """Makes the paths of existing files absolute, because processes on other hosts and in other
    working directories use them."""
    model, serve = config.model, config.serve
    model = msgspec.structs.replace(model, path=model_path.resolved(model.path, base))
    names = {key: getattr(serve, key) for key in SERVE_FILES}
    found = {
        key: _find(name, [base, Path.cwd()], Path.exists) or name
        for key, name in names.items()
        if name
    }
    drafts = config.drafts
    if drafts.model:
        path = model_path.resolved(drafts.model.path, base)
        small = msgspec.structs.replace(drafts.model, path=path)
        drafts = msgspec.structs.replace(drafts, model=small)
    adapters = {
        name: _find(folder, [base, Path.cwd()], Path.is_dir) or folder
        for name, folder in config.lora.adapters.items()
    }
    return msgspec.structs.replace(
        config,
        model=model,
        drafts=drafts,
        serve=msgspec.structs.replace(serve, **found),
        lora=msgspec.structs.replace(config.lora, adapters=adapters),
    )


def _find(name: str, bases: Sequence[Path], is_there: Callable[[Path], bool]) -> str | None:
    """Returns the absolute path of a name, relative to the first base where it exists, or None."""
    for base in bases:
        path = base / os.path.expanduser(name)
        with contextlib.suppress(OSError):  # no file can have such a name
            if is_there(path):
                return str(path.resolve())
    return None
