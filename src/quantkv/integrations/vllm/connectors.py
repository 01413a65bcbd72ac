"""vLLM's KV connectors: what they are told of a page's bytes, and which of them would misread a page.

Some connectors compare the name of the cache's type, and nothing else of ours, before they take blocks of another engine or of a disk. Once
connectors are made, that name therefore carries the digest of what the bytes of a block mean: `quantkv_policy:1f0c...`. Those that compare
nothing of ours are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import iter_layer_specs
from vllm.v1.kv_cache_layout import KVCacheLayout

from ... import whole_file
from ...names import LATENT
from ...page_meaning import codecs_of, meaning_digest, refuse_other
from . import DIGEST_MARK, PREFIX, asked_type, make_known
from .around import around
from .asked import policy_of
from .backend import UNQUANTIZED, format_of
from .blocks import is_packed

logger = init_logger("vllm.quantkv")
BY_HEAD_SIZE = ("LMCacheConnectorV1",)  # connectors that work out the bytes of a token from the head size
HANDSHAKES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")  # of which each side compares the type's name
WHOLE = KVCacheLayout.BHLNC  # in which NIXL sends a block of all layers as one
KEYED = ("LMCacheMPConnector",)  # whose keys begin with the model's name, and say nothing of the type
FOLDERS = ("ExampleConnector",)  # which keep pages in a folder, and compare nothing: a file there says the type
FOLDER_OPTION, FOLDER_DEFAULT = "shared_storage_path", "/tmp"  # as the connector has them
TYPE_FILE = "quantkv_type"
WITHIN = ("MultiConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleHiddenStatesConnector")
SERVED = (*HANDSHAKES, *KEYED, *FOLDERS, *WITHIN)  # WITHIN: which hold others, compare the type's name, or keep pages within one engine


def name_page_types() -> None:
    """Give types their digest from now on, right before vLLM makes a connector, in the scheduler and in every worker. May be called
    again."""
    around(KVConnectorFactory, "create_connector", _create_connector)


def _create_connector(own: Any, cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
    asked = asked_type(config.cache_config.cache_dtype)
    if asked.startswith(PREFIX):
        blocks = [_block(group) for group in kv_cache_config.kv_cache_groups]
        stored = asked + DIGEST_MARK + page_digest(config, blocks, kv_cache_config.kv_cache_layout)
        config.cache_config.cache_dtype = stored
        make_known(stored)
        for name, extra in _connectors_of(config.kv_transfer_config):
            if name in HANDSHAKES:
                _name_in_handshakes()
            if name in KEYED:
                _name_in_keys()
            if name in FOLDERS:
                _check_folder(Path(extra.get(FOLDER_OPTION, FOLDER_DEFAULT)), stored)
    return own(cls, config, role, kv_cache_config)


def _name_in_handshakes() -> None:
    """Let NIXL's hash end in the type's name with its digest, so that who refuses a handshake names both sides'. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    around(base_worker, "compute_nixl_compatibility_hash", _named_with_ranks)


def _named_with_ranks(own: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> str:
    """As `_named`, and how many ranks split a block that NIXL sends as one: vLLM 0.33 lets two ranks read one rank's, and they
    get other rows than their own."""
    name, cache = _named(own, vllm_config, *args, **kwargs), vllm_config.cache_config
    if not cache.cache_dtype.startswith(PREFIX) or cache.get_resolved_kv_cache_layout() != WHOLE:
        return name
    return f"{name} in {WHOLE.name} of {vllm_config.parallel_config.tensor_parallel_size} ranks"


def _name_in_keys() -> None:
    """Let LMCache's keys have the type's name with its digest behind the model's. May be called again. NotImplementedError for an LMCache
    that makes them in another way."""
    home = sys.modules[KVConnectorFactory.get_connector_class_by_name(KEYED[0]).__module__]
    if not hasattr(home, "get_dcp_decorated_model_name"):
        raise NotImplementedError(f"quantkv: kv_connector={KEYED[0]!r} of {home.__name__}; that of LMCache 0.5.6 is needed")
    around(home, "get_dcp_decorated_model_name", _named)


def _named(own: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> str:
    """What vLLM's own function makes of a configuration, with the type's name behind it."""
    stored = vllm_config.cache_config.cache_dtype
    return own(vllm_config, *args, **kwargs) + (f" of {stored}" if stored.startswith(PREFIX) else "")


def _check_folder(folder: Path, stored: str) -> None:
    """Let a folder of pages say whose they are. ValueError with both digests where they are of another type."""
    file = folder / TYPE_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole_file.write(file, stored.encode())
    with whole_file.reading(file) as opened:
        found = opened.read(1024).decode(errors="replace")
    if found != stored:
        (theirs, digest_of_theirs), (ours, digest_of_ours) = (name.partition(DIGEST_MARK)[::2] for name in (found, stored))
        argument = f"quantkv: {FOLDER_OPTION}={str(folder)!r} has blocks of kv_cache_dtype"
        refuse_other(argument, theirs, f"this engine's are {ours}", digest_of_theirs, digest_of_ours)


def _block(group: Any) -> Any:
    """What a block of a group of layers holds: tokens, and where it is packed, whose pages and how many of each."""
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    return [spec.block_size, spec.block_stride_alignment, list(group.layer_names)] if is_packed(spec) else spec.block_size


def page_digest(config: Any, blocks: Sequence[Any], layout: str | None) -> str:
    """Digest of what the bytes of a model's blocks mean: formats and maps by layer, layers left at 16 bits, what a block of each group
    holds, and vLLM's layout of them. Geometry is what vLLM compares itself: the model, its heads and their size."""
    policy, dtype = policy_of(config), config.model_config.dtype
    if policy is None:
        stored = codecs_of(format_of(config.cache_config.cache_dtype, dtype))
    else:
        stored = policy.fingerprint(config.model_config.get_total_num_hidden_layers(), dtype)
    if config.model_config.use_mla:  # the rotated dimensions of latents are stored as the model computes them
        stored += LATENT + format_of(f"{PREFIX}none", dtype).name
    return meaning_digest([stored, sorted(config.cache_config.kv_cache_dtype_skip_layers), list(blocks), layout])


def check_connectors(config: Any) -> None:
    """Refuse what would read a block as another's. NotImplementedError naming the connector."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if transfer.enable_permute_local_kv:
        raise NotImplementedError("quantkv: enable_permute_local_kv=True moves tokens within a block; only False is allowed")
    for name, extra in _connectors_of(transfer):
        if name in BY_HEAD_SIZE:
            raise NotImplementedError(f"quantkv: kv_connector={name!r} takes a token's bytes for 2 x head_size numbers, which they are not")
        if name not in SERVED and name in KVConnectorFactory._registry:
            needed = f"one of {', '.join(SERVED)} is needed"
            raise NotImplementedError(f"quantkv: kv_connector={name!r} takes blocks without comparing what their bytes mean; {needed}")
        if name not in SERVED:
            logger.warning_once("quantkv: kv_connector=%r is not vLLM's: blocks may only come from engines of the same cache_dtype", name)
        enforced = extra.get("enforce_handshake_compat", True)
        if enforced is not True:
            needed = "only True is allowed: blocks of another size, or of another policy, would be read as these"
            raise NotImplementedError(f"quantkv: kv_connector={name!r} with enforce_handshake_compat={enforced!r}; {needed}")
        if name in HANDSHAKES and config.cache_config.cache_dtype in UNQUANTIZED:
            needed = f"ask for {PREFIX}none, which stores the same numbers and says how"
            given = f"kv_cache_dtype={config.cache_config.cache_dtype!r}"
            raise NotImplementedError(f"quantkv: kv_connector={name!r} with {given} takes blocks of every size for its own; {needed}")


def _connectors_of(transfer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _connectors(transfer.kv_connector, transfer.kv_connector_extra_config)


def _connectors(name: str, extra: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each connector with its options, those that a MultiConnector holds too."""
    yield name, extra
    for child in extra.get("connectors", []) if name == "MultiConnector" else []:
        yield from _connectors(child.get("kv_connector", ""), child.get("kv_connector_extra_config", {}))
