"""How numba compiles the CPU kernels: one decorator where sums may be reordered, one where each rounding counts.

numba keeps what it compiled on disk, but does not notice when a function changed that a kernel of another file calls:
after such a change, remove `__pycache__` (`make clean`). A callee that is a closure would keep its kernel out of that
cache altogether.
"""

import numba

_REORDER = {"reassoc", "contract", "nsz", "arcp"}  # NaN and infinity keep their meaning

# Division by zero gives infinity as in numpy; Python's exception would keep loops with a division from vectorising.
exact = numba.njit(cache=True, nogil=True, error_model="numpy")
fast = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_REORDER)
