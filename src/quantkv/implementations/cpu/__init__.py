"""Decode, verification and writes on a CPU: kernels compiled by numba when they are first needed, over packed bytes."""
