"""The content blocks of a client's message."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.schema.chat_messages import check_named
from swell.cluster.text.schema.request_body import HistoryPart, neutral

_INPUT = msgspec.json.Decoder(dict[str, Any], float_hook=float)


class Block(HistoryPart, kw_only=True, tag_field="type"):
    """Base class of the content blocks. `cache_control` is accepted and ignored: prefixes are
    always cached."""

    cache_control: Any = None

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)

    def check_at(self, path: str) -> None:
        self.refuse_unsupported(path + ".")


class TextBlock(Block, kw_only=True, tag="text"):
    text: str
    citations: Annotated[list[Any] | None, neutral([])] = None


class ThinkingBlock(Block, kw_only=True, tag="thinking"):
    """The reasoning of an earlier answer, which is passed to the chat template. Signatures are not
    checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, kw_only=True, tag="redacted_thinking"):
    """Accepted and ignored: only the server that encrypted it can read it."""

    data: str


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    """A call that an earlier answer made."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    """An object, as the client wrote it: its numbers may be beyond all doubles."""
    caller: Annotated[Any, neutral({"type": "direct"})] = None
    toolset_name: Annotated[str | None, neutral()] = None

    def check_at(self, path: str) -> None:
        super().check_at(path)
        check_named(self.id, f"{path}.id")
        check_named(self.name, f"{path}.name")
        try:
            _INPUT.decode(self.input)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadRequest(
                f"{path}.input must be a JSON object: {error}", f"{path}.input", "invalid_type"
            ) from None


class UnservedBlock(Block, kw_only=True):
    """Base class of the known block types that are refused."""

    source: Any = None
    title: Any = None
    context: Any = None
    citations: Any = None
    content: Any = None

    def check_at(self, path: str) -> None:
        raise bad_value(
            f"{path}.type",
            self.type,
            "is not supported: the model reads only text; send its text in a block of type 'text'",
            "unsupported_value",
        )


class ImageBlock(UnservedBlock, kw_only=True, tag="image"):
    pass


class DocumentBlock(UnservedBlock, kw_only=True, tag="document"):
    pass


class SearchResultBlock(UnservedBlock, kw_only=True, tag="search_result"):
    pass


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    """The result of a tool for the call `tool_use_id`."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    """Whether the tool failed. If so, "Error: " is prepended to the result, because chat templates
    lack a field for failures."""
    toolset_name: Annotated[str | None, neutral()] = None

    def check_at(self, path: str) -> None:
        super().check_at(path)
        check_named(self.tool_use_id, f"{path}.tool_use_id")
        if isinstance(self.content, list):
            for index, block in enumerate(self.content):
                block.check_at(f"{path}.content[{index}]")

    @property
    def text(self) -> str:
        text = text_of(self.content or "")
        return f"Error: {text}" if self.is_error else text


ContentBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


def text_of(content: object) -> str:
    """Returns the texts of a content, joined by line breaks."""
    if isinstance(content, str):
        return content
    assert isinstance(content, list), "the content is a text or a list of blocks"
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))
