"""A model's KV cache as vLLM lays it out: Layers, Blocks, Heads, Number of tokens, Content, in the order that a layout's name spells."""

import torch

ONE_RUN = ("LBHNC", "BLHNC", "BHLNC", "LHBNC")  # a head's page is one run of bytes
LAYOUTS = (*ONE_RUN, "LBNHC", "BLNHC")
LAYERS = 3


def engine_memory(layout, blocks, heads, tokens, content):
    """Each layer's view `[blocks, heads, tokens, content]` of one memory of 0xFF bytes."""
    sizes = dict(L=LAYERS, B=blocks, H=heads, N=tokens, C=content)
    memory = torch.full([sizes[axis] for axis in layout], 0xFF, dtype=torch.uint8)
    return memory.permute(*(layout.index(axis) for axis in "LBHNC")).unbind(0)
