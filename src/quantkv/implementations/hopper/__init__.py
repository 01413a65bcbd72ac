"""Decode, verification and writes on Hopper in CUDA C++, compiled at run time."""
