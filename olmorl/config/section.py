"""What every section of a config is."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _without_nul(path: str | Path) -> str | Path:
    if "\0" in str(path):
        raise PydanticCustomError("nul", "a path without NUL characters")
    return path


WITHOUT_NUL = AfterValidator(_without_nul)
PathText = Annotated[str, Field(min_length=1), WITHOUT_NUL]
"""a path, or a name that stands in for one; no system takes NUL in it"""


class Section(BaseModel):
    """Frozen, and refuses what it does not know. Strict: "16" or true is no number; paths and lists are converted."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True
    )
