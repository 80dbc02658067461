"""A request whose prompt one engine computes, and which another one continues: pure.

    begin ─► an attempt on an engine that computes prompts ─► end ─► an attempt on any other one,
                        │                                           which reads the KV
                        └── fail: the next attempt computes everything, or begins anew

The engine that computes gets the tokens of the prompt's full blocks, without the last token, whose
logits the other one needs; it writes their KV under a name that no other attempt has. It samples a
token that is dropped, so that a prompt whose logits are no numbers fails there. An engine of
another version does not read it. Where it is not there, the prompt is computed again.
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from swell.cluster.client.routable_engines import Role
from swell.engine.wire import EngineCoreRequest
from swell.worker.sample.wire import SamplerParams

HANDED_OVER = "its prompt was computed, and another engine continues"
"""Why an attempt ended, as the journey of a request says it."""
MAX_PREFILLS = 2
"""How often the prompt of a request is computed for another engine."""
_DIGEST_BYTES = 16


class Handover:
    """Of one request."""

    def __init__(self, request: EngineCoreRequest) -> None:
        sampler = request.sampler
        self._is_possible = not (
            request.skip_prefix_cache
            or sampler.pooling is not None
            or sampler.routed_experts
            or request.prompt_embeds is not None
        )
        """Its answer needs no values that only the computation of its prompt gives."""
        self._request_id = request.request_id
        self._name = ""
        self._block_tokens = 1
        self.version: str | None = None
        """Of both engines, until it ends or fails."""
        self._present_version = ""
        """Of the engine of the present attempt."""
        self._attempts = 0
        self.is_prefilling = False
        self.is_ready = False

    @property
    def may_begin(self) -> bool:
        idle = not self.is_prefilling and not self.is_ready
        return self._is_possible and idle and self._attempts < MAX_PREFILLS

    @property
    def role(self) -> Role:
        """Of the engine that the next attempt needs."""
        return Role.PREFILL if self.is_prefilling else Role.DECODE

    def begin(self, block_tokens: int, version: str) -> None:
        """The next attempt computes the prompt of the request for another engine of this
        version."""
        self.version = version
        self._attempts += 1
        name = f"{self._request_id} {self._attempts}".encode()
        self._name = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).hexdigest()
        self._block_tokens = block_tokens
        self.is_prefilling = True

    def assign(self, version: str) -> None:
        """An attempt begins on an engine of this version."""
        self._present_version = version

    def end(self) -> None:
        """The attempt has written what it computed."""
        self.is_prefilling, self.is_ready = False, True

    def fail(self) -> None:
        """The attempt has ended otherwise; what was written is read at most once."""
        self.is_prefilling = self.is_ready = False
        self.version = None

    def engine_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """What the engine of the present attempt gets."""
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
