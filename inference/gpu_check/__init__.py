"""Proof and measurement of the GPU path on one CUDA box, without Ray and without a network: `make gpu-check`."""
