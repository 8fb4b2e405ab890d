"""What plotly.js draws, as it wants it: traces and a layout. plotly's own classes check every number of every trace,
which takes longer than all the rest of a page."""

from typing import Any


class Figure:
    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {"xaxis": {}, "yaxis": {}}

    def add(self, kind: str, **trace: Any) -> None:
        self.data.append({"type": kind, **trace})

    def titles(self, *, x: str = "", y: str = "") -> None:
        """Of the axes."""
        for axis, text in (("xaxis", x), ("yaxis", y)):
            if text:
                self.layout[axis]["title"] = {"text": text}
