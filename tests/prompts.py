"""Eight prompts for SmolLM2: 4 to 190 tokens, two that share their beginning."""

FACTS = (
    "The following is a list of facts about the planets of the solar system. " * 12
    + "The largest planet is Jupiter and the smallest planet is"
)
SCORED = (
    FACTS
    + " Jupiter. It is a gas giant with a mass more than two and a half times that of all the other planets in the Solar System combined."
)
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    FACTS,
    "Once upon a time there was a small dog who",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17,",
    FACTS[:400],
]
