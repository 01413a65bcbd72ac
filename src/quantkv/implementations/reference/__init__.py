"""The reference: write, attend and dequantize in plain PyTorch. It is the specification, and the CPU path."""
