"""The native kernels of csrc/, from Python: which of them run here, packed weights, the decoder as one call per step."""
