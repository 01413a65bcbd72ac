"""Decode and verification: the kernels, which configuration suits a call, and how results are combined."""
