"""Prompts at random, answers of an engine, and how two of them differ."""

import numpy as np

VOCABULARY = 32000
Answer = tuple[list[int], list[float]]  # tokens, and the logarithm of the probability of each


def prompts(count: int, length: int | list[int], seed: int = 7) -> list[dict]:
    """Prompts as vLLM takes them: random tokens, as many in each as `length` says."""
    rng = np.random.default_rng(seed)
    lengths = [length] * count if isinstance(length, int) else length
    return [{"prompt_token_ids": rng.integers(3, VOCABULARY, n).tolist()} for n in lengths]


def compare(a: list[Answer], b: list[Answer]) -> dict:
    """How many tokens answers have in common before they part, and the largest difference of log-probabilities up to there."""
    parts, worst = [], 0.0
    for (tokens, logs), (others, other_logs) in zip(a, b):
        same = next((i for i, (x, y) in enumerate(zip(tokens, others)) if x != y), len(tokens))
        parts.append(same)
        worst = max([worst, *(abs(x - y) for x, y in zip(logs[:same], other_logs[:same]))])
    return {"equal_tokens": parts, "largest_log_difference": worst}
