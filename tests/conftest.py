"""Before anything imports Triton: without a GPU its kernels run in the interpreter, on CPU tensors."""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
