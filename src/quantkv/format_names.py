"""The names of the formats that come with quantkv, for whoever must not load torch to list them: help and completion."""

FORMAT_NAMES = (
    *("bf16", "fp16", "fp32", "int8", "fp8", "fp8_e5m2", "fp8_token"),
    *("levels8", "levels6", "levels5", "levels4", "levels3", "levels2", "trellis2", "int4", "int2"),
    *("k8v4", "k8v2", "k4v2", "tq_k8v4", "tq4", "tq_k3v4", "tq3"),
)
