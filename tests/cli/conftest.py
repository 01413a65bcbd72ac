"""A tiny random Llama with a byte-level tokenizer, in a transformers directory: all that the commands need."""

import importlib.metadata
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import quantkv
from documents import byte_tokenizer
from quantkv.cli import app, generate, readers, waiting
from quantkv.cli import eval as eval_module

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(autouse=True)
def no_lines_by_the_clock(monkeypatch):
    """On a slow machine a command would say how far it is."""
    monkeypatch.setattr(waiting, "EVERY", math.inf)


@pytest.fixture
def installed():
    """quantkv has metadata, as pip leaves it; a source tree on the path has none."""
    if not list(importlib.metadata.distributions(name="quantkv")):
        pytest.skip("quantkv is not installed: what it needs is not known")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A tiny random Llama with a byte-level tokenizer, as a GGUF file; conversions go to the test's folder."""
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))
    file, hidden, tokens = tmp_path / "tiny.gguf", 64, [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd", "<end>"]
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "c d"])  # two: transformers 5.17 takes a list of one for its only item
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    random = np.random.default_rng(0)
    square = [f"blk.0.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    shapes = {"token_embd": (len(tokens), hidden), "output": (len(tokens), hidden), **dict.fromkeys(square, (hidden, hidden))}
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (hidden,))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) / 10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def run(capsys):
    """Run the command line: (exit code, stdout, stderr)."""

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            app([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return exit.value.code, out, err

    return run


class NoisyCache(DynamicCache):
    """Stores keys and values with an error that grows as the format's bits shrink."""

    def __init__(self, model, policy):
        super().__init__(config=model.config)
        config, name = model.config, policy if isinstance(policy, str) else policy.format
        self.spec = quantkv.get_format(name).cache_spec(config.num_key_value_heads, config.head_dim)
        self.noise = 0.0 if name == "fp32" else 2.0**-self.spec.bits_per_element
        self.random = torch.Generator().manual_seed(0)
        self.specs = [self.spec] * config.num_hidden_layers
        self.quantized_layers = range(config.num_hidden_layers)
        self.nbytes = self.full_precision_nbytes = 0

    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys = keys + self.noise * torch.randn(keys.shape, generator=self.random).to(keys)
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        self.nbytes = keys.shape[2] * len(self.layers) * self.spec.bytes_per_token
        return keys, values


@pytest.fixture
def noisy(monkeypatch):
    """The commands with NoisyCache, which this is, in the quantized cache's place."""
    read = readers.ThroughCache(None, NoisyCache, lambda model: nullcontext())
    evaluate, writer = eval_module.evaluate, generate.Writer
    monkeypatch.setattr(eval_module, "evaluate", lambda *a, **k: evaluate(*a, **{**k, "read": read}))
    keywords = {"make_cache": NoisyCache, "attention": lambda model: nullcontext()}
    monkeypatch.setattr(generate, "Writer", lambda *a, **k: writer(*a, **{**keywords, **k}))
    return NoisyCache


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file
