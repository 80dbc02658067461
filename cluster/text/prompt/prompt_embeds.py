"""Prompts that are sent as embeddings: base64 of a safetensors file with one tensor [tokens, hidden
size]. Unlike a pickled tensor, it contains no code.

These functions raise only `BadRequest`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.sampling_params import DERIVED_SALT, SamplingParams
from swell.cluster.text.tokens.tokenizer import read_json
from swell.configs.error_text import shown
from swell.configs.schema import ModelConfig
from swell.worker.sampler_wire import PromptEmbeds

FORM = "base64 of a safetensors file with one tensor [tokens, hidden size] in F32, F16 or BF16"
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_CHILDREN_BYTES = 256 << 20
"""Limit on the bytes of the embeddings of all answers together: each answer is a separate request
to the engines, and contains them."""
_MAX_HEADER_BYTES = 4096
"""Limit on the header for one tensor, with room for a note."""
_PIECE_BYTES = 64 * 1024
_F16_NUMBERS = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)
"""Upper bytes of finite F16 values: in infinity and NaN all bits of the exponent are set."""


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """The description of a tensor in a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class EmbedsWidth(NamedTuple):
    numbers: int | None
    """Number of values of an embedding of the model; None if its files do not say, and a worker
    checks it."""


class EmbedsPrompt(NamedTuple):
    embeds: PromptEmbeds
    digest: str
    """Digest of the values: equal digests mean equal KV."""


class EmbedsPrompts(list[EmbedsPrompt]):
    """Prompts that `LLM.generate` accepts instead of texts."""


def load_embeds_width(config: ModelConfig) -> EmbedsWidth | None:
    """Returns the width for a model that accepts prompts as embeddings, otherwise None."""
    if not config.prompt_embeds:
        return None
    model = read_json(config.path, "config.json")
    text = model.get("text_config")
    sizes = {**model, **text} if isinstance(text, dict) else model
    width = sizes.get("word_embed_proj_dim", sizes.get("embedding_size", sizes.get("hidden_size")))
    return EmbedsWidth(width if isinstance(width, int) else None)


def read_prompt_embeds(text: str, field: str) -> EmbedsPrompt:
    """Decodes the prompt in a field of a request."""
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(field, f"is not valid base64: {error}") from None
    tensor, data = _read_file(file, field)
    tokens, width = _shape(tensor, field)
    if tensor.dtype not in DTYPE_BYTES:
        raise _refused(field, f"has a tensor with the dtype {shown(tensor.dtype)}")
    size = tokens * width * DTYPE_BYTES[tensor.dtype]
    if tensor.data_offsets != (0, size) or len(data) != size:
        what = f"{list(tensor.data_offsets)} of {len(data)} bytes"
        raise _refused(
            field, f"has its tensor at {what}; the shape {tensor.shape} needs [0, {size}]"
        )
    if not _all_finite(tensor.dtype, data):
        raise _refused(field, "contains NaN or infinity")
    embeds = PromptEmbeds(cast(Any, tensor.dtype), width, data)
    name = hashlib.blake2b(f"{tensor.dtype} {width} ".encode(), digest_size=16)
    name.update(data)
    return EmbedsPrompt(embeds, name.hexdigest())


def salt_of(digest: str, cache_salt: str | None) -> str:
    """Returns the cache salt of a prompt of embeddings, derived from the salt of its request. No
    request can set this salt, since a client's salt must not begin with `DERIVED_SALT`."""
    text = f"{digest} {'' if cache_salt is None else 'salt ' + cache_salt}"
    return DERIVED_SALT + hashlib.blake2b(text.encode(), person=b"swell-embeds").hexdigest()


def check_embeds(prompts: Sequence[EmbedsPrompt], width: EmbedsWidth | None, field: str) -> None:
    """Raises BadRequest for embeddings that the model does not accept. `width` is None if it
    accepts none."""
    if width is None:
        raise BadRequest(
            f"{field} is not accepted here; set model.prompt_embeds=true, or send the prompt as "
            "text or token ids",
            field,
            "unsupported_value",
        )
    for prompt in prompts:
        if width.numbers not in (None, prompt.embeds.width):
            rule = f"has embeddings with {prompt.embeds.width} numbers; the model's have"
            raise BadRequest(f"{field} {rule} {width.numbers}", field, "invalid_prompt_embeds")


def check_params(
    params: SamplingParams, prompts: Sequence[EmbedsPrompt], field: str, *, echo: bool
) -> None:
    """Raises BadRequest for parameters that need the tokens of the prompt, which embeddings lack,
    and for more answers than there is room for."""
    sent_bytes = params.num_children * sum(len(prompt.embeds.data) for prompt in prompts)
    if sent_bytes > MAX_CHILDREN_BYTES:
        raise BadRequest(
            f"{field} for {params.num_children} answers to each prompt has {sent_bytes} bytes; at "
            f"most {MAX_CHILDREN_BYTES} are sent to engines. Request fewer answers at once",
            field,
        )
    if echo:
        raise needs_tokens("echo", True, field)
    if params.prompt_logprobs is not None:
        raise needs_tokens("prompt_logprobs", params.prompt_logprobs, field)
    if params.bad_words:
        raise needs_tokens("bad_words", params.bad_words, field)
    if params.repetition_penalty != 1.0:
        raise needs_tokens("repetition_penalty", params.repetition_penalty, field)


def needs_tokens(name: str, value: object, field: str) -> BadRequest:
    rule = f"needs the tokens of the prompt, but {field} has none; leave it out"
    return bad_value(name, value, rule, "unsupported_value")


def _read_file(file: bytes, field: str) -> tuple[_Tensor, bytes]:
    """Returns the description of the one tensor, and the bytes after the header."""
    header_bytes = int.from_bytes(file[:8], "little")
    if len(file) < 8 or not 0 < header_bytes <= len(file) - 8:
        raise _refused(field, f"is not a safetensors file ({len(file)} bytes)")
    if header_bytes > _MAX_HEADER_BYTES:
        limit = f"at most {_MAX_HEADER_BYTES} are allowed"
        raise _refused(field, f"has a header of {header_bytes} bytes; {limit}")
    try:
        header = json.loads(file[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        (tensor,) = msgspec.convert(header, dict[str, _Tensor]).values()
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise _refused(field, "has no valid header with exactly one tensor") from None
    return tensor, file[8 + header_bytes :]


def _shape(tensor: _Tensor, field: str) -> tuple[int, int]:
    if len(tensor.shape) != 2 or not all(0 < size < 2**31 for size in tensor.shape):
        raise _refused(field, f"has a tensor with the shape {shown(tensor.shape)}")
    tokens, width = tensor.shape
    return tokens, width


def _all_finite(dtype: str, data: bytes) -> bool:
    """Returns whether every value is finite. It runs in C, since there may be millions of values,
    and in pieces, since no other thread runs meanwhile."""
    pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
    return all(_is_finite(dtype, piece) for piece in pieces)


def _is_finite(dtype: str, data: bytes) -> bool:
    if dtype == "F16":
        return not data[1::2].translate(None, delete=_F16_NUMBERS)
    if dtype == "BF16":  # the upper half of an F32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        data = bytes(wide)
    return math.isfinite(sum(array("f", data)))


def _refused(field: str, problem: str) -> BadRequest:
    return BadRequest(f"{field} {problem}; send {FORM}", field, "invalid_prompt_embeds")
