"""What transformers says: the same weights in float32, one prompt at a time, its own cache and attention."""

from functools import cache
from typing import Any

import torch


@cache
def model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    found = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()
    for module in found.modules():
        if type(module).__name__ == "BloomGelu":  # a tanh, where vLLM has the error function: 5e-4 apart
            module.forward = torch.nn.functional.gelu
    if hasattr(found.config, "sliding_window_size"):  # a token less than transformers' window: vLLM counts the query's own
        found.config.sliding_window = found.config.sliding_window_size
        for layer in found.model.layers:
            layer.self_attn.sliding_window = layer.self_attn.sliding_window and found.config.sliding_window
    if found.config.model_type == "cohere2":
        found.config.sliding_window += 1  # as vLLM's
    return found


@torch.inference_mode()
def continued(folder: str, prompt: list[int], tokens: int) -> list[int]:
    """The greedy continuation of a prompt; no token ends it."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "eos_token_id": [-1], "do_sample": False}
    return model(folder).generate(ids, **options)[0, len(prompt) :].tolist()


@torch.inference_mode()
def scored(folder: str, tokens: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first, given those before it."""
    logits = model(folder)(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@torch.inference_mode()
def most_probable(folder: str, tokens: list[int], count: int) -> torch.Tensor:
    """Log-probabilities `[len(tokens), count]` of the most probable tokens behind each of these, in descending order."""
    return model(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1).topk(count).values
