"""The Triton kernels: one write, one attend, one combine, for every format and every GPU that Triton compiles for."""
