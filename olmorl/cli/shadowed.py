"""Are `inference` and `learner` ours?

Both are common words at the top level of Python: a distribution of that name in site-packages beats an editable
install, and the failure then is an AttributeError deep in a worker. Looking at once costs a millisecond.
"""

import importlib.util
from pathlib import Path

import olmorl
from olmorl.contract.errors import ConfigError

PACKAGES = ("olmorl", "inference", "learner")
HOME = Path(olmorl.__file__).resolve().parent.parent


def find_shadowed() -> dict[str, str | None]:
    """Each package that does not lie beside olmorl, and the file found in its place (None: nothing is found)."""
    shadowed: dict[str, str | None] = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
        if HOME / name not in folders:
            shadowed[name] = None if spec is None else spec.origin or str(next(iter(folders), None))
    return shadowed


def find_strays(folder: Path) -> list[Path]:
    """Files in `folder` that Ray workers started from there would import in place of ours."""
    if folder.resolve() == HOME:
        return []
    paths = [path for name in PACKAGES for path in (folder / f"{name}.py", folder / name)]
    return [path for path in paths if (path.suffix and path.is_file()) or list(path.glob("*.py"))]


def describe(name: str, origin: str | None) -> str:
    ours = HOME / name
    if origin is None:
        return f"package {name!r} is not found; it should lie at {ours}. Install olmorl anew: pip install olmorl"
    return (
        f"package {name!r} is shadowed by {origin}; ours lies at {ours}. Remove or rename that one "
        f"(pip uninstall {name}, if it came from the package index)"
    )


def refuse_shadowed_packages() -> None:
    """Raises ConfigError naming the file that is in the way."""
    shadowed = find_shadowed()
    if shadowed:
        raise ConfigError("\n".join(describe(name, origin) for name, origin in shadowed.items()))
