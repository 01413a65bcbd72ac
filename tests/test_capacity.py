"""What a plan says that a cache takes, against caches that are allocated, and against pages that are given back one by one."""

import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

from architectures import ARCHITECTURES  # noqa: E402
from quantkv import PagedCache, format_table, geometry, parameters, policy_file  # noqa: E402
from quantkv.capacity import LayerCache, capacity, state_bytes  # noqa: E402
from quantkv.format import aliases_of, available_formats, get_format  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.geometry import Kind  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention  # noqa: E402
from quantkv.known_models import config_of  # noqa: E402
from quantkv.page_table import PageTable  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from quantkv.policy_file import PolicyFile  # noqa: E402
from test_geometry import NAMES, written  # noqa: E402

ROOT = Path(__file__).parent.parent
REAL = (
    *("llama-3-8b", "qwen3-4b", "gemma-3-4b", "gpt-oss-20b", "mistral-7b-v0.1", "phi-3-mini", "deepseek-v2-lite", "qwen3-next-80b-a3b"),
    *("qwen2.5-7b", "qwen3-30b-a3b"),
)


def one(name: str, exact: FullPrecisionTokens | None = None) -> PolicyFile:
    return PolicyFile(name, {}, full_precision=exact)


def rows_of(name: str) -> tuple[transformers.PreTrainedConfig, DynamicCache]:
    """What the layers of a real model store of 16 tokens: run on no device, without its experts, which choose by numbers."""
    config = {key: value for key, value in config_of(name).items() if key != "quantization_config"}
    config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        pair = config.model_type == "gpt_oss"
        layer.mlp.forward = MethodType(lambda self, x, *args, pair=pair, **options: (x, None) if pair else x, layer.mlp)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long, device="meta"), past_key_values=cache)
    return config, cache


@pytest.mark.parametrize("name", REAL)
def test_bytes_are_those_of_an_allocated_cache(name: str):
    config, stored = rows_of(name)
    model = geometry.read(config_of(name))
    for fmt in ("int8", "levels4/trellis2", "tq_k8v4", "none"):
        cache = QuantizedCache(config, fmt, num_tokens=48, dtype=torch.bfloat16)
        for number, layer in cache.quantized_layers.items():
            rows = stored.layers[number]
            layer.pages = layer._new_pages(rows.keys, rows.values)
            layer.is_initialized = True
        made = capacity(model, one(fmt))
        assert list(made.layers) == list(cache.quantized_layers)
        assert sum(layer.nbytes(48) for layer in made.layers.values()) == cache.allocated_nbytes
        assert [layer.spec for layer in made.layers.values()] == cache.specs


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "GPT-OSS"])
def test_bytes_are_those_of_a_cache_in_use(name: str):
    """A batch of two, decoded beyond its windows, with formats by layer and full-precision tokens."""
    architecture, exact, length = NAMES[name], FullPrecisionTokens(16, 24), 61
    model = use_quantkv_attention(architecture.build())
    cache = QuantizedCache(model.config, Policy("int4", {1: "k8v4"}, full_precision=exact), dtype=torch.bfloat16)
    made = capacity(geometry.read(written(architecture)), PolicyFile("int4", {1: "k8v4"}, full_precision=exact))
    most = 0
    with torch.no_grad():
        for _ in range(length):
            model(torch.tensor([[5], [6]]), past_key_values=cache)
            most = max(most, cache.nbytes)
    assert most == 2 * sum(layer.pages(length) * layer.spec.block_bytes for layer in made.layers.values())
    assert cache.full_precision_nbytes == 2 * sum(layer.full_precision_bytes for layer in made.layers.values())
    assert made.sequence_bytes(length) == (most + cache.full_precision_nbytes) // 2


@pytest.mark.parametrize("kind", [Kind(), *(Kind(w) for w in (1, 2, 16, 17, 100, 128)), *(Kind(w, True) for w in (16, 24, 30, 100))])
def test_pages_are_those_that_a_table_holds(kind: Kind):
    layer = LayerCache(get_format("int8").cache_spec(1, 64), kind)
    table, most = PageTable(16, 1), 0
    for length in range(1, 700):
        table.release([kind.first_seen(length - 1)])
        table.append([1])
        most = max(most, sum(page != PageTable.RELEASED for page in table.rows[0]))
        assert layer.pages(length) == most


def test_tokens_fill_the_memory():
    made, free = capacity(geometry.read(config_of("gemma-3-4b")), one("int4", FullPrecisionTokens(16, 24))), 3 * 10**9 + 7
    longest = made.longest(free)
    assert longest % 16 == 0 and made.sequence_bytes(longest) <= free < made.sequence_bytes(longest + 16)
    count = made.sequences(free, 5000)
    assert count * made.sequence_bytes(5000) <= free < (count + 1) * made.sequence_bytes(5000)
    assert made.longest(100) == made.sequences(100, 16) == made.sequences(-5, 16) == 0
    uniform = capacity(geometry.read(config_of("llama-3-8b")), one("int4"))
    assert uniform.bytes_per_token == 32 * 8 * 136 and uniform.longest(free) == free // (32 * 8 * 136 * 16) * 16
    assert made.bytes_per_token == 5 * 4 * (256 + 8)  # a window takes no more with each token


@pytest.mark.parametrize("ranks,kv_heads", [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_ranks_share_heads(ranks: int, kv_heads: int):
    """With more ranks than heads, several hold the same one."""
    made = capacity(geometry.read(config_of("llama-3-8b")), one("int4"), ranks)
    assert {layer.spec.num_kv_heads for layer in made.layers.values()} == {kv_heads}


def test_ranks_that_cannot_share():
    llama, latent = (geometry.read(config_of(name)) for name in ("llama-3-8b", "deepseek-v2-lite"))
    with pytest.raises(ValueError, match="--tp 3: a divisor of the model's 32 query heads"):
        capacity(llama, one("int4"), 3)
    six = geometry.read({**config_of("llama-3-8b"), "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128})
    with pytest.raises(ValueError, match="--tp 4: a divisor or a multiple of the model's 6 kv heads"):
        capacity(six, one("int4"), 4)
    whole, shared = capacity(latent, one("int4")), capacity(latent, one("int4"), 4)
    assert whole.layers == shared.layers  # every rank holds the latents
    exact = capacity(latent, one("int4", FullPrecisionTokens(16, 24))).layers[0]
    assert exact.spec == whole.layers[0].spec and exact.full_precision_bytes == 5 * 16 * 1152  # pages of 16 rows of bf16
    with pytest.raises(ValueError, match=r"int4\+bf16.*of latents"):
        capacity(llama, one("int4+bf16"))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_latents_are_counted_once(name: str):
    """One row of 512 and 64 numbers a layer and token: the value takes no bytes of its own."""
    model = geometry.read(config_of(name))
    for fmt, row in (("int4", 256 + 4 + 128), ("int4+bf16", 256 + 4 + 128), ("int8", 512 + 4 + 128), ("none", 1024 + 128)):
        assert capacity(model, one(fmt)).bytes_per_token == 61 * row
    assert capacity(model, policy_file.named("4bit")).bytes_per_token == 61 * (256 + 4 + 64 + 4)  # int4+int8


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"])
def test_states_are_those_that_transformers_keeps(name: str):
    model = NAMES[name].build().bfloat16()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    states = [t for layer in cache.layers for kind in ("conv_states", "recurrent_states") for t in getattr(layer, kind, {}).values()]
    assert state_bytes(geometry.read(written(NAMES[name]))) == sum(t.nbytes for t in states if t is not None)
    assert state_bytes(geometry.read(written(NAMES["Bamba"]))) is None


COUNTED = [a for a in ARCHITECTURES if a.is_known and not a.text and written(a)["model_type"] in parameters.COUNTED]


@pytest.mark.parametrize("architecture", COUNTED, ids=lambda a: a.name)
@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "q_lora_rank": None}])
def test_parameters_are_those_of_the_model(architecture, variant):
    known = geometry.model_types()["types"][written(architecture)["model_type"]]["fields"]
    beside = {name: value for name, value in variant.items() if name in known}
    architecture = architecture._replace(sizes={**architecture.sizes, **beside})
    model = architecture.build()
    fields = geometry.text_fields(written(architecture))
    tensors = {t.data_ptr(): t.numel() for t in model.state_dict().values() if t.numel()}
    assert parameters.of_config(fields).parameters == sum(tensors.values())


def test_gpt_oss_is_stored_in_mxfp4():
    """The size of the published files."""
    assert parameters.of_config(geometry.text_fields(config_of("gpt-oss-20b"))).nbytes == 13_761_264_768
    other = {**config_of("llama-3-8b"), "quantization_config": {"quant_method": "gptq"}}
    assert parameters.of_config(geometry.text_fields(other)) is None


def test_the_table_is_the_registry():
    """`scripts/format_table.py` writes the file."""
    assert format_table.available() == available_formats()
    for name in available_formats():
        for alias in (name, *aliases_of(name)):
            assert format_table.layout_of(alias) == get_format(name).layout
    for name in ("none", "auto", "int8/int4", "turboquant_4bit_nc/none", "int4/int4"):
        assert format_table.layout_of(name) == get_format(name).layout
    for name in ("int5", "int4/int8/int4", 4):
        with pytest.raises(ValueError) as of_table:
            format_table.layout_of(name)
        with pytest.raises(ValueError) as of_registry:
            get_format(name)
        assert str(of_table.value).split(";")[0].replace(", or a Format", "") == str(of_registry.value).replace(", or a Format,", "")


def test_measured_is_of_the_results():
    """`scripts/measured.py` writes the file."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import measured as script
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert script.FILE.read_text() == script.text()


def test_pages_are_allocated_so():
    """A page is what `PagedCache` allocates."""
    made = capacity(geometry.read(config_of("gpt-oss-20b")), one("tq3"))
    layer = made.layers[0]
    assert PagedCache(layer.spec, 3).nbytes == 3 * layer.spec.block_bytes == layer.nbytes(48)


def test_needs_no_torch():
    code = "import sys; from quantkv import capacity, measured, parameters; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
