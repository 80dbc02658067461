"""The one schema of Swell's configuration.

A configuration is frozen, unknown keys are refused with their path, every class of the system
receives only its own section, and derived values are properties. Always build a `Config` through
`load`: msgspec checks ranges when it converts, not when a Struct is constructed.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swell.configs.autoscaling import AutoscalingConfig, check_autoscaling
from swell.configs.network import check_interface, ingress_ports, parse_ports
from swell.configs.section import ConfigError as ConfigError
from swell.configs.section import NonNegative, Port, Positive, Seconds, Section

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@,]+/?\Z", re.IGNORECASE)
"""The origin of a web page: scheme, name and port."""
_HTTP_URL = re.compile(r"https?://[^/\s]+(/\S*)?\Z", re.IGNORECASE)
SERVE_FILES = ("api_keys_file", "admin_keys_file", "chat_template")
"""Keys of `serve` that name files, which every host must have."""
MAX_DRAIN_S = 4 * 3600.0
"""Longest drain that a request or the configuration may set."""
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Half of what a message to an engine may have (`coordinator/handshakes.py`)."""


class ModelConfig(Section, frozen=True):
    path: Annotated[str, Meta(min_length=1)]
    """A local folder with config.json, or a hub id."""
    name: str | None = None
    """The id under which the API serves the model; None: the last part of `path`."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights from config.json alone (for measurements)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the checkpoint's own type."""
    max_model_len: Positive | None = None
    """Longest prompt plus answer, in tokens; None: what the model and the cache allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: NonNegative = 0
    """Seed of dummy weights."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """`auto`: a native model if there is one, else the model of transformers with our cache."""
    generation_config: Literal["auto", "none"] = "auto"
    """`auto`: the temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the
    model's generation_config.json are the defaults of requests, as in vLLM. `none`: neutral
    defaults. End tokens are read from the file in both cases."""
    cpu_threads: NonNegative = 0
    """Threads of one worker's matrix products on CPU; 0: the cores of its host, divided by the
    workers that all engines have there."""

    @property
    def served_name(self) -> str:
        return self.name or os.path.basename(os.path.normpath(self.path))


class ParallelConfig(Section, frozen=True):
    data: Positive = 1
    """Engines at start. Deploying the application again with another number sets a new target."""
    tensor: Positive = 1
    """Workers that split each layer of one engine."""
    pipeline: Positive = 1
    """Stages that split the layers of one engine."""
    expert: bool = False
    """Engines share experts and run in waves."""
    executor: Literal["auto", "inproc", "ray"] = "auto"
    """Where an engine's workers run; `auto`: in the engine's process if there is only one."""

    @property
    def world(self) -> int:
        """Workers of one engine."""
        return self.tensor * self.pipeline


class CacheConfig(Section, frozen=True):
    block_tokens: Positive = 16
    """Tokens of one KV block."""
    memory_bytes: Positive | None = None
    """Bytes of the KV cache of one worker; None: by `memory_fraction`."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Fraction of the device's free memory for the KV cache, after the weights are loaded. On CPU
    never more than `scheduler.max_rows` requests of `model.max_model_len` tokens can use."""
    prefix_caching: bool = True


class SchedulerConfig(Section, frozen=True):
    max_tokens_per_step: Positive = 2048
    """Token budget of one step, over all rows."""
    max_rows: Positive = 256
    """Requests that run at once in one engine (slots)."""
    max_chunk_tokens: NonNegative = 0
    """Most tokens of one prompt in a step; 0: the whole budget."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    steps_in_flight: Annotated[int, Meta(ge=1, le=16)] = 2
    """1: the host waits for each step; 2: it prepares the next step while one is computed. A
    pipeline of N stages needs at least N to keep all stages busy."""


class ServeConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    """Where ingresses listen; `interface`: at the address of `cluster.interface` of each host."""
    port: Port = 8000
    """Shared by the HTTP servers of all ingress replicas of a node; 0: a free one."""
    proxy_port: Port = 0
    """Port of Ray Serve's own proxy beside ours; 0: no proxy (with `swell serve`)."""
    ingress_replicas: Positive | None = None
    """HTTP servers, spread evenly over the hosts of the Ray cluster. None: one on each host that
    is there at the start."""
    api_keys_file: str | None = None
    """One key a line; a request must have one of them, as `authorization: Bearer KEY` or
    `x-api-key: KEY`. Operators' keys are in `admin_keys_file`."""
    admin_keys_file: str | None = None
    """Keys of the admin API. None: it is open if `api_keys_file` is None too, else refused, since a
    user's key is not an operator's."""
    max_body_bytes: Annotated[int, Meta(ge=1, le=MAX_BODY_BYTES)] = 16 * 1024 * 1024
    """Longest HTTP body that is read. A conversation that fills a context of a million tokens has
    5 MB, and twice that with everything but ASCII escaped; the number of values in a body has its
    own limit (`cluster/text/schema/json_size.py`)."""
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Tokens between two events of a streamed answer, at least; the first token always leaves at
    once, and so does the end. More cost less work per token. A request may set a larger one."""
    max_children: Positive = 1024
    """Most answers of one request: its prompts times `n` or `best_of`. Each is a separate request
    to the engines: 1024 are several full batches, and take 0.1 s to submit."""
    max_connections: Positive = 16_384
    """Open connections of one ingress; more are refused with a 503. An idle connection takes about
    20 KB and a file descriptor: if the process may have fewer descriptors, the limit is lower."""
    head_timeout_s: Seconds = 10.0
    """Longest time from a connection's start, or the first byte of a further request, to the end of
    its headers; then the connection is closed with a 408."""
    transfer_timeout_s: Seconds = 30.0
    """Longest time in which a client sends no byte of an unfinished body (408), or reads no byte of
    an answer; a body also needs 1 KiB/s on average."""
    allowed_hosts: list[str] = []
    """Names under which clients reach the server, as in the header `Host`, without port; `*` allows
    all. Addresses, `localhost`, `host` and the machine's own name are always allowed. The admin API
    refuses other names. So do all other routes but probes, `/metrics` and `/openapi.json`, if
    `host` is a loopback address or names are listed: a web page can make its own name resolve to
    the server's address (DNS rebinding)."""
    allowed_origins: list[str] = []
    """Origins whose pages may use the admin API, as `https://ops.example`; `*` allows all. Pages of
    the server itself and of loopback addresses are always allowed."""
    cors_origins: list[str] = []
    """Origins whose pages may call all routes but the admin API's from a browser and read the
    answers, as `https://app.example`; `*` allows all. None by default: any page that a user opens
    could use a server on the user's loopback address."""
    chat_template: str | None = None
    """A file with a chat template, used instead of the model's."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """For a request with a field that no known server has: `refuse` answers 400 and names it, since
    a misspelt limit has no effect; `ignore` names it in the answer's header `x-swell-warning`.
    Known fields that are not supported are always refused, and unknown fields of messages, calls
    and tools are always ignored."""
    request_chat_template: bool = False
    """Whether a request may contain a chat template: it is a program that may run for long."""
    tool_parser: str = "auto"
    """How the model writes tool calls: a name in `docs/formats.md`, as hermes or qwen3_coder;
    `auto` detects it from the chat template; `none`."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: a name in `docs/formats.md`, as think or harmony; `auto`
    and `none` as above."""
    stored_responses: NonNegative = 1000
    """Answers of `/v1/responses` that are stored, for requests that continue or retrieve them; 0:
    none. The least recently used are dropped first."""
    stored_response_bytes: Positive = 256 * 1024 * 1024
    """Bytes of all stored answers, each with its conversation; for an answer that is computed in
    the background, also with the data by which another ingress can continue it."""
    stored_response_age_s: Seconds = 86400.0
    """Older stored answers are dropped."""
    request_history: NonNegative = 2048
    """Finished requests of which an ingress keeps what happened to them, for `/admin/requests/ID`;
    each answer of `n` counts. One takes about a kilobyte."""
    request_history_s: Seconds = 600.0
    """How long it keeps them."""
    otlp_endpoint: str | None = None
    """A collector of OpenTelemetry (OTLP over HTTP), as `http://collector:4318`: it gets each
    request that ends as spans. None: OTEL_EXPORTER_OTLP_ENDPOINT of the command that starts the
    application; nothing is exported without either."""
    no_engine_timeout_s: Seconds = 60.0
    """How long a request waits while no engine is available, before a 503; longer than a
    replacement takes to start."""
    max_waiting_requests: Positive = 4096
    """Requests that may wait for a slot, in all engines together; one more gets a 429 with a time
    to retry. Each child of `n` answers counts. At a hundred a second the last of 4096 waits for 40
    s, as long as most clients do; a load test of thousands of streams passes."""
    max_waiting_tokens: Positive = 16_777_216
    """Prompt tokens that may wait to be computed, in all engines together; more get a 429. They are
    lists of numbers, in an ingress and in an engine: 16 Mi tokens take about 0.7 GiB in each. 128
    prompts of 128 Ki tokens fit."""


class ClusterConfig(Section, frozen=True):
    min_engines: Positive = 1
    max_engines: Positive = 64
    stall_timeout_s: Seconds = 30.0
    """A process with work and without progress for this long counts as stalled."""
    start_timeout_s: Seconds = 600.0
    """An engine that is not ready after this long has failed to start; a request whose engine was
    lost waits as long for another one."""
    drain_timeout_s: Annotated[float, Meta(gt=0, le=MAX_DRAIN_S)] = 30.0
    """How long a leaving engine may finish its requests; at most four hours, so that every drain
    ends."""
    cpus_per_worker: Annotated[float, Meta(gt=0)] = 0.01
    """Ray's `CPU` that a worker on CPU reserves; tiny, so that small machines can run many."""
    load_report_s: Seconds = 0.05
    """Longest delay before a change of load is reported."""
    heartbeat_s: Seconds = 1.0
    """Interval of reports without changes."""
    interface: str | None = None
    """The network that the processes of the cluster use among each other: the name of an
    interface, as `eth1`, or an IPv4 network, as `10.1.0.0/16`. On each host all of them listen at
    its first address there. None: at the address that Ray has of the host."""
    ports: str | None = None
    """`A-B`: the ports at which they listen, at least 16 and not in use by others; see
    `docs/network.md`. None: 20000-31999 for the coordinator, and any for the others."""

    @property
    def port_range(self) -> range | None:
        """`ports` as numbers."""
        return None if self.ports is None else parse_ports(self.ports)


class Config(Section, frozen=True):
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    serve: ServeConfig = ServeConfig()
    cluster: ClusterConfig = ClusterConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()


def load(source: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Build a `Config` from a YAML file of ours, a model folder, a hub id, or a mapping.

    `overrides` maps `section.key` to a value and wins over the source. A relative path in a YAML
    file is tried relative to that file first. Raises `ConfigError`.
    """
    data, base = _read(source)
    for key, value in (overrides or {}).items():
        _override(data, key, value)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error)) from None
    _check(config)
    return _resolve_paths(config, base)


def parse_override(text: str) -> tuple[str, Any]:
    """Split `section.key=value` of the command line; the value is read as YAML."""
    key, sign, value = text.partition("=")
    if not sign or "." not in key:
        raise ConfigError(
            f"--set {text!r}: expected section.key=value, as in scheduler.max_rows=64"
        )
    try:
        return key.strip(), msgspec.yaml.decode(value.encode()) if value else None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--set {text!r}: the value is not YAML: {_one_line(error)}") from None


def _read(source: str | Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The raw mapping and the folder that relative paths start from."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), Path.cwd()
    path = Path(os.path.expanduser(source))
    if path.suffix not in (".yaml", ".yml"):
        return {"model": {"path": source}}, Path.cwd()
    try:
        data = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"configuration {source!r} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"configuration {source!r} is not YAML: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"configuration {source!r} holds no sections; it starts with 'model:'")
    return data, path.resolve().parent


def _override(data: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    if section not in Config.__struct_fields__ or not name:
        known = ", ".join(Config.__struct_fields__)
        raise ConfigError(f"unknown section in {key!r}; the sections are: {known}")
    part = data.setdefault(section, {})
    if not isinstance(part, dict):
        raise ConfigError(f"section {section!r} must hold keys and values")
    part[name] = value


def _explain(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key written as `section.key`."""
    text, _, where = str(error).partition(" - at `")
    where = where.rstrip("`").rpartition("$")[2].lstrip(".")
    if "unknown field" in text:
        name = text.rsplit("`", 2)[-2]
        section = Config.__annotations__.get(where) if where else "Config"
        kind = globals().get(str(section))
        known = ", ".join(kind.__struct_fields__) if kind else "see configs/schema.py"
        return f"unknown key {'.'.join(filter(None, [where, name]))!r}; known keys there: {known}"
    return f"{where or 'configuration'}: {text}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check(config: Config) -> None:
    """Check the rules between keys, and those that a type cannot express."""
    for origin in config.serve.cors_origins:
        if origin != "*" and not _ORIGIN.match(origin):
            raise ConfigError(
                f"serve.cors_origins: {origin!r} is no origin; write scheme, name and port alone, "
                "as 'https://app.example' or 'http://localhost:3000', or '*' for all"
            )
    endpoint = config.serve.otlp_endpoint
    if endpoint is not None and not _HTTP_URL.match(endpoint):
        raise ConfigError(
            f"serve.otlp_endpoint={endpoint!r} is no URL of http or https; write it as "
            "'http://collector:4318'"
        )
    _check_network(config)
    cluster, parallel = config.cluster, config.parallel
    if cluster.min_engines > cluster.max_engines:
        raise ConfigError(
            f"cluster.min_engines={cluster.min_engines} is above "
            f"cluster.max_engines={cluster.max_engines}"
        )
    if not cluster.min_engines <= parallel.data <= cluster.max_engines:
        raise ConfigError(
            f"parallel.data={parallel.data} lies outside cluster.min_engines="
            f"{cluster.min_engines} .. cluster.max_engines={cluster.max_engines}"
        )
    check_autoscaling(config.autoscaling, cluster.min_engines, cluster.max_engines)


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
            f"serve.proxy_port={config.serve.proxy_port}: Ray Serve's proxy listens at one address "
            "for all hosts; write it in serve.host, as '0.0.0.0'"
        )
    kept = ingress_ports(chosen) or range(0)
    for key, allowed in (("port", kept), ("proxy_port", range(0))):
        port = getattr(config.serve, key)
        if port in (chosen or ()) and port not in allowed:
            raise ConfigError(
                f"serve.{key}={port} lies in cluster.ports={ports}, which other sockets take; "
                "choose one outside"
                + (f", or one of {kept[0]}-{kept[-1]}, which ingresses keep" if allowed else "")
            )


def _resolve_paths(config: Config, base: Path) -> Config:
    """With absolute paths of what is there: processes on any host use them, in folders of their
    own."""
    model, serve = config.model, config.serve
    if folder := _find(model.path, [base], Path.is_dir):  # else it is the name of a hub's model
        model = msgspec.structs.replace(model, path=folder)
    names = {key: getattr(serve, key) for key in SERVE_FILES}
    found = {
        key: _find(name, [base, Path.cwd()], Path.exists) or name
        for key, name in names.items()
        if name
    }
    return msgspec.structs.replace(
        config, model=model, serve=msgspec.structs.replace(serve, **found)
    )


def _find(name: str, bases: Sequence[Path], is_there: Callable[[Path], bool]) -> str | None:
    """The absolute path of a name that is relative to the first base where it is there."""
    paths = (base / os.path.expanduser(name) for base in bases)
    return next((str(path.resolve()) for path in paths if is_there(path)), None)
