"""Attention and writes in Triton, on every GPU that it compiles for."""
