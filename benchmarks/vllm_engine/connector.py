"""A KV connector for measuring decode: all of a prompt but its last token counts as computed, so that long contexts cost no prefill.

vLLM's own DecodeBenchConnector, but switched on and off while the engine runs, and without its constant filling: `workers.tile` puts
the pages of one prompt that was computed into all of the cache, so that every format reads plausible rows.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class BenchConnector(DecodeBenchConnector):
    computed = False  # prompts are computed as usual

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not BenchConnector.computed:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def start_load_kv(self, forward_context, **kwargs):
        pass
