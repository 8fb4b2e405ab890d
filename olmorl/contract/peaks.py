"""What known GPUs could do at most, by their vendors: the denominators of MFU and MBU, and the planner's devices."""

VENDOR_PEAKS = {  # part of the device's name: dense bfloat16 FLOP/s, bytes/s of memory
    "A100": (312e12, 2.04e12),
    "H100": (990e12, 3.35e12),
    "H200": (990e12, 4.8e12),
    "B200": (2250e12, 8.0e12),
}
