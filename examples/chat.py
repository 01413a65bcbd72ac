"""A chat whose whole conversation stays in one 4-bit cache: each turn computes its own new tokens only.

    python examples/chat.py                                        # type; an empty line ends it
    python examples/chat.py --say "My name is Ada." --say "What is my name?"

`generate` gets the whole conversation and the cache, which holds all of it but the latest turn. What was said is rendered anew in each
turn by the model's chat template; should it read otherwise than what the cache holds (some templates leave out what a model thought),
`crop` takes the cache back to where both part.

At the end the example says how large the cache is, and reads the conversation twice more, all at once, into a new cache of the same format
and into one that is not quantized: how many of the tokens that were said one by one are the likeliest ones there, too? With --kv none it
must be all; with 4 bits fewer than nine in ten in the same format would mean wrong pages or masks. Then the exit code is 1. It is not all
of them there: sums over one token and over many are rounded differently, now and then a code is the next one for it, and the rest of the
text feels that.
"""

import argparse
import sys
from itertools import takewhile

import torch
from transformers import DynamicCache, TextStreamer

from quantkv.cli import models
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention


class Chat:
    """messages: as chat templates take them. tokens: of the conversation so far. said: where in it the model's own stand."""

    def __init__(self, model, tokenizer, kv="levels4"):
        self.model, self.tokenizer, self.kv = use_quantkv_attention(model), tokenizer, kv
        self.messages, self.tokens, self.said = [], [], []
        self.cache = self.new_cache()

    def new_cache(self):
        # Read at once, the conversation must say what it said in turns: no pass reads its own tokens otherwise than a later one does.
        return QuantizedCache(self.model.config, self.kv, dtype=self.model.dtype, prompt="stored")

    def rendered(self):
        """Tokens of the conversation, up to where the model answers."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer("".join(f"{m['role']}: {m['content']}\n" for m in self.messages) + "assistant:")["input_ids"]

    def ask(self, text, max_new_tokens=64, streamer=None):
        """The greedy answer to a user's turn."""
        self.messages.append({"role": "user", "content": text})
        tokens, held = self.rendered(), self.cache.get_seq_length()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens[:-1], self.tokens[:held])))
        self.cache.crop(same - held)  # 0 where the cache holds the beginning of what was rendered
        ids = torch.tensor([tokens], device=self.model.device)
        options = {"past_key_values": self.cache, "max_new_tokens": max_new_tokens, "do_sample": False, "streamer": streamer}
        whole = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        self.said = [i for i in self.said if i < same] + list(range(len(tokens), len(whole)))
        self.tokens = whole
        answer = self.tokenizer.decode(whole[len(tokens) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    @torch.inference_mode()
    def likeliest(self, cache):
        """The share of the tokens that were said that are the likeliest when the conversation is read at once into `cache`."""
        ids = torch.tensor([self.tokens], device=self.model.device)
        found = self.model(ids, past_key_values=cache).logits[0].argmax(-1).tolist()
        return sum(found[i - 1] == self.tokens[i] for i in self.said) / len(self.said)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--kv", default="levels4", help="format of the cache")
    parser.add_argument("--say", action="append", help="a turn; as often as you like. Without: turns are typed")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    loaded = models.load(options.model, options.device)
    chat = Chat(loaded.model, loaded.tokenizer, options.kv)
    for turn in options.say or iter(lambda: input("\n> "), ""):
        if options.say:
            print(f"\n> {turn}")
        chat.ask(turn, options.max_new_tokens, TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True))
    if not chat.said:
        return 0
    spec, held = chat.cache.spec, chat.cache.get_seq_length()
    whole = held * 2 * spec.elements_per_token * len(chat.cache.quantized_layers)
    print(f"\n{held} tokens in {chat.cache.nbytes:,} bytes of {options.kv}; {whole:,} at 16 bits")
    same, exact = chat.likeliest(chat.new_cache()), chat.likeliest(DynamicCache(config=chat.model.config))
    print(
        f"of {len(chat.said)} tokens that were said, read at once: {same:.0%} the likeliest in {options.kv}, {exact:.0%} in an exact cache"
    )
    return 0 if same >= (1 if options.kv == "none" else 0.9) else 1


if __name__ == "__main__":
    sys.exit(main())
