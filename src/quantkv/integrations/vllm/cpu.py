"""vLLM on a CPU takes `--attention-backend CUSTOM`, as it does on GPUs."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def take_custom() -> None:
    """vLLM's CPU platform answers every request for a backend with its own, and says so in one line of the log. After this call
    CUSTOM is checked and taken where it was asked for; all else is as it was. May be called again."""
    own = CpuPlatform.get_attn_backend_cls.__func__
    if own.__module__ == __name__:
        return

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return own(cls, selected_backend, attn_selector_config, num_heads)
        backend = AttentionBackendEnum.CUSTOM.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"--attention-backend CUSTOM cannot serve this model: {'; '.join(reasons)}")
        return AttentionBackendEnum.CUSTOM.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
