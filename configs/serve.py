"""The section `serve`: how HTTP is served, and within which limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import (
    FilledText,
    KeptSeconds,
    Names,
    NonNegative,
    Port,
    Positive,
    Processes,
    Seconds,
    Text,
)
from swell.configs.sessions import SessionLimits

SERVE_FILES = ("api_keys_file", "admin_keys_file", "chat_template")
"""Keys of `serve` that name files, which every host must have."""
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Half of what a message to an engine may have (`coordinator/handshakes.py`)."""


TruncatePrompts = Literal["none", "end", "start"]
"""Which end of a longer text is cut off."""


class ServeConfig(SessionLimits, frozen=True):
    host: FilledText = "127.0.0.1"
    """Where ingresses listen; `interface`: at the address of `cluster.interface` of each host."""
    port: Port = 8000
    """Shared by the HTTP servers of all ingress replicas of a node; 0: a free one."""
    proxy_port: Port = 0
    """Port of Ray Serve's own proxy beside ours; 0: no proxy (with `swell serve`)."""
    ingress_replicas: Processes | None = None
    """HTTP servers, spread evenly over the hosts of the Ray cluster. None: one on each host that
    is there at the start."""
    api_keys_file: FilledText | None = None
    """One key a line, visible ASCII without `#`, which starts a comment behind a space; a request
    must have one of them, as `authorization: Bearer KEY` or `x-api-key: KEY`. Operators' keys are
    in `admin_keys_file`."""
    admin_keys_file: FilledText | None = None
    """Keys of the admin API. None: it is open if `api_keys_file` is None too, else refused, since a
    user's key is not an operator's."""
    share_prefixes: Literal["key", "all"] = "key"
    """With `api_keys_file`: whose prefixes in the KV cache a request finds. `key`: those of its own
    key; what is cached of a prompt (`cached_tokens`, a faster answer) else tells one key what
    another one has sent. `all`: keys of clients that trust each other share them, which saves the
    computing of prompts that they have in common."""
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
    head_timeout_s: Seconds = 60.0
    """Longest time from a connection's start, or the first byte of a further request, to the end of
    its headers; then the connection is closed with a 408. What a link loses comes late: TCP sends
    it again ever more slowly, so that an outage of 30 s may hold a head back for 60."""
    transfer_timeout_s: Seconds = 60.0
    """Longest time in which a client sends no byte of an unfinished body (408), or takes no byte of
    an answer, however slowly it reads; a body also needs 1 KiB/s on average."""
    keep_alive_s: Seconds = 10.0
    """Longest pause in which a streamed answer sends nothing, from the end of its request on: then
    its head leaves, and a comment or a `ping` event. A whole answer does so only for a client that
    sends `x-swell-early-head: 1`. Proxies end an answer without a byte after 60 s (nginx, ALB), and
    some after 15 s."""
    idle_timeout_s: Seconds = 620.0
    """How long a connection may wait for its next request. A proxy that uses one again in the
    moment in which it is closed answers 502, so its own limit must be the shorter one: that of
    Google's load balancers is 600 s, and cannot be changed."""
    allowed_hosts: Names = []
    """Names under which clients reach the server, as in the header `Host`, without port; `*` allows
    all. Addresses, `localhost`, `host` and the machine's own name are always allowed. The admin API
    refuses other names. So do all other routes but probes, `/metrics` and `/openapi.json`, if
    `host` is a loopback address or names are listed: a web page can make its own name resolve to
    the server's address (DNS rebinding)."""
    allowed_origins: Names = []
    """Origins whose pages may use the admin API, as `https://ops.example`; `*` allows all. Pages of
    the server itself and of loopback addresses are always allowed."""
    cors_origins: Names = []
    """Origins whose pages may call all routes but the admin API's from a browser and read the
    answers, as `https://app.example`; `*` allows all. None by default: any page that a user opens
    could use a server on the user's loopback address."""
    chat_template: FilledText | None = None
    """A file with a chat template, used instead of the model's."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """For a request with a field that no known server has: `refuse` answers 400 and names it, since
    a misspelt limit has no effect; `ignore` names it in the answer's header `x-swell-warning`.
    Known fields that are not supported are always refused, and unknown fields of messages, calls
    and tools are always ignored."""
    schema_keywords: Literal["refuse", "ignore"] = "refuse"
    """For a JSON schema with a keyword of the standard that cannot be held while an answer is
    written, as `uniqueItems: true` or `not`: `refuse` answers 400 and names tool and path, since an
    answer may break what the keyword asks for; `ignore` names it in the header `x-swell-warning`.
    Keywords that ask for nothing are always ignored."""
    truncate_prompts: TruncatePrompts = "none"
    """What happens to a text that shall be pooled (embeddings, scores, classes) and is longer than
    the model reads, where its request does not say: `none` answers 400 and names it, since what is
    cut off changes no vector; `end` reads the beginning, as sentence-transformers does; `start`
    reads the end. Prompts of which text is generated are never cut by it."""
    request_chat_template: bool = False
    """Whether a request may contain a chat template: it is a program that may run for long."""
    tool_parser: Text = "auto"
    """How the model writes tool calls: a name in `docs/reference/formats.md`, as hermes or
    qwen3_coder; `auto` detects it from the chat template; `none`."""
    reasoning_parser: Text = "auto"
    """How the model marks its reasoning: a name in `docs/reference/formats.md`, as think or
    harmony; `auto` and `none` as above."""
    stored_responses: NonNegative = 1000
    """Answers of `/v1/responses` that are stored, for requests that continue or retrieve them; 0:
    none. The least recently used are dropped first."""
    stored_response_bytes: Positive = 256 * 1024 * 1024
    """Bytes of all stored answers, each with its conversation; for an answer that is computed in
    the background, also with the data by which another ingress can continue it."""
    stored_response_age_s: KeptSeconds = 86400.0
    """Older stored answers are dropped."""
    request_history: NonNegative = 2048
    """Finished requests of which an ingress keeps what happened to them, for `/admin/requests/ID`;
    each answer of `n` counts. One takes about a kilobyte."""
    request_history_s: KeptSeconds = 600.0
    """How long it keeps them."""
    otlp_endpoint: Text | None = None
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
