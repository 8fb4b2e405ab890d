"""Is the Python environment the one that olmorl was installed into?"""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from olmorl.cli.finding import Finding
from olmorl.cli.shadowed import HOME, describe, find_shadowed, find_strays


def check_packages() -> Iterator[Finding]:
    yield _python()
    yield from check_requirements()
    yield from _shadowed()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 14):
        return Finding("warn", f"Python {version} is newer than what is tested", "3.11 to 3.13 are")
    return Finding("ok", f"Python {version} at {sys.executable}")


def check_requirements() -> Iterator[Finding]:
    """What the installed distribution itself says it needs, so that no list is kept twice."""
    try:
        declared = [Requirement(text) for text in metadata.requires("olmorl") or []]
    except metadata.PackageNotFoundError:
        yield Finding("warn", "olmorl runs from its source tree without being installed", "pip install -e .")
        return
    needed = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    good = []
    for requirement in needed:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding("fail", f"{requirement.name} is not installed", f"pip install '{_plain(requirement)}'")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            good.append(f"{requirement.name} {version}")
        else:
            yield Finding(
                "fail",
                f"{requirement.name} {version} is not supported: olmorl needs {requirement.specifier}",
                f"pip install '{_plain(requirement)}'",
            )
    yield Finding("ok", ", ".join(good))


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _shadowed() -> Iterator[Finding]:
    shadowed = find_shadowed()
    for name, origin in shadowed.items():
        yield Finding("fail", describe(name, origin))
    if not shadowed:
        yield Finding("ok", f"the three packages lie side by side in {HOME}")
    for stray in find_strays(Path.cwd()):
        yield Finding(
            "warn",
            f"{stray} has the name of one of our packages; Ray workers may import it instead",
            "rename it, or start from another directory",
        )
