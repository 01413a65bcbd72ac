"""Features of stock vLLM over quantkv's pages, each asked once on a CPU: what docs/vllm-features.md says of them comes from here.

`FEATURES` holds a function for each, in the order of the table. It is given a folder of its own and returns what was seen, in words that
begin with SERVED, REFUSED, GPU_ONLY or NOT_RUN; an assertion that fails says that the feature is wrong. Features that tests of this folder
ask for already are those tests. `scripts/vllm_tables.py` runs all and writes the table, `test_features.py` those that no other test asks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock

import engine
import references
import tiny_models
import torch
from safetensors.torch import load_file, save_file

import prompts

HERE = Path(__file__).parent
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 90, 150))]
TOKENS = 8
ASK = {"skip_tokenizer_init": True, "max_model_len": 256}
SAME = 2e-4  # additions in another order
RANK = 8
SERVED, REFUSED, GPU_ONLY, NOT_RUN, WRONG = "served", "refused", "GPU only, not run", "not run", "WRONG"
ON_H200 = "(equal answers on an H200: `notebook/2026-11-29-what-sleep-forgets.md`)"
NAMED = f"{REFUSED} by name before the weights are loaded"


class Feature(NamedTuple):
    """name: of the feature. asked: by which option. run: asks for it. said: the row where it is known ahead, as tests of this folder
    ask for the feature, or nobody does; "" where `run` has to be asked. tests: these, by file and name."""

    name: str
    asked: str
    run: Callable[[Path], str]
    said: str = ""
    tests: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """One word, by which the script and tests name it."""
        return self.run.__name__


FEATURES: list[Feature] = []


def feature(name: str, asked: str) -> Callable:
    def add(run: Callable[[Path], str]) -> Callable[[Path], str]:
        FEATURES.append(Feature(name, asked, run))
        return run

    return add


def tested(key: str, name: str, asked: str, said: str, *tests: str) -> None:
    """A feature that tests of this folder ask for, by file and name."""

    def run(folder: Path) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(HERE / test) for test in tests)]
        environment = os.environ | {"QUANTKV_VLLM_SUITE": "1"}
        seen = subprocess.run(command, check=True, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True).stdout
        assert "skipped" not in seen, seen  # a package is missing: nothing was seen
        return said

    run.__name__ = key
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    said = f"{said} ({', '.join(f'`{file}`' for file in files)})"
    FEATURES.append(Feature(name, asked, run, said, tests))


def unasked(key: str, name: str, asked: str, said: str) -> None:
    """A feature that nothing here asks for."""

    def run(folder: Path) -> str:
        return said

    run.__name__ = key
    FEATURES.append(Feature(name, asked, run, said))


def ask(feature: Feature) -> str:
    """What is seen of a feature, asked in a process of its own; what is wrong begins with WRONG, and its log goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result, log, own = (Path(folder, name) for name in ("result", "log", "own"))
        own.mkdir()
        child = os.fork()
        if child == 0:
            with log.open("w") as file:
                engine._print_to(file)
                try:
                    result.write_text(feature.run(own))
                except BaseException as error:
                    traceback.print_exc(file=file)
                    result.write_text(f"{WRONG}: {type(error).__name__}: {error}"[:2000])
            os._exit(0)
        os.waitpid(child, 0)
        seen = result.read_text() if result.exists() else f"{WRONG}: the process ended"
        if seen.startswith(WRONG):
            print(log.read_text()[-6000:], file=sys.stderr)
        return seen


def start(model: str, kv_cache_dtype: str, **arguments):
    """An engine in this process: what `engine.run` asks is more than a feature needs."""
    from vllm import LLM

    return LLM(model, kv_cache_dtype=kv_cache_dtype, **{**engine.COMMON, **ASK, **arguments})


def tokens_of(llm, asked, **given) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    asked = [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in asked]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, sampling, use_tqdm=False, **given)]


def expected(folder: str) -> list[list[int]]:
    return [references.continued(folder, prompt, TOKENS) for prompt in PROMPTS]


def same_tokens(folder: Path, *given: dict) -> str:
    """A tiny Llama at 32 bits says what transformers says, with each of these arguments."""
    model = tiny_models.write("llama", folder)
    for arguments in given:
        report = engine.run(model, "quantkv_fp32", PROMPTS, tokens=TOKENS, **{**ASK, **arguments})
        assert report.error == "" and report.answers[0].tokens == expected(model), report.error
    return "served: the tokens of transformers"


def refusal(*parts: str, model: str, kv_cache_dtype: str = "quantkv_int4", **arguments) -> str:
    """The error with which an engine does not start, before its weights are loaded; it has these parts."""
    report = engine.run(model, kv_cache_dtype, **{**ASK, **arguments})
    assert all(part in report.error + report.log for part in parts), report.error
    assert "Loading weights took" not in report.log
    return NAMED


tested(
    "prefix_caching",
    "Prefix caching",
    "`enable_prefix_caching`",
    f"{SERVED}: the very tokens of transformers, pages found in the cache",
    "test_smollm2.py::test_pages_found_in_the_prefix_cache_say_the_same",
)
tested(
    "chunked_prefill",
    "Chunked prefill, preemption",
    "`enable_chunked_prefill`, a small `max_num_batched_tokens`; few blocks",
    f"{SERVED}: the very tokens of transformers; `int4` says the same at once and in chunks",
    "test_smollm2.py::test_the_unquantized_format_says_what_transformers_says",
    "test_smollm2.py::test_quantized_pages_survive_what_the_scheduler_does",
)


@feature("Asynchronous scheduling", "`async_scheduling`, on and off")
def asynchronous(folder: Path) -> str:
    return same_tokens(folder, {"async_scheduling": True}, {"async_scheduling": False})


@feature("Blocks of more tokens", "`block_size` 32 and 128")
def block_sizes(folder: Path) -> str:
    return same_tokens(folder, {"block_size": 32}, {"block_size": 128})


@feature("torch.compile", "`compilation_config` of mode 3, Inductor")
def compiled(folder: Path) -> str:
    return same_tokens(folder, {"enforce_eager": False, "compilation_config": {"custom_ops": ["none"], "mode": 3}})


unasked("graphs", "CUDA graphs", "`cudagraph_mode`", f"{GPU_ONLY} ([measured on an H200](vllm.md#how-fast))")


unasked(
    "batch_invariant",
    "The same answer in any batch",
    "`VLLM_BATCH_INVARIANT=1`",
    f"{GPU_ONLY}: vLLM's operators of it are Triton's ([run on an H200](vllm.md#how-fast))",
)


@feature("Cached prefixes dropped", "`reset_prefix_cache`")
def reset(folder: Path) -> str:
    model = tiny_models.write("llama", folder)
    llm = start(model, "quantkv_fp32", enable_prefix_caching=True)
    found = [tokens_of(llm, PROMPTS), tokens_of(llm, PROMPTS)]
    assert llm.reset_prefix_cache()
    assert [*found, tokens_of(llm, PROMPTS)] == [expected(model)] * 3
    return "served: the tokens of transformers before it and after it"


tested(
    "formats_by_layer",
    "Layers at 16 bits",
    "`kv_cache_dtype_skip_layers`",
    f"{SERVED}: the layers named store what the model computes in",
    "test_options.py::test_layers_left_as_they_are",
)


@feature("Models as transformers writes them", '`model_impl="transformers"`')
def transformers_models(folder: Path) -> str:
    return same_tokens(folder, {"model_impl": "transformers"})


tested(
    "ngram",
    "Drafts: ngram",
    '`speculative_config` of `"ngram"`',
    f"{SERVED}: the tokens without drafts",
    "test_options.py::test_drafted_tokens_are_verified",
)


tested(
    "suffix",
    "Drafts: suffix decoding",
    '`speculative_config` of `"suffix"`',
    f"{SERVED} where the package arctic-inference 0.1.1 is: the tokens of transformers",
    "test_drafts.py::test_suffix_decoding",
)
tested(
    "draft_model",
    "Drafts: another model",
    '`speculative_config` of `"draft_model"`',
    f"{SERVED}: the tokens of transformers; full-precision tokens and statistics are the model's, not the drafting one's",
    "test_drafts.py::test_a_model_that_drafts_for_itself_is_always_right",
    "test_drafts.py::test_full_precision_tokens_with_a_model_that_drafts",
    "test_drafts.py::test_statistics_are_those_of_the_model",
)
tested("eagle", "Drafts: EAGLE", '`speculative_config` of `"eagle"`', f"{SERVED}: the tokens of transformers", "test_drafts.py::test_eagle")
tested(
    "eagle3",
    "Drafts: EAGLE-3",
    '`speculative_config` of `"eagle3"`',
    f"{SERVED}: the tokens of transformers",
    "test_drafts.py::test_eagle_3",
)
tested(
    "mtp",
    "Drafts: MTP, of latents",
    '`speculative_config` of `"mtp"`',
    f"{SERVED}: the tokens of transformers",
    "test_drafts.py::test_drafts_of_latents",
)


tested(
    "mtp_of_qwen3_next",
    "Drafts: MTP, of Qwen3-Next",
    '`speculative_config` of `"mtp"`',
    f"{SERVED}: the tokens of transformers, in bfloat16",
    "test_drafts.py::test_drafts_of_qwen3_next",
)


@feature("LoRA adapters", "`enable_lora`")
def lora(folder: Path) -> str:
    model = tiny_models.write("llama", folder / "model")
    held, made, random = load_file(folder / "model" / "model.safetensors"), {}, torch.Generator().manual_seed(5)
    for layer in range(2):
        for name, size in (("q_proj", 256), ("v_proj", 128)):
            where = f"model.layers.{layer}.self_attn.{name}"
            a, b = (0.3 * torch.randn(shape, generator=random) for shape in ((RANK, 128), (size, RANK)))
            made |= {f"base_model.model.{where}.lora_A.weight": a, f"base_model.model.{where}.lora_B.weight": b}
            held[f"{where}.weight"] = held[f"{where}.weight"] + b @ a
    (folder / "adapter").mkdir()
    save_file(made, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merged = Path(tiny_models.write("llama", folder / "merged"))
    save_file(held, merged / "model.safetensors", metadata={"format": "pt"})
    from vllm.lora.request import LoRARequest

    llm = start(model, "quantkv_fp32", enable_lora=True, max_lora_rank=RANK)
    found = [tokens_of(llm, PROMPTS, **given) for given in ({}, {"lora_request": LoRARequest("a", 1, str(folder / "adapter"))})]
    assert found == [expected(model), expected(str(merged))] and found[0] != found[1]
    return "served: with an adapter the tokens of the merged weights, without it those of the model"


@feature("LoRA adapters, a preset", "`enable_lora`, `quantkv_4bit`")
def lora_preset(folder: Path) -> str:
    report = engine.run(tiny_models.write("llama", folder / "model"), "quantkv_4bit", PROMPTS, **ASK, enable_lora=True, max_lora_rank=RANK)
    assert report.error == "" and "no statistics of this model" in report.log
    return "served without statistics, and the log says so: an adapter changes keys"


@feature("Sleep and wake", "`enable_sleep_mode`")
def sleep(folder: Path) -> str:
    report = engine.run(tiny_models.write("llama", folder / "model"), "quantkv_int4", **ASK, enable_sleep_mode=True)
    assert "Sleep mode is not supported on current platform" in report.error
    return f"{GPU_ONLY}: vLLM refuses it on a CPU {ON_H200}"


unasked("offloaded_weights", "Weights in the host's memory", "`cpu_offload_gb`", f"{GPU_ONLY} {ON_H200}")
tested(
    "tensor_parallel",
    "Tensor parallelism",
    "`tensor_parallel_size=2`",
    f"{SERVED}: within a quarter of what the format loses; each rank measures its own heads",
    "test_ranks.py",
    "test_statistics.py::test_two_ranks_measure_their_own_heads",
)


@feature("Pipeline parallelism", "`pipeline_parallel_size=2`")
def pipeline(folder: Path) -> str:
    """vLLM makes what a rank receives in its profile run, which its CPU worker leaves out where nothing is compiled."""
    model = tiny_models.write("llama", folder / "model")
    two = {"pipeline_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    two |= {"enforce_eager": False, "compilation_config": {"custom_ops": ["none"], "mode": 1, "backend": "eager"}}
    report = engine.run(model, "quantkv_fp32", PROMPTS, tokens=TOKENS, **ASK, **two)
    assert report.error == "" and report.answers[0].tokens == expected(model)
    return "served: the tokens of one rank; a preset has no statistics then, and the log says so"


tested(
    "data_parallel",
    "Data parallelism",
    "`vllm serve --data-parallel-size 2`",
    f"{SERVED}: from each engine the tokens of one engine; engines share a node of memory by `CPU_VISIBLE_MEMORY_NODES=0,0`",
    "test_data_parallel.py",
)
unasked(
    "data_parallel_experts",
    "Data parallelism, of experts",
    "`vllm serve --data-parallel-size 2`, a mixture of experts",
    f"{GPU_ONLY}: on a CPU vLLM's engines cannot gather each other's rows",
)


@feature("Context parallelism", "`decode_context_parallel_size=2`")
def context_parallel(folder: Path) -> str:
    import transformers

    sizes = {**tiny_models.SIZES, "num_key_value_heads": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    two = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    return refusal("decode_context_parallel_size=2", model=str(folder), **two)


unasked("expert_parallel", "Expert parallelism", "`enable_expert_parallel`", GPU_ONLY)
unasked("dbo", "Two batches at once", "`enable_dbo`", f"{GPU_ONLY}; full-precision tokens with it are refused")


@feature("Prompts that skip layers", "`kv_sharing_fast_prefill`")
def fast_prefill(folder: Path) -> str:
    return refusal("kv_sharing_fast_prefill=True", model=tiny_models.write("llama", folder), kv_sharing_fast_prefill=True)


@feature("KV events", "`kv_events_config`")
def events(folder: Path) -> str:
    config = {"enable_kv_cache_events": True, "publisher": "null"}
    llm = start(tiny_models.write("llama", folder), "quantkv_int4", enable_prefix_caching=True, kv_events_config=config)
    publisher, seen = llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher, []
    own = publisher.publish
    publisher.publish = lambda batch: (seen.extend(batch.events), own(batch))
    tokens_of(llm, PROMPTS)
    stored = [token for event in seen for token in getattr(event, "token_ids", [])]
    whole = [token for prompt in PROMPTS for token in prompt[: len(prompt) // 16 * 16]]
    assert all(type(event).__name__ == "BlockStored" and event.block_size == 16 for event in seen)
    assert set(whole) <= set(stored) and len(stored) >= len(whole)
    return "served: each full block is named, with its tokens"


tested(
    "disaggregation",
    "Prefill in one engine, decode in another",
    "`NixlConnector`",
    f"{SERVED}: the tokens of one engine to the last bit; two ranks read one rank's pages; "
    "pages of another meaning are refused by both digests",
    "test_nixl.py",
)
tested(
    "offloading",
    "Pages in the host's memory",
    "`OffloadingConnector`, a worker of this folder",
    f"{SERVED}: the answers without it, packed blocks too; vLLM's own worker ran on an H200",
    "test_connectors.py::test_pages_that_were_offloaded_say_the_same",
    "test_connectors.py::test_packed_blocks_that_were_offloaded_say_the_same",
    "test_connectors.py::test_vllms_own_worker_needs_a_gpu",
)
tested(
    "example_connector",
    "Pages in files",
    "`ExampleConnector`",
    f"{SERVED}: another engine says the same",
    "test_connectors.py::test_pages_of_one_process_are_read_in_another",
)
tested(
    "connector_within_a_step",
    "Pages that arrive within a step, full-precision tokens",
    "`ExampleConnector`, `quantkv_policy`",
    f"{NAMED}",
    "test_exact.py::test_a_connector_that_loads_within_a_step_is_refused",
)


@feature("Connectors that compare nothing", "`MooncakeConnector`")
def other_connectors(folder: Path) -> str:
    given = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    return refusal("kv_connector='MooncakeConnector'", model=tiny_models.write("llama", folder), kv_transfer_config=given)


def several(folder: Path) -> dict:
    inner = [
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 1 << 24,
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "host_offloading",
            },
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "pages")},
        },
    ]
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": inner}}


@feature("Several connectors", "`MultiConnector` of Offloading and Example")
def connectors(folder: Path) -> str:
    model = tiny_models.write("llama", folder / "model")
    given = {"tokens": TOKENS, **ASK, "enable_prefix_caching": True}
    plain = engine.run(model, "quantkv_int4", PROMPTS, **given)
    found = engine.run(model, "quantkv_int4", PROMPTS, **given, kv_transfer_config=several(folder))
    again = engine.run(model, "quantkv_int4", PROMPTS, **given, kv_transfer_config=several(folder), seed=1)
    assert plain.error == found.error == again.error == ""
    assert plain.answers[0].tokens == found.answers[0].tokens
    assert "External Cache Hit!" in again.log
    return "served: the tokens without it; another engine takes the pages from files"


@feature("Several connectors, a preset", "`MultiConnector`, `quantkv_4bit`")
def connectors_preset(folder: Path) -> str:
    given = {"kv_transfer_config": several(folder), "kv_cache_dtype": "quantkv_4bit"}
    return refusal("kv_connector='MultiConnector'", model=tiny_models.write("llama", folder / "model"), **given)


@feature("Structured output", "`structured_outputs`, by xgrammar")
def structured(folder: Path) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    for name in ("lmformatenforcer", "lmformatenforcer.integrations.vllm"):  # a backend that vLLM imports and does not use
        sys.modules.setdefault(name, MagicMock())
    llm = start(smollm2(), "quantkv_4bit", skip_tokenizer_init=False, structured_outputs_config={"backend": "xgrammar"})
    schema = {"type": "object", "properties": {"year": {"type": "integer", "minimum": 0, "maximum": 9999}}, "required": ["year"]}
    asked = StructuredOutputsParams(choice=["Paris", "Rome"]), StructuredOutputsParams(json=schema)
    found = [
        llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=24, structured_outputs=s), use_tqdm=False)
        for s in asked
    ]
    texts = [output[0].outputs[0].text for output in found]
    assert texts[0] == "Paris" and isinstance(json.loads(texts[1])["year"], int)
    return "served: a choice, and JSON of a schema"


@feature("Beam search", "`beam_search`")
def beams(folder: Path) -> str:
    from vllm.sampling_params import BeamSearchParams

    model = smollm2()
    llm = start(model, "quantkv_fp32", skip_tokenizer_init=False, enable_prefix_caching=True)
    found = llm.beam_search([{"prompt": prompts.PROMPTS[0]}], BeamSearchParams(beam_width=3, max_tokens=8))[0].sequences[0].text
    reference, tokenizer = references.model(model), llm.get_tokenizer()
    ids = torch.tensor([tokenizer(prompts.PROMPTS[0])["input_ids"]])
    wanted = reference.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False, length_penalty=0.0)
    assert found == tokenizer.decode(wanted[0])
    return "served: the text of transformers' beams"


@feature("Several answers of a prompt", "`n=4`")
def several_answers(folder: Path) -> str:
    from vllm import SamplingParams

    model = tiny_models.write("llama", folder)
    llm = start(model, "quantkv_fp32", enable_prefix_caching=True)
    sampling = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS):
        assert len({tuple(one.token_ids) for one in output.outputs}) == 4
        for one in output.outputs:
            found = torch.tensor([step[token].logprob for token, step in zip(one.token_ids, one.logprobs)])
            wanted = references.scored(model, prompt + list(one.token_ids))[-TOKENS:]
            torch.testing.assert_close(found, wanted, rtol=0, atol=SAME)
    return "served: each has transformers' log-probabilities"


@feature("Prompt embeddings", "`enable_prompt_embeds`")
def embeddings(folder: Path) -> str:
    model = tiny_models.write("llama", folder)
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    llm = start(model, "quantkv_fp32", enable_prompt_embeds=True)
    assert tokens_of(llm, [{"prompt_embeds": rows[torch.tensor(prompt)]} for prompt in PROMPTS]) == expected(model)
    return "served: the tokens of the prompts that they are of"


@feature("Pooling models", '`runner="pooling"`, `convert="embed"`')
def pooling(folder: Path) -> str:
    model = tiny_models.write("llama", folder)
    for file in Path(smollm2()).glob("tokenizer*"):  # vLLM wants one, and prompts are tokens
        (folder / file.name).symlink_to(file)
    llm = start(model, "quantkv_fp32", runner="pooling", convert="embed", skip_tokenizer_init=False)
    found = llm.encode([{"prompt_token_ids": prompt} for prompt in PROMPTS], pooling_task="embed", use_tqdm=False)
    for output, prompt in zip(found, PROMPTS):
        with torch.inference_mode():
            last = references.model(model).model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(output.outputs.data.float(), last / last.norm(), rtol=0, atol=SAME)
    return "served for decoders: transformers' last hidden state, normalized"


@feature("Encoders", "a BERT as a pooling model")
def encoder(folder: Path) -> str:
    import transformers

    sizes = {name: tiny_models.SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=512)).save_pretrained(folder)
    given = {"runner": "pooling", "kv_cache_dtype": "quantkv_int4"}
    return refusal("encoder", model=str(folder), **given)


@feature("Images", "BLIP-2 with random weights")
def images(folder: Path) -> str:
    import transformers
    from PIL import Image
    from vllm import SamplingParams

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2(), trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.OPTConfig(
        vocab_size=len(tokenizer), hidden_size=128, word_embed_proj_dim=128, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2
    )
    config = transformers.Blip2Config(
        vision_config={**small, "image_size": 32, "patch_size": 8},
        qformer_config={**small, "encoder_hidden_size": 64, "vocab_size": 64},
        text_config=text.to_dict(),
        num_query_tokens=8,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    processor = transformers.Blip2Processor(
        transformers.BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer, num_query_tokens=8
    )
    processor.save_pretrained(folder)
    pictures = [Image.effect_noise((48, 40), spread).convert("RGB") for spread in (20, 90)]
    llm = start(str(folder), "quantkv_fp32", skip_tokenizer_init=False, mm_hasher_algorithm="sha256")  # the default's package is not here
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    asked = [{"prompt": "The picture shows", "multi_modal_data": {"image": picture}} for picture in pictures]
    found = [list(output.outputs[0].token_ids) for output in llm.generate(asked, sampling, use_tqdm=False)]
    given = [processor(images=picture, text="The picture shows", return_tensors="pt") for picture in pictures]
    wanted = [model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=[-1])[0, -TOKENS:].tolist() for inputs in given]
    assert found == wanted and found[0] != found[1]
    return "served: the tokens of transformers, of two pictures"


@feature("Benchmark client", "`vllm bench serve`, of random prompts")
def bench_serve(folder: Path) -> str:
    with served(folder, "quantkv_int4") as port:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            f"http://127.0.0.1:{port}",
        ]
        command += ["--model", smollm2(), "--served-model-name", "m", "--dataset-name", "random", "--random-input-len", "24"]
        command += [
            "--random-output-len",
            "4",
            "--num-prompts",
            "4",
            "--save-result",
            "--result-dir",
            str(folder),
            "--result-filename",
            "r.json",
        ]
        subprocess.run(command, check=True, timeout=400)
    found = json.loads((folder / "r.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (4, 16)
    return "served: its JSON has all four requests, of four tokens each"


def smollm2() -> str:
    from quantkv.cli import models

    return str(models.converted(models.packaged_gguf()))


class served:
    """A server of SmolLM2 at a free port, while the context lasts. folder: takes server.log. more: of vLLM's arguments.
    variables: of its environment."""

    def __init__(self, folder: Path, kv_cache_dtype: str, *more: str, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = (folder / "server.log").open("w")
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            smollm2(),
            "--served-model-name",
            "m",
            "--port",
            str(self.port),
        ]
        command += ["--kv-cache-dtype", kv_cache_dtype, "--attention-backend", "CUSTOM", "--dtype", "float32", "--max-model-len", "512"]
        command += ["--enforce-eager", "--compilation-config", '{"custom_ops": ["none"]}', "--max-num-seqs", "8", *more]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True, env=environment)

    def __enter__(self) -> int:
        stop = time.monotonic() + 500
        while self.process.poll() is None and time.monotonic() < stop:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return self.port
            except OSError:
                time.sleep(1)
        self.__exit__()
        text = Path(self.log.name).read_text()
        errors = [line for line in text.splitlines() if "Error" in line]
        raise RuntimeError("\n".join(["no answer of the server:", *errors[:10], text[-3000:]]))

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()


def completion(port: int, prompt: list[int], engine: int) -> tuple[list[int], list[float]]:
    """The tokens with which a server goes on, and their log-probabilities. engine: by number, the one of several that is asked."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(engine)}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked | {"logprobs": 0}).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        said = json.load(answer)["choices"][0]
    return said["token_ids"], said["logprobs"]["token_logprobs"]
