"""The section `serve`: the HTTP server and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import (
    MAX_KEPT_S,
    FilledText,
    KeptSeconds,
    Names,
    NonNegative,
    Port,
    Positive,
    Processes,
    Seconds,
    Section,
    Text,
)


class ResumableLimits(Section, frozen=True):
    """Limits of the resumable answers that an ingress keeps."""

    resumable_answers: NonNegative = 256
    """Maximum number of answers to requests with `Idempotency-Key` that an ingress keeps, while
    they run and for `resumable_age_s` after they finish. If the limit is reached, the answer that
    finished first is dropped; if all are still running, the request is refused (503). 0 disables
    them: requests with the header are refused."""
    resumable_answers_per_key: Positive = 64
    """Maximum number of such answers of one API key. Above it, this key's own answers are dropped
    or its requests refused (429), so that one user cannot use all of them."""
    resumable_bytes: Positive = 64 * 1024 * 1024
    """Maximum size of the events of all these answers in an ingress: about 256 answers of 1000
    tokens by default. Events that were dropped are computed again if a client needs them."""
    resumable_age_s: Seconds = 600.0
    """How long a finished answer is kept. Long enough for a client that was suspended or that
    retries with growing delays."""
    resume_grace_s: Seconds = 30.0
    """How long such an answer continues without a connected client before it is aborted. A mobile
    client reconnects within some seconds; until then no client reads what the engine computes."""


class SessionLimits(ResumableLimits, frozen=True):
    """Limits of the sessions of all ingresses together."""

    sessions: NonNegative = 1000
    """Maximum number of open sessions; one more is refused (503). 0 disables sessions."""
    sessions_per_key: Positive = 256
    """Maximum number of open sessions of one API key (429), so that one user cannot use all of
    them."""
    session_bytes: Positive = 256 * 1024 * 1024
    """Maximum size of the tokens of all sessions, at 4 bytes a token: 64 Mi tokens by default.
    Above this limit new chunks are refused (503). An ingress keeps a second copy of the same
    size."""
    session_idle_s: Annotated[float, Meta(ge=10, le=MAX_KEPT_S)] = 600.0
    """A session expires if no chunk of it was requested or answered for this long."""


SERVE_FILES = ("api_keys_file", "admin_keys_file", "chat_template")
"""Keys of `serve` with names of files, which must exist on every host."""
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Half of the maximum size of a message to an engine (`coordinator/transport/handshakes.py`)."""


TruncatePrompts = Literal["none", "end", "start"]
"""The side from which a text that is too long is cut."""


class ServeConfig(SessionLimits, frozen=True):
    host: FilledText = "127.0.0.1"
    """Address on which ingresses listen; `interface`: the address of `cluster.interface` on each
    host."""
    port: Port = 8000
    """Port that the HTTP servers of all ingress replicas of a node share; 0: a free port."""
    proxy_port: Port = 0
    """Port of Ray Serve's own proxy, in addition to Swell's server; 0: no proxy (with `swell
    serve`)."""
    ingress_replicas: Processes | None = None
    """Number of HTTP servers, spread evenly over the hosts of the Ray cluster. None: one on each
    host that exists at the start."""
    api_keys_file: FilledText | None = None
    """File with one key per line, in visible ASCII; a `#` at the start or after a space starts a
    comment. Keys cannot contain `#`. A request must send one of the keys, as `authorization: Bearer
    KEY` or `x-api-key: KEY`. Operators' keys are in `admin_keys_file`."""
    admin_keys_file: FilledText | None = None
    """File with the keys of the admin API. None: the admin API is open if `api_keys_file` is None
    too, else it is refused, because a user's key is not an operator's."""
    share_prefixes: Literal["key", "all"] = "key"
    """Scope of the prefix cache if there is an `api_keys_file`. `key`: requests find only prefixes
    of their own key; otherwise cache hits (`cached_tokens`, a faster answer) would reveal to one
    key what another one has sent. `all`: all keys share the prefix cache, which saves the
    computation of common prompts if the clients trust each other."""
    max_body_bytes: Annotated[int, Meta(ge=1, le=MAX_BODY_BYTES)] = 16 * 1024 * 1024
    """Longest HTTP body that is read. A conversation that fills a context of a million tokens has 5
    MB, and twice that if everything but ASCII is escaped; the number of values in a body has its
    own limit (`cluster/text/schema/json_size.py`)."""
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Minimum number of tokens between two events of a streamed answer; the first token and the end
    are always sent at once. A larger number costs less work per token. A request may set a larger
    one."""
    max_children: Positive = 1024
    """Maximum number of answers of one request: its prompts times `n` or `best_of`. Each is a
    separate request to the engines: 1024 are several full batches, and take 0.1 s to submit."""
    max_connections: Positive = 16_384
    """Maximum number of open connections of one ingress; more are refused with a 503. An idle
    connection takes about 20 KB and a file descriptor. If the process may have fewer descriptors,
    the limit is lower."""
    head_timeout_s: Seconds = 60.0
    """Longest time from a connection's start, or the first byte of a further request, to the end of
    its headers; then the connection is closed with a 408. TCP retransmits with growing delays, so
    an outage of 30 s may delay a request's head by 60 s."""
    transfer_timeout_s: Seconds = 60.0
    """Longest time in which a client sends no byte of an unfinished body (408), or reads no byte of
    an answer, even if it reads slowly; a body also needs 1 KiB/s on average."""
    keep_alive_s: Seconds = 10.0
    """Longest pause in a streamed answer, counted from the end of its request: then the server
    sends the head, if it has not been sent, and a comment or a `ping` event. An answer that is not
    streamed sends its head early only for a client that sends `x-swell-early-head: 1`. Proxies
    close an answer without a byte after 60 s (nginx, ALB), and some after 15 s."""
    idle_timeout_s: Seconds = 620.0
    """How long a connection may wait for its next request. A proxy that reuses a connection at the
    moment it is closed answers 502, so the proxy's own limit must be the shorter one: that of
    Google's load balancers is 600 s, and cannot be changed."""
    allowed_hosts: Names = []
    """Names under which clients reach the server, as in the header `Host`, without port; `*` allows
    all. Addresses, `localhost`, `host` and the machine's own name are always allowed. The admin API
    refuses other names. All other routes except probes, `/metrics` and `/openapi.json` refuse them
    too if `host` is a loopback address or names are listed: a web page can make its own name
    resolve to the server's address (DNS rebinding)."""
    allowed_origins: Names = []
    """Origins whose pages may use the admin API, such as `https://ops.example`; `*` allows all.
    Pages of the server itself and of loopback addresses are always allowed."""
    cors_origins: Names = []
    """Origins whose pages may call all routes but the admin API's from a browser and read the
    answers, such as `https://app.example`; `*` allows all. Empty by default: otherwise any page
    that a user opens could use a server on the user's loopback address."""
    chat_template: FilledText | None = None
    """A file with a chat template, used instead of the model's."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """How to treat a request with a field that no known server has: `refuse` answers 400 and names
    the field, since a misspelt limit would be ignored; `ignore` names it in the answer's header
    `x-swell-warning`. Known fields that are not supported are always refused, and unknown fields of
    messages, calls and tools are always ignored."""
    schema_keywords: Literal["refuse", "ignore"] = "refuse"
    """How to treat a JSON schema with a standard keyword that cannot be enforced during generation,
    such as `uniqueItems: true` or `not`: `refuse` answers 400 and names tool and path, since an
    answer may violate the keyword; `ignore` names it in the header `x-swell-warning`. Keywords
    without constraints are always ignored."""
    truncate_prompts: TruncatePrompts = "none"
    """How to treat a text for pooling (embeddings, scores, classes) that is longer than the model's
    limit, if its request does not specify it: `none` answers 400 and names the text, because an
    embedding does not show that its text was cut; `end` cuts the end off, as sentence-transformers
    does; `start` cuts the beginning off. Prompts for text generation are never cut by this
    setting."""
    request_chat_template: bool = False
    """Whether a request may contain a chat template: it is a program that may run for long."""
    tool_parser: Text = "auto"
    """Format of the model's tool calls: a name in `docs/reference/formats.md`, such as hermes or
    qwen3_coder; `auto` detects it from the chat template; `none`."""
    reasoning_parser: Text = "auto"
    """Format of the model's reasoning: a name in `docs/reference/formats.md`, such as think or
    harmony; `auto` and `none` as above."""
    stored_responses: NonNegative = 1000
    """Maximum number of answers of `/v1/responses` that are stored, for requests that continue or
    retrieve them; 0: none. The least recently used ones are dropped first."""
    stored_response_bytes: Positive = 256 * 1024 * 1024
    """Bytes of all stored answers, each with its conversation; for an answer that is computed in
    the background, also with the data by which another ingress can continue it."""
    stored_response_age_s: KeptSeconds = 86400.0
    """Maximum age of stored answers; older ones are dropped."""
    request_history: NonNegative = 2048
    """Maximum number of finished requests whose history an ingress keeps for `/admin/requests/ID`;
    each answer of `n` counts. One takes about a kilobyte."""
    request_history_s: KeptSeconds = 600.0
    """How long an ingress keeps the history of a finished request."""
    otlp_endpoint: Text | None = None
    """An OpenTelemetry collector (OTLP over HTTP), such as `http://collector:4318`: it receives
    each finished request as spans. None: the value of OTEL_EXPORTER_OTLP_ENDPOINT in the
    environment of the command that starts the application; if that is not set either, nothing is
    exported. Needs `pip install 'swell[tracing]'`."""
    no_engine_timeout_s: Seconds = 60.0
    """How long a request waits while no engine is available, before a 503; longer than a
    replacement takes to start."""
    max_waiting_requests: Positive = 4096
    """Maximum number of requests that wait for a slot, in all engines together; one more gets a 429
    with a time to retry. Each child of `n` answers counts. At a hundred requests per second the
    last of 4096 waits for 40 s, about as long as most clients do; a load test of thousands of
    streams passes."""
    max_waiting_tokens: Positive = 16_777_216
    """Maximum number of prompt tokens that wait to be computed, in all engines together; more get a
    429. They are lists of numbers, in an ingress and in an engine: 16 Mi tokens take about 0.7 GiB
    in each. 128 prompts of 128 Ki tokens fit."""
