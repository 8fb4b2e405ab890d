"""How numba compiles the CPU kernels: every rounding stands as it is written, so digits never depend on the compiler.

numba keeps what it compiled on disk, but does not notice when a function changed that a kernel of another file calls:
after such a change, remove `__pycache__` (`make clean`). A callee that is a closure would keep its kernel out of that
cache altogether.
"""

import logging

import numba
from numba.core import event

logger = logging.getLogger(__name__)

# Division by zero gives infinity as in numpy; Python's exception would keep loops with a division from vectorising.
exact = numba.njit(cache=True, nogil=True, error_model="numpy")


class _Notice(event.Listener):
    """Tells why the first call takes so long, once a process, and only where nothing is on disk yet."""

    told = False

    def on_start(self, _: event.Event) -> None:
        if not self.told:
            logger.warning("compiling the CPU kernels; they are kept on disk, the first time takes up to two minutes")
        self.told = True

    def on_end(self, _: event.Event) -> None:
        """Nothing to say."""


event.register("numba:compile", _Notice())
