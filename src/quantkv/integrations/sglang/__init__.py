"""quantkv's formats in an unmodified SGLang: `sglang serve --model-path MODEL --attention-backend quantkv_4bit`.

SGLang finds `register` by its entry point (`sglang.srt.plugins`) and calls it in every process before arguments are parsed. It logs and
swallows what a plug-in raises, and whatever fails when hooks are applied. So the names of `--attention-backend` come last, and what they
build refuses to start over any pool but quantkv's: SGLang serves from quantized pages, or not at all.
"""

from __future__ import annotations

import logging
import sys

from ..asked import PREFIX as PREFIX
from ..asked import options
from ..contract import is_tested
from ..serving import calls as calls
from ..serving import served as served
from .contract import missing

POLICY_VARIABLE = "QUANTKV_POLICY"  # the policy's file, for --attention-backend quantkv_policy
PROMPT_VARIABLES = {"prompt": "QUANTKV_PROMPT", "prompt_precision": "QUANTKV_PROMPT_PRECISION"}  # by the policy's field
TESTED = ("0.5.23",)
ANY_VERSION = "QUANTKV_SGLANG_ANY_VERSION"  # =1 registers with a version of SGLang that was not tested
SCHEDULER = "sglang.srt.managers.scheduler"  # loaded where models run

logger = logging.getLogger("sglang.quantkv")


def register() -> None:
    """Make quantkv's attention backends known to SGLang. A version of SGLang that was not tested gets one line in the log, and nothing is
    registered: SGLang then refuses the names. May be called again."""
    import sglang

    if not is_tested("SGLang", sglang.__version__, TESTED, ANY_VERSION, "attention backends", missing):
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from . import hooks

    if options()[0] in ATTENTION_BACKEND_CHOICES:
        return
    hooks.hook_arguments()
    if SCHEDULER in sys.modules:
        hooks.hook_runner()
    add_attention_backend_choices(options())
