"""`python -m olmorl.quickstart [FOLDER]`: make the quickstart's model and data anew."""

import sys
from pathlib import Path

from olmorl.quickstart.build import build

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "configs/quickstart")
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    print(f"wrote {folder}")
