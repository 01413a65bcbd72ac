"""vLLM's KV connectors: what they are told of a page's bytes, and which of them would misread a page.

A connector compares the name of the cache's type, and nothing else of ours, before it takes blocks of another engine or of a disk. Once
connectors are made, that name therefore carries a digest of all that decides what the bytes of a block mean: `quantkv_policy:1f0c...`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import iter_layer_specs

from ...names import LATENT
from . import DIGEST_MARK, PREFIX, asked_type, make_known
from .asked import policy_of
from .backend import UNQUANTIZED, format_of
from .blocks import is_packed

DIGITS = 16  # of the digest
BY_HEAD_SIZE = ("LMCacheConnectorV1",)  # connectors that work out the bytes of a token from the head size
HANDSHAKES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")  # of which each side compares the type's name


def name_page_types() -> None:
    """Give types their digest from now on, right before vLLM makes a connector, in the scheduler and in every worker. May be called
    again."""
    own = KVConnectorFactory.create_connector.__func__
    if own.__module__ == __name__:
        return

    def create_connector(cls, config, role, kv_cache_config):
        asked = asked_type(config.cache_config.cache_dtype)
        if asked.startswith(PREFIX):
            config.cache_config.cache_dtype = (
                asked + DIGEST_MARK + page_digest(config, [_block(g) for g in kv_cache_config.kv_cache_groups])
            )
            make_known(config.cache_config.cache_dtype)
        return own(cls, config, role, kv_cache_config)

    KVConnectorFactory.create_connector = classmethod(create_connector)


def _block(group: Any) -> Any:
    """What a block of a group of layers holds: tokens, and where it is packed, whose pages and how many of each."""
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    return [spec.block_size, spec.block_stride_alignment, list(group.layer_names)] if is_packed(spec) else spec.block_size


def page_digest(config: Any, blocks: Sequence[Any]) -> str:
    """Hash of what the bytes of a model's blocks mean: formats and maps by layer, layers left at 16 bits, and what a block of each group
    holds."""
    policy, dtype = policy_of(config), config.model_config.dtype
    if policy is None:
        stored = format_of(config.cache_config.cache_dtype, dtype).name
    else:
        stored = policy.fingerprint(config.model_config.get_total_num_hidden_layers(), dtype)
    if config.model_config.use_mla:  # the rotated dimensions of latents are stored as the model computes them
        stored += LATENT + format_of(f"{PREFIX}none", dtype).name
    skipped = sorted(config.cache_config.kv_cache_dtype_skip_layers)
    text = json.dumps([stored, skipped, list(blocks)])
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def check_connectors(config: Any) -> None:
    """Refuse what would read a block as another's. NotImplementedError naming the connector."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if transfer.enable_permute_local_kv:
        raise NotImplementedError("quantkv: enable_permute_local_kv=True moves tokens within a block; only False is allowed")
    for name, extra in _connectors(transfer.kv_connector, transfer.kv_connector_extra_config):
        if name in BY_HEAD_SIZE:
            raise NotImplementedError(f"quantkv: kv_connector={name!r} takes a token's bytes for 2 x head_size numbers, which they are not")
        enforced = extra.get("enforce_handshake_compat", True)
        if enforced is not True:
            needed = "only True is allowed: blocks of another size, or of another policy, would be read as these"
            raise NotImplementedError(f"quantkv: kv_connector={name!r} with enforce_handshake_compat={enforced!r}; {needed}")
        if name in HANDSHAKES and config.cache_config.cache_dtype in UNQUANTIZED:
            needed = f"ask for {PREFIX}none, which stores the same numbers and says how"
            given = f"kv_cache_dtype={config.cache_config.cache_dtype!r}"
            raise NotImplementedError(f"quantkv: kv_connector={name!r} with {given} takes blocks of every size for its own; {needed}")


def _connectors(name: str, extra: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each connector with its options, those that a MultiConnector holds too."""
    yield name, extra
    for child in extra.get("connectors", []) if name == "MultiConnector" else []:
        yield from _connectors(child.get("kv_connector", ""), child.get("kv_connector_extra_config", {}))
