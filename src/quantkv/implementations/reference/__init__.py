"""The reference: write, attend and dequantize in plain PyTorch. It is the specification, and the path of a CPU for what the
compiled kernels do not serve."""
