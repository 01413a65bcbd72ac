"""Answers of an engine, and how two of them differ."""

Answer = tuple[list[int], list[float]]  # tokens, and the logarithm of the probability of each


def compare(a: list[Answer], b: list[Answer]) -> dict:
    """How many tokens answers have in common before they part, and the largest difference of log-probabilities up to there."""
    parts, worst = [], 0.0
    for (tokens, logs), (others, other_logs) in zip(a, b):
        same = next((i for i, (x, y) in enumerate(zip(tokens, others)) if x != y), len(tokens))
        parts.append(same)
        worst = max([worst, *(abs(x - y) for x, y in zip(logs[:same], other_logs[:same]))])
    return {"equal_tokens": parts, "largest_log_difference": worst}
