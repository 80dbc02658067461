"""The answer type of the agents. Its grammar leaves nano no choice except to fill the schema: every
text has a maximum length, every field is required, and no others are allowed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=8)]
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=99)]


class Anything(BaseModel):
    """The type of an answer that only promises an object, with any content."""

    model_config = ConfigDict(extra="allow")


PROMPT = "a cat"
