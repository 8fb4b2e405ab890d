"""A few rows of float weights times panels of tokens: which block shape for how many tokens.

Tokens lie in panels of `LANES`: [panel, feature, lane]. Matrices and token arrays are addresses, sizes count floats.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_tile import FULL_RATE, LANES, LONG_ROW, WIDE, product


@exact
def float_rows(w, count, x, x_panel, out, out_step, out_panel, rows, tokens, after):  # type: ignore[no-untyped-def]
    """out = `rows` rows of `count` floats at `w`, times x; `after`: as in `inference.kernels.cpu_tile.product`.

    Blocks are as high and wide as the registers allow, 16 (AVX2) or 32 (AVX-512); tokens are computed by eights.

    At full rate what fills up a vector costs less than half vectors, and 64 tokens would not fit the first-level cache,
    which then is what products wait for.
    """
    left = (tokens + 7) // 8
    if FULL_RATE and left > 2:
        left += left % 2
    if 4 * count > LONG_ROW:
        after = np.int64(0)
    while left > 0:
        if WIDE == 16 and left >= 8 and not FULL_RATE:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, after, 6, 4, 16)
            done, taken = rows // 6 * 6, 8
        elif WIDE == 16 and left == 6:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, after, 8, 3, 16)
            done, taken = rows // 8 * 8, 6
        elif WIDE == 16 and left == 5:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, after, 4, 5, 8)
            done, taken = rows // 4 * 4, 5
        elif WIDE == 16 and left >= 4:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 2, 16)
            done, taken = rows // 12 * 12, 4
        elif WIDE == 16 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, after, 8, 3, 8)
            done, taken = rows // 8 * 8, 3
        elif WIDE == 16 and left == 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 1, 16)
            done, taken = rows // 12 * 12, 2
        elif WIDE == 8 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, after, 4, 3, 8)
            done, taken = rows // 4 * 4, 3
        elif WIDE == 8 and left >= 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, after, 6, 2, 8)
            done, taken = rows // 6 * 6, 2
        else:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 1, 8)
            done, taken = rows // 12 * 12, 1
        if done < rows:
            tail, to = w + 4 * done * count, out + 4 * done * out_step
            for panel in range((taken + 1) // 2):
                at, onto = x + 4 * panel * x_panel, to + 4 * panel * out_panel
                product(
                    tail, count, count, at, LANES, x_panel, onto, out_step, out_panel, rows - done, np.int64(0), 1, 2, 8
                )
        left -= taken
        x, out = x + 4 * (taken // 2) * x_panel, out + 4 * (taken // 2) * out_panel
        after = np.int64(0)  # what follows finds the weights in the cache
