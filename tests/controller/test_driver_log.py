"""What the driver warns of stands in a file too, with its traceback."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys
from pathlib import Path
from olmorl.controller.driver_log import TRACEBACK, DriverLog
log = logging.getLogger("olmorl.rewards")
written = DriverLog(Path(sys.argv[1]))
log.info("nothing")
print(list(Path(sys.argv[1]).iterdir()))
log.warning("it failed", extra={TRACEBACK: "Traceback: there\\n"})
log.warning("again")
written.close()
log.warning("later")
"""


def test_warnings_go_to_the_file_and_still_to_the_console(tmp_path: Path) -> None:
    """In a process of its own: pytest sets up logging."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n", "a file without a warning"
    assert done.stderr.splitlines() == ["it failed", "again", "later"]
    first, traceback, again = (tmp_path / "driver.log").read_text().splitlines()
    assert first.endswith("olmorl.rewards: it failed") and traceback == "Traceback: there"
    assert again.endswith("olmorl.rewards: again")
