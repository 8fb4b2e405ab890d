from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Every Python file of the three packages."""
    return sorted(path for name in ("olmorl", "inference", "learner") for path in (ROOT / name).rglob("*.py"))


@pytest.fixture(scope="session")
def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
