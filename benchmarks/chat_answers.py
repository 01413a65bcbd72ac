"""How many short answers of a chat are those of 16 bits: 24 questions in the model's own chat template, 40 greedy tokens each.

    python benchmarks/chat_answers.py --model NAME=DIR|GGUF ... [--kv 8bit,4bit] --out FILE.json

Each is asked as README's snippet asks it: `generate` with a new `QuantizedCache(model.config, NAME)`, one question at a time. An answer may
end early. Nothing of the package was chosen by these questions. FILE.json has each cache's counts as soon as they are there. A preset keeps
its full-precision tokens: of so short a chat they are more than half.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from quantkv.cli import models
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention

TOKENS = 40
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis in two sentences.",
    "How many days are in a leap year?",
    "Give me three tips for sleeping better.",
    "What is the difference between a list and a tuple in Python?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "What should I pack for a weekend in the mountains?",
    "Summarize the story of Cinderella.",
    "What is 17 times 6?",
    "Name five animals that live in Africa.",
    "How do I boil an egg?",
    "What is machine learning?",
    "Write an email asking for a day off.",
    "What causes the seasons?",
    "List the planets of the solar system.",
    "How does a bicycle stay upright?",
    "What is the boiling point of water?",
    "Tell me a joke about computers.",
    "Describe the taste of a lemon.",
    "Explain what a database index is.",
)


def answers(loaded: models.Loaded, kv: str | None) -> list[list[int]]:
    """The tokens of each answer. kv: a preset, a format or a policy's file; None: transformers' own cache."""
    found = []
    for question in QUESTIONS:
        said = [{"role": "user", "content": question}]
        ids = loaded.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        cache = {} if kv is None else {"past_key_values": QuantizedCache(loaded.model.config, kv)}
        out = loaded.model.generate(**ids, **cache, do_sample=False, max_new_tokens=TOKENS)
        found.append(out[0, ids["input_ids"].shape[1] :].tolist())
    return found


def until_they_part(one: list[int], other: list[int]) -> int:
    """Tokens that two answers share from their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=DIR|GGUF, several times")
    parser.add_argument("--kv", default="8bit,4bit,3bit,2bit,int4")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for given in args.model:
        name, _, path = given.partition("=")
        loaded = models.load(path)
        exact = answers(loaded, None)
        use_quantkv_attention(loaded.model)
        for kv in args.kv.split(","):
            told = answers(loaded, kv)
            shared = [until_they_part(*both) for both in zip(told, exact)]
            row = {"model": name, "cache": kv, "questions": len(exact), "identical": sum(a == b for a, b in zip(told, exact))}
            row |= {"tokens": sum(map(len, exact)) / len(exact), "shared": sum(shared) / len(shared)}
            rows = [*(old for old in rows if (old["model"], old["cache"]) != (name, kv)), row | {"torch": torch.__version__}]
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name}, {kv}: {row['identical']} of {len(exact)}, {row['shared']:.1f} of {row['tokens']:.1f} tokens", flush=True)


if __name__ == "__main__":
    main()
