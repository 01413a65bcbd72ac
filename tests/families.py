"""What generation over a `QuantizedCache` does with an architecture, as it is seen when it is run: the rows of docs/models.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from architectures import VOCABULARY, Architecture
from quantkv import geometry
from quantkv.geometry import Heads
from quantkv.integrations.transformers import QuantizedCache, QuantizedLayer, use_quantkv_attention
from quantkv.integrations.transformers.recurrent_and_latent import LatentLayer

BOUNDS = {"int8": 0.02, "int4": 0.35}  # median over tokens of the norm of the logits' error over that of the logits of format none
RATIO = 10, 25  # so many times is int4's error that of int8: its steps are 255 / 15 = 17 times as wide
NEW = 8  # tokens to generate
EQUAL, OTHER, ABSENT = "equal", "DIFFERENT", "-"
MODES = ("greedy", "beams", "assisted", "lookup", "chunked", "chat")


class Row(NamedTuple):
    """One line of the table. refused: why it is refused; the rest is empty then."""

    name: str
    pages: str = ""
    passed: str = ""
    greedy: str = ""
    beams: str = ""
    assisted: str = ""
    lookup: str = ""
    chunked: str = ""
    chat: str = ""
    int8: str = ""
    int4: str = ""
    refused: str = ""

    @property
    def line(self) -> str:
        """Of the table of models that work, or of those that are refused."""
        if self.refused:
            return f"| {self.name} | {self.refused} |"
        seen = {mode: getattr(self, mode) for mode in MODES}
        other, absent = ([mode for mode in MODES if seen[mode] == word] for word in (OTHER, ABSENT))
        same = f"{OTHER}: {', '.join(other)}" if other else f"all but {', '.join(absent)}" if absent else "all"
        bounds = self.int8 if self.int8 == self.int4 else f"int8 {self.int8}, int4 {self.int4}"
        return f"| {self.name} | {self.pages} | {self.passed} | {same} | {bounds} |"


def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of 20, 13 and 5 tokens, padded on the left."""
    ids = torch.randint(2, 90, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(20) >= torch.tensor([[0], [7], [15]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Cache, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, past_key_values=cache, **options)


def alone() -> dict[str, torch.Tensor]:
    """One prompt that repeats itself."""
    ids = torch.randint(2, 90, (1, 7), generator=torch.Generator().manual_seed(2)).repeat(1, 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def helper() -> PreTrainedModel:
    """A smaller model that drafts."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, pad_token_id=0, **sizes)).eval()


def chat(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Two turns over one cache: the second prompt is the first answer and more."""
    first = generate(model, cache, prompts())
    more = torch.randint(2, 90, (3, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.cat([prompts()["attention_mask"], torch.ones(3, NEW + 5, dtype=torch.long)], 1)
    return generate(model, cache, {"input_ids": torch.cat([first, more], 1), "attention_mask": mask})


MODES: dict[str, Callable[[PreTrainedModel, Cache], torch.Tensor]] = {
    "greedy": lambda model, cache: generate(model, cache, prompts(), max_new_tokens=14, min_new_tokens=14),
    "beams": lambda model, cache: generate(model, cache, prompts(), num_beams=2),
    "assisted": lambda model, cache: generate(model, cache, alone(), assistant_model=helper()),
    "lookup": lambda model, cache: generate(model, cache, alone(), prompt_lookup_num_tokens=3),
    "chunked": lambda model, cache: generate(model, cache, prompts(), prefill_chunk_size=8),
    "chat": chat,
}


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Those of a prompt in two chunks and of three single tokens."""
    ids = torch.randint(2, 90, (2, 28), generator=torch.Generator().manual_seed(4))
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([16, 9, 1, 1, 1], 1)], 1)


def observe(architecture: Architecture) -> Row:
    """Run it over transformers' DynamicCache and over a QuantizedCache.

    "equal": the same tokens; "-": transformers itself cannot generate so with this model. The median is taken because a quantized key
    may make a router choose another expert for a token.
    """
    model = architecture.build()
    expected = {mode: attempt(run, model, DynamicCache(config=model.config)) for mode, run in MODES.items()}
    seen = {}
    try:
        use_quantkv_attention(model)
        for mode, run in MODES.items():
            cache = QuantizedCache(model.config, "none")
            equal = expected[mode] is not None and torch.equal(run(model, cache), expected[mode]) and cache.nbytes > 0
            seen[mode] = ABSENT if expected[mode] is None else EQUAL if equal else OTHER
    except (ValueError, NotImplementedError) as error:
        return Row(architecture.name, refused=" ".join(str(error).split()))
    check_geometry(model, cache)
    errors = logit_errors(architecture)
    for name, bound in BOUNDS.items():
        within = 0 < errors[name] <= bound and RATIO[0] <= errors["int4"] / errors["int8"] <= RATIO[1]
        seen[name] = "in bounds" if within else f"{OTHER}: {errors[name]:.3g}"
    pages, own = Counter(map(kind, cache.quantized_layers.values())), Counter(cache.passed_layers.values())
    return Row(architecture.name, _count(pages), _count(own), **seen)


def check_geometry(model: PreTrainedModel, cache: QuantizedCache) -> None:
    """What `geometry` reads from the model's config.json is what its forward passes stored."""
    found = geometry.read(json.loads(model.config.to_json_string(use_diff=False)))
    stored = {i: (layer.pages.spec, kind(layer)) for i, layer in cache.quantized_layers.items()}
    made = {i: (Heads(spec.num_kv_heads, spec.head_size, spec.head_size_v), word) for i, (spec, word) in stored.items()}
    assert {i: (layer.heads, layer.kind) for i, layer in found.attention.items()} == made
    assert {i for i, layer in enumerate(found.layers) if layer.states} == set(cache.passed_layers)


def logit_errors(architecture: Architecture) -> dict[str, float]:
    """Of each format in BOUNDS."""
    model = use_quantkv_attention(architecture.build())
    exact = logits(model, QuantizedCache(model.config, "none"))
    found = {name: logits(model, QuantizedCache(model.config, name, prompt="stored")) for name in BOUNDS}
    return {name: float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) for name, got in found.items()}


def kind(layer: QuantizedLayer) -> str:
    """What is in the layer's pages, in a word."""
    if isinstance(layer, LatentLayer):
        return "latent"
    seen = layer.sequences.kind
    return "chunked" if seen.chunked else "sliding" if seen.window else "full"


def attempt(run: Callable[[PreTrainedModel, Cache], torch.Tensor], model: PreTrainedModel, cache: Cache) -> torch.Tensor | None:
    """What transformers generates, or None where it cannot."""
    try:
        return run(model, cache)
    except Exception:
        return None


def _count(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items())
