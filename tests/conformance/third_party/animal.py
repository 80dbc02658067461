"""The answer that agents have to give. Its grammar leaves nano no way but to fill the form: every
text has an end, every field is required, and there are no others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=8)]
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=99)]


class Anything(BaseModel):
    """An answer that promises an object and no more has this form, whatever is in it."""

    model_config = ConfigDict(extra="allow")


PROMPT = "a cat"
