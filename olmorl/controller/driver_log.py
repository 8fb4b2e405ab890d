"""The driver's log file: its warnings, as the console has them, with what is too long for a console."""

import logging
from pathlib import Path

TRACEBACK = "traceback"  # attribute of a record that the file has and the console has not
OURS = logging.getLogger("olmorl")


class DriverLog(logging.FileHandler):
    """Made at the first warning. Where nobody has set up logging, warnings still go to the console too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "driver.log", encoding="utf-8", errors="backslashreplace", delay=True)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self._console = None if OURS.hasHandlers() else logging.lastResort
        for handler in (self, self._console):
            if handler is not None:
                OURS.addHandler(handler)

    def format(self, record: logging.LogRecord) -> str:
        traceback = getattr(record, TRACEBACK, "")
        return super().format(record) + (f"\n{traceback.rstrip()}" if traceback else "")

    def close(self) -> None:
        for handler in (self, self._console):
            if handler is not None:
                OURS.removeHandler(handler)
        super().close()
