"""OpenAI's HTTP bodies, typed: requests, responses, and the way in from bytes."""

from swell.cluster.openai.base import ErrorBody, ErrorDetail, Usage, error_body, usage
from swell.cluster.openai.chat import ChatChunk, ChatCompletion, ChatCompletionRequest
from swell.cluster.openai.completions import Completion, CompletionChunk, CompletionRequest
from swell.cluster.openai.decode import decode
from swell.cluster.openai.messages import ChatMessage
from swell.cluster.openai.models import ModelList

__all__ = [
    "ChatChunk",
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatMessage",
    "Completion",
    "CompletionChunk",
    "CompletionRequest",
    "ErrorBody",
    "ErrorDetail",
    "ModelList",
    "Usage",
    "decode",
    "error_body",
    "usage",
]
