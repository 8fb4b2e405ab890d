"""What every section of a config is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and refuses what it does not know. Strict: "16" or true is no number; paths and lists are converted."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True
    )
