"""Tiny random models of each family in stock vLLM over quantkv's pages: what docs/vllm-features.md says of a family comes from here."""

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import engine
import references
import tiny_models
import torch
from features import GPU_ONLY, NOT_RUN, REFUSED, SERVED, WRONG

from architectures import ARCHITECTURES, VOCABULARY

NAMES = [a.name for a in ARCHITECTURES if a.is_known and not a.text]
PROMPTS = [[token % (VOCABULARY - 6) + 3 for token in tiny_models.prompt(seed, length)] for seed, length in enumerate((5, 90, 120))]
TOKENS = 6
ASK = {"skip_tokenizer_init": True, "max_model_len": 192}
CHUNKED = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
WHOLE = ("T5",)  # families whose prompts vLLM takes in one step alone
SAME = 5e-4  # of log-probabilities: additions in another order

LATENT = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}  # vLLM takes rows of 320, 512 and 576
ALL_HEADS = {"num_key_value_heads": 4}  # as many as of queries: vLLM reads what these families' configurations do not have
SIZES: Mapping[str, Mapping[str, Any]] = {  # where vLLM needs others than transformers
    **dict.fromkeys(("DeepSeek V2", "GLM-4.7-Flash", "Kimi Linear", "MiniCPM3", "Youtu"), LATENT),
    **dict.fromkeys(("GPT-2", "GPT-NeoX", "OPT", "BioGPT", "Persimmon", "Bloom", "MPT", "GPT-J", "CodeGen", "GPT-Neo", "XGLM"), ALL_HEADS),
    "DeepSeek V3": {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "LongCat-Flash": {**LATENT, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "zero_expert_num": 0},
    "GPTBigCode": {"num_key_value_heads": 1},
    "Afmoe (Trinity)": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "MiMo-V2-Flash": {"hidden_size": 128, "head_dim": 64, **tiny_models.FAMILIES["two_sizes"][1]},
    "Hunyuan MoE": {"moe_intermediate_size": 64},
    "Phi-MoE": {"moe_intermediate_size": 64},
    "MiniMax-M2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "Moshi": {"sliding_window": 256},  # transformers' masks have none
    "LFM2": {"conv_dim": 64, "block_dim": 64},
    "Llama 4": {"num_experts_per_tok": 1},
}
REASONS = {  # of an engine that does not start, by a part of its log
    "vLLM has no other way to handle it": f"{NOT_RUN}: vLLM 0.33 lacks the model",
    "Argument position_ids not found in the forward": f"{NOT_RUN}: vLLM 0.33 lacks the model",
    "are not supported for now": f"{NOT_RUN}: vLLM 0.33 lacks the model",
    "was supported in vLLM until": f"{NOT_RUN}: vLLM 0.33 lacks the model",
    "No module named 'torchvision'": f"{NOT_RUN}: vLLM's model needs torchvision",
    "_, routing_weights, selected_experts = self.router(": f"{NOT_RUN}: vLLM's Transformers backend fails in the model's router",
    "CPU GDN attention requires": f"{NOT_RUN}: vLLM's linear attention of a CPU takes bfloat16 alone",
    **dict.fromkeys(
        (
            "module 'triton' has no attribute",
            "has no attribute 'mamba_chunk_scan_fwd_cpu'",
            "has no attribute 'selective_scan_fwd'",
            "has no attribute 'causal_conv1d_update_cpu_vec'",
        ),
        f"{GPU_ONLY}: operators of its recurrence",
    ),
    "has no attribute 'topk_softmax'": f"{GPU_ONLY}: operators of its experts",
    'assert self.scoring_func == "softmax"': f"{GPU_ONLY}: operators of its experts",
    "is_act_and_mul=False is supported only": f"{GPU_ONLY}: operators of its experts",
    "is not supported by MLA": f"{NOT_RUN}: vLLM's own metadata refuses its latents",
    "exceeds dimension size": f"{NOT_RUN}: vLLM does not load its tiny checkpoint",
}

OTHERWISE = {  # what differs from transformers behind later tokens alone, and is vLLM's
    "Doge": f"{SERVED}, not compared: its masks depend on its values, and vLLM's Transformers backend makes none"
}


def observe(name: str) -> str:
    """What is seen of one family, in words that begin as those of features."""
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    architecture = architecture._replace(sizes={**architecture.sizes, **SIZES.get(name, {})})
    with tempfile.TemporaryDirectory() as folder:
        architecture.build().save_pretrained(folder)
        given = {**ASK, **({} if name in WHOLE else CHUNKED), "scored": True}
        try:
            report = engine.run(folder, "quantkv_fp32", PROMPTS, tokens=TOKENS, **given)
        except RuntimeError as error:  # the engine ended while it answered
            return why(str(error).strip().splitlines()[-1], str(error))
        if report.error:
            return why(report.error, report.log)
        if (apart := difference(folder, report, PROMPTS)) > SAME:
            pairs = [[token, 3] for token in range(3, VOCABULARY - 3)]
            alone = difference(folder, engine.run(folder, "quantkv_fp32", pairs, tokens=1, **given), pairs, 1)
            if alone > SAME:
                return f"{SERVED}, not compared: vLLM's model and transformers' differ behind a first token, which sees itself alone"
            return OTHERWISE.get(name, f"{WRONG}: {apart:.2g} from transformers' log-probabilities")
    return f"{SERVED}: transformers' log-probabilities"


def difference(folder: str, report: engine.Report, prompts: list[list[int]], first: int | None = None) -> float:
    """The largest one from transformers' log-probabilities, of prompts and of what follows them. first: only of so many, behind each
    prompt's first token."""
    (found,), apart = report.answers, []
    for prompt, tokens, logprobs, of_prompt in zip(prompts, found.tokens, found.logprobs, found.prompt_logprobs):
        apart.append((torch.tensor(of_prompt + logprobs) - references.scored(folder, prompt + tokens)).abs()[:first])
    return float(torch.cat(apart).max())


def why(error: str, log: str) -> str:
    """Why an engine did not answer."""
    for said in ("quantkv: ", "CUSTOM cannot serve this model: "):
        if said in error:
            return f"{REFUSED}: " + error.split(said)[1].splitlines()[0].rstrip("']")
    for part, reason in REASONS.items():
        if part in error or part in log:
            return reason
    print(log[-3000:], file=sys.stderr, flush=True)
    return f"{WRONG}: {error}"[:500]
