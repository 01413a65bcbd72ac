"""vLLM's offloading on a CPU: its connector, its scheduler and its manager, with a worker that copies blocks from memory to memory.

vLLM's own worker copies by CUDA alone. Like it, this one sees each layer's cache as rows of bytes, one a block, and knows nothing else.
"""

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies that have ended when they are submitted; what was copied is printed, for the test to count."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.refs, *others = caches.group_data_refs
        assert all(refs == self.refs for refs in others)  # one group of layers, or packed blocks, which are copied whole
        self.device = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in caches.tensors]
        self.host = [torch.zeros(num_chunks, rows.shape[1], dtype=torch.int8) for rows in self.device]
        self.ended: list[TransferResult] = []

    def copy(self, job_id, what, source, source_blocks, target, target_blocks) -> bool:
        assert len(source_blocks) == len(target_blocks)
        for ref in self.refs:
            assert ref.page_size_bytes == source[ref.tensor_idx].shape[1]  # a page has no padding
            target[ref.tensor_idx][target_blocks] = source[ref.tensor_idx][source_blocks]
        print(f"host_offloading: {what} {len(source_blocks)} blocks", flush=True)
        self.ended.append(TransferResult(job_id, True))
        return True

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self.copy(job_id, "stored", self.device, src_spec.block_ids, self.host, dst_spec.block_ids)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
        return self.copy(job_id, "loaded", self.host, src_spec.block_ids, self.device, dst_spec.block_ids)

    def get_finished(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids) -> None:
        pass


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker
