"""plotly.js from its Python package, without the kinds of trace that the page never draws.

A browser compiles what a script runs while it loads, and most of what plotly.js runs are maps, surfaces and meshes that
register themselves: a second on a laptop before the first chart. Where a version of plotly.js is put together in a way
that is not understood here, the page gets the whole of it.
"""

import re
from collections.abc import Iterator

from plotly.offline import get_plotlyjs

_REGISTER = re.compile(r"\.register\((\[(?:[\w$]+\(\),?)+\])\)")
_BAR = 'moduleType:"trace",name:"bar"'
"""the one kind that is drawn besides scatter, which is always there"""


def page_script() -> str:
    return only_drawn(get_plotlyjs())


def only_drawn(script: str) -> str:
    """Registers the module of bars alone; `script` as it is if there is any doubt which one that is."""
    lists = _REGISTER.findall(script)
    listed = set(re.findall(r"[\w$]+", lists[0])) if len(lists) == 1 else set()
    wanted = listed.intersection(_modules(script))
    return script.replace(lists[0], f"[{wanted.pop()}()]") if len(wanted) == 1 else script


def _modules(script: str) -> Iterator[str]:
    """The module of bars, and those that only pass it on."""
    sign = script.find(_BAR)
    while sign >= 0:
        start = script.rfind("});var ", 0, sign) + len("});var ")
        name = script[start : script.find("=", start)]
        yield name
        sign = script.find(f".exports={name}()}})")
