"""What the compiled kernels may count on: this processor, or the one that numba is told to compile for.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES (both, as LLVM writes them: "+avx2,-avx512f") say another than the host.
"""

from typing import Any

from llvmlite import binding
from numba.core import config

_TOLD: Any = config
NAME: str = _TOLD.CPU_NAME or binding.get_host_cpu_name()


def has(*features: str) -> bool:
    return all(_FEATURES.get(feature, False) for feature in features)


def _features() -> dict[str, bool]:
    if _TOLD.CPU_FEATURES is None:
        return dict(binding.get_host_cpu_features())
    return {said[1:]: said[0] == "+" for said in _TOLD.CPU_FEATURES.split(",") if said}


_FEATURES = _features()
