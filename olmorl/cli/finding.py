"""What doctor found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    status: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5} {self.what}" + (f"\n      -> {self.fix}" if self.fix else "")
