"""Speculative decoding over a quantized cache: guesses are checked several at a time, and the cache forgets those that were wrong.

    python examples/speculative.py                                 # prompt lookup: guesses come from the text so far
    python examples/speculative.py --assistant DIR                 # guesses by a smaller model with the same tokens
    python examples/speculative.py --prompt-file FILE --guesses 8 --kv int4

Each pass of the model checks the guesses and adds a token of its own; the pages of refused guesses are written again. What is accepted is
what the model would have said without guesses. The example says how many guesses were accepted, and how many passes that saved.

It runs twice. With a cache that is not quantized the text must be that of plain greedy decoding, token for token, or the exit code is 1
(checked where the model computes in float32). Then with --kv: tokens that are checked together read each other at 16 bits, and those that
follow one by one read quantized rows. Where two tokens are almost as likely the text may take the other one from there on; it says after
how many tokens, if so.
"""

import argparse
import sys
from pathlib import Path

import torch

from quantkv.cli import models
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention

PROMPT = (
    "The shopping list says: two apples, three pears, a loaf of bread, a bottle of milk, six eggs.\n"
    "The same shopping list again, word by word: two apples, three pears, a loaf of"
)


def generated(model, ids, kv, new_tokens, **guessing):
    """The greedy continuation of `ids [1, T]`, `new_tokens` tokens, and the number of tokens that each pass of the model read."""
    passes = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    cache = QuantizedCache(model.config, kv, dtype=model.dtype)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": [-1], **guessing}
    try:
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    finally:
        hook.remove()
    return out[0, ids.shape[1] :].tolist(), passes


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--assistant", help="likewise; prompt lookup if left out")
    parser.add_argument("--kv", default="levels4", help="format of the cache")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--guesses", type=int, default=5, help="at once, at most")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    loaded = models.load(options.model, options.device)
    model, tokenizer = use_quantkv_attention(loaded.model), loaded.tokenizer
    guessing = {"prompt_lookup_num_tokens": options.guesses}
    if options.assistant:
        guessing = {"assistant_model": models.load(options.assistant, options.device).model}
        guessing["assistant_model"].generation_config.num_assistant_tokens = options.guesses
    prompt = PROMPT if options.prompt_file is None else options.prompt_file.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device)
    failed = False
    for kv in ("none", options.kv):
        plain, alone = generated(model, ids, kv, options.max_new_tokens)
        text, passes = generated(model, ids, kv, options.max_new_tokens, **guessing)
        guessed = sum(passes) - ids.shape[1] - (len(passes) - 1)  # each later pass also reads the token that the one before it added
        accepted = len(text) - len(passes)
        share = f"{accepted} of {guessed} guesses accepted ({accepted / guessed:.0%})" if guessed else "no guesses"
        print(f"{kv}: {share}; {len(passes)} passes of the model instead of {len(alone)}")
        parts = next((i for i, (a, b) in enumerate(zip(plain, text)) if a != b), None)
        print(f"    {'the text' if parts is None else f'for {parts} tokens the text'} is that of plain greedy decoding")
        failed |= kv == "none" and model.dtype == torch.float32 and text != plain
    print(tokenizer.decode(text, skip_special_tokens=True))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
