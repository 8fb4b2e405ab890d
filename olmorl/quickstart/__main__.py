"""`python -m olmorl.quickstart [FOLDER]`: make the quickstart's model and data anew."""

from pathlib import Path
from typing import Annotated

import typer

from olmorl.quickstart.build import build


def main(folder: Annotated[Path, typer.Argument()] = Path("configs/quickstart")) -> None:
    """Make the quickstart's model and data anew."""
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    typer.run(main)
