"""Prefill/decode disaggregation of one request: one engine computes its prompt, another continues.
Pure.

    begin ─► an attempt on a prefill engine ─► end ─► an attempt on any decode engine,
                        │                             which reads the KV
                        └── fail: the next attempt computes everything, or begins again

The prefill engine gets the tokens of the prompt's full blocks without the last token, since the
other engine needs the logits of that token. It writes the KV under a name that is unique to this
attempt. It samples one token, which is dropped, so that a prompt whose logits are NaN fails there.
An engine of another version does not read the KV. If the KV is missing, the prompt is computed
again.
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from swell.cluster.client.routing.routable_engines import Role
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams

HANDED_OVER = "its prompt was computed, and another engine continues"
"""Why an attempt ended, as it appears in the journey of a request."""
MAX_PREFILLS = 2
"""Limit on how often the prompt of a request is computed for another engine."""
_DIGEST_BYTES = 16


class Handover:
    """The handover state of one request."""

    def __init__(self, request: EngineCoreRequest) -> None:
        sampler = request.sampler
        self._is_possible = not (
            request.skip_prefix_cache
            or sampler.pooling is not None
            or sampler.routed_experts
            or request.prompt_embeds is not None
        )
        """Whether the request may be split: its answer needs no values that only the computation of
        its prompt produces."""
        self._request_id = request.request_id
        self._name = ""
        self._block_tokens = 1
        self.version: str | None = None
        """The version that both engines must have; None before the handover begins and after it
        failed."""
        self._present_version = ""
        """The version of the engine of the current attempt."""
        self._attempts = 0
        self.is_prefilling = False
        self.is_ready = False

    @property
    def may_begin(self) -> bool:
        idle = not self.is_prefilling and not self.is_ready
        return self._is_possible and idle and self._attempts < MAX_PREFILLS

    @property
    def role(self) -> Role:
        """The role of the engine that the next attempt needs."""
        return Role.PREFILL if self.is_prefilling else Role.DECODE

    def begin(self, block_tokens: int, version: str) -> None:
        """Makes the next attempt a prefill for another engine of this version."""
        self.version = version
        self._attempts += 1
        name = f"{self._request_id} {self._attempts}".encode()
        self._name = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).hexdigest()
        self._block_tokens = block_tokens
        self.is_prefilling = True

    def assign(self, version: str) -> None:
        """Records that an attempt begins on an engine of this version."""
        self._present_version = version

    def end(self) -> None:
        """Records that the prefill attempt has written its KV."""
        self.is_prefilling, self.is_ready = False, True

    def fail(self) -> None:
        """Records that the attempt ended in another way; the written KV is read at most once."""
        self.is_prefilling = self.is_ready = False
        self.version = None

    def engine_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Returns the request that the engine of the current attempt gets."""
        if self.is_prefilling:
            size = self._block_tokens
            return EngineCoreRequest(
                request.request_id,
                request.prompt_token_ids[: (len(request.prompt_token_ids) - 1) // size * size],
                SamplerParams(),
                max_tokens=1,
                priority=request.priority,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                keep_blocks=request.keep_blocks,
                hand_over=self._name,
            )
        if self.is_ready and self.version == self._present_version:
            return replace(request, handed_over=self._name)
        return request
