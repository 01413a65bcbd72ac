"""Tensors that a captured graph of decode or of drafts reads, by SGLang's own registry and view of a replayed batch. No graph runs."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

from quantkv.integrations.sglang.backend import QuantKVBackend
from quantkv.integrations.sglang.drafts import DraftSteps

PAGE, LARGEST, PAGES = 16, 8, 4
NEW = 3  # of a sequence whose drafts are verified
PLACES = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc")


@pytest.fixture
def backend() -> QuantKVBackend:
    """A backend whose pool is empty: sequence i has the pages 10 * i + 1, 10 * i + 2, ..."""
    made = object.__new__(QuantKVBackend)
    slots = 10 * PAGE * torch.arange(LARGEST + 1)[:, None] + PAGE + torch.arange(PAGE * PAGES)
    slots[0] = 0  # SGLang's row of padding
    made.device, made.page_size, made.windows = torch.device("cpu"), PAGE, None
    made.table = slots.int()[:, ::PAGE]
    made.layers = SimpleNamespace(of={0: SimpleNamespace(windowed=False)})
    made.full_precision, made._static, made._graphs = {False: None}, {}, {}
    made.init_cuda_graph_state(LARGEST, LARGEST * NEW)
    return made


@pytest.fixture
def registry(backend):
    fill = backend.get_cuda_graph_seq_len_fill_value()
    device = torch.device("cpu")
    return build_decode_registry(
        device=device, max_bs=LARGEST, max_num_token=LARGEST * NEW, seq_len_fill_value=fill, cache_loc_dtype=torch.int64, share_pool=False
    )


def batch(sequences: list[int], lengths: list[int], slots: list[int]) -> ForwardBatch:
    """A batch of decode as the scheduler gives it."""
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lengths),
        input_ids=torch.zeros(len(lengths), dtype=torch.int64),
        req_pool_indices=torch.tensor(sequences),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        out_cache_loc=torch.tensor(slots),
        seq_lens_sum=sum(lengths),
        positions=torch.tensor(lengths) - 1,
    )


def replay(backend, registry, given: ForwardBatch, size: int):
    """Prepare the replay of the graph of `size` sequences, as SGLang does."""
    count = given.batch_size
    registry.fill_from(given, raw_bs=count, padded_bs=size, raw_num_tokens=count, padded_num_tokens=size)
    buffers = SimpleNamespace(mamba_track_indices=None, **{name: registry.get_slot(name).buffer for name in PLACES})
    view = build_replay_fb_view(
        given, buffers, size, count, size, None, backend.get_cuda_graph_seq_len_fill_value(), ForwardMode.DECODE, False
    )
    backend.init_forward_metadata_out_graph(view)
    return backend.forward_metadata[False]


def captured(backend, registry, size: int):
    """Prepare the capture of the graph of `size` sequences, as SGLang does."""
    places = {name: registry.get_slot(name).slice_for(size, size) for name in PLACES}
    places["seq_lens"].fill_(backend.get_cuda_graph_seq_len_fill_value())
    given = ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=size, seq_lens_sum=size, **places)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    return backend.forward_metadata[False]


def test_a_batch_that_is_captured_writes_nothing_and_reads_the_page_of_padding(backend, registry):
    step = captured(backend, registry, 4)
    assert step.slots.tolist() == [-1] * 4
    assert step.batch.seq_lens.tolist() == [1] * 4
    assert step.batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert not step.block_table.any()


def test_rows_of_padding_are_sequences_without_queries_and_without_keys(backend, registry):
    captured(backend, registry, 4)
    replay(backend, registry, batch([5, 6, 7, 8], [60, 61, 62, 63], [1, 2, 3, 4]), 4)  # what must not stay
    step = replay(backend, registry, batch([2, 4, 1], [40, 17, 1], [380, 673, 176]), 4)
    assert step.slots.tolist() == [380, 673, 176, -1]
    assert step.batch.seq_lens.tolist() == [40, 17, 1, 0]
    assert step.batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 3]
    assert step.positions.tolist() == [39, 16, 0, 0]
    assert step.block_table.tolist() == [[21, 22, 23, 24], [41, 42, 43, 44], [11, 12, 13, 14], [0] * 4]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_replay_fills_the_tensors_that_were_captured(backend, registry, count):
    at_capture = {size: captured(backend, registry, size) for size in (8, 4)}
    addresses = [t.data_ptr() for t in _read(at_capture[4])]
    step = replay(backend, registry, batch([1, 2, 3, 4][:count], [9, 9, 9, 9][:count], [20, 30, 40, 50][:count]), 4)
    assert step is at_capture[4]
    assert [t.data_ptr() for t in _read(step)] == addresses
    assert step.slots.tolist() == [20, 30, 40, 50][:count] + [-1] * (4 - count)
    assert step.batch.cu_seqlens_q.tolist() == [min(i, count) for i in range(5)]


def test_graphs_that_are_captured_anew_get_tensors_of_their_own(backend, registry):
    before = captured(backend, registry, 4)
    backend.init_cuda_graph_state(LARGEST, LARGEST)
    after = captured(backend, registry, 4)
    assert after is not before
    assert after.slots.data_ptr() == backend._static[False].slots.data_ptr()


def test_layers_with_windows_have_slots_and_pages_of_their_own_pool(backend, registry):
    backend.windows = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: slots + 100 * PAGE)
    backend.layers.of[1] = SimpleNamespace(windowed=True)
    backend.full_precision[True] = None
    backend.init_cuda_graph_state(LARGEST, LARGEST)
    assert captured(backend, registry, 4) is backend.forward_metadata[False]
    assert backend.forward_metadata[True].slots.tolist() == [-1] * 4
    replay(backend, registry, batch([2, 4], [40, 17], [380, 673]), 4)
    full, windowed = backend.forward_metadata[False], backend.forward_metadata[True]
    assert full.slots.tolist() == [380, 673, -1, -1]
    assert windowed.slots.tolist() == [1980, 2273, -1, -1]
    assert windowed.block_table.tolist() == [[121, 122, 123, 124], [141, 142, 143, 144], [0] * 4, [0] * 4]
    assert full.batch is windowed.batch


def _read(step) -> list[torch.Tensor]:
    return [step.batch.cu_seqlens_q, step.batch.seq_lens, step.block_table, step.slots, step.positions]


# Drafts.


def verified(sequences: list[int], lengths: list[int], topk: int = 1) -> ForwardBatch:
    """A batch of drafts that are verified, as SGLang's workers give it: lengths are those before."""
    held, steps = torch.tensor(lengths), torch.arange(NEW)
    places = (held[:, None] + steps).flatten()
    first = 10 * PAGE * torch.tensor(sequences) + PAGE
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(lengths),
        input_ids=torch.zeros(len(lengths) * NEW, dtype=torch.int64),
        req_pool_indices=torch.tensor(sequences),
        seq_lens=held,
        seq_lens_cpu=held,
        out_cache_loc=(first[:, None] + held[:, None] + steps).flatten(),
        seq_lens_sum=sum(lengths),
        positions=places,
        spec_info=chain(topk),
    )


def chain(topk: int = 1) -> EagleVerifyInput:
    """What SGLang says of drafts when a graph is captured."""
    tensors = ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    none = dict.fromkeys((*tensors, "retrieve_cum_len", "seq_lens_sum", "seq_lens_cpu"))
    return EagleVerifyInput(**none, spec_steps=NEW - 1, topk=topk, draft_token_num=NEW, capture_hidden_mode=CaptureHiddenMode.FULL)


def captured_chain(backend, registry, size: int):
    """Prepare the capture of the graph of `size` sequences with drafts, as SGLang does."""
    places = {name: registry.get_slot(name).slice_for(size, size * NEW) for name in PLACES}
    places["seq_lens"].fill_(backend.get_cuda_graph_seq_len_fill_value())
    places["out_cache_loc"].zero_()
    given = ForwardBatch(forward_mode=ForwardMode.TARGET_VERIFY, batch_size=size, seq_lens_sum=size, spec_info=chain(), **places)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    return backend.forward_metadata[False]


def replay_chain(backend, registry, given: ForwardBatch, size: int):
    """Prepare the replay of the graph of `size` sequences with drafts, as SGLang does."""
    count = given.batch_size
    registry.fill_from(given, raw_bs=count, padded_bs=size, raw_num_tokens=count * NEW, padded_num_tokens=size * NEW)
    buffers = SimpleNamespace(mamba_track_indices=None, **{name: registry.get_slot(name).buffer for name in PLACES})
    fill = backend.get_cuda_graph_seq_len_fill_value()
    view = build_replay_fb_view(given, buffers, size, count, size * NEW, None, fill, ForwardMode.TARGET_VERIFY, False)
    backend.init_forward_metadata_out_graph(view)
    return backend.forward_metadata[False]


def test_drafts_that_are_verified_stand_behind_what_their_sequences_hold(backend, registry):
    at_capture = captured_chain(backend, registry, 4)
    assert at_capture.slots.tolist() == [-1] * 4 * NEW and not at_capture.block_table.any()
    assert at_capture.batch.cu_seqlens_q.tolist() == [0, 3, 6, 9, 12] and at_capture.batch.max_query_len == NEW
    addresses = [t.data_ptr() for t in _read(at_capture)]
    replay_chain(backend, registry, verified([5, 6, 7, 8], [60, 61, 40, 41]), 4)  # what must not stay
    step = replay_chain(backend, registry, verified([2, 4], [40, 15]), 4)
    assert step is at_capture and [t.data_ptr() for t in _read(step)] == addresses
    assert step.slots.tolist() == [376, 377, 378, 671, 672, 673, *[-1] * 6]
    assert step.positions.tolist()[:6] == [40, 41, 42, 15, 16, 17]
    assert step.batch.seq_lens.tolist() == [43, 18, 0, 0]
    assert step.batch.cu_seqlens_q.tolist() == [0, 3, 6, 6, 6]
    assert step.block_table.tolist() == [[21, 22, 23, 24], [41, 42, 43, 44], [0] * 4, [0] * 4]


def test_a_graph_reads_what_the_same_step_without_one_reads(backend, registry):
    given = verified([2, 4, 3], [40, 15, 1])
    captured_chain(backend, registry, 3)
    step = replay_chain(backend, registry, given, 3)
    backend.init_forward_metadata(given)
    assert [t.tolist() for t in _read(step)] == [t.tolist() for t in _read(backend.forward_metadata[False])]


def test_trees_of_drafts_are_no_graphs(backend, registry):
    captured_chain(backend, registry, 4)
    with pytest.raises(NotImplementedError, match="trees of drafts, topk=2"):
        replay_chain(backend, registry, verified([2, 4], [40, 15], topk=2), 4)


def test_each_draft_of_a_chain_has_tensors_of_its_own(backend):
    """By the batch that SGLang gives the graph of a whole chain: slots of all steps, request by request."""
    steps, count = DraftSteps(backend, NEW), 2
    steps.init_cuda_graph_state(LARGEST, LARGEST)
    given = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=4,
        input_ids=None,
        req_pool_indices=torch.zeros(4, dtype=torch.int64),
        seq_lens=torch.ones(4, dtype=torch.int64),
        out_cache_loc=torch.zeros(4 * NEW, dtype=torch.int64),
        seq_lens_sum=4,
        positions=torch.zeros(4, dtype=torch.int64),
        spec_info=EagleDraftInput(),
    )
    steps.init_forward_metadata_out_graph(given, in_capture=True)
    at_capture = [of.forward_metadata[False] for of in steps.attn_backends]
    assert len(at_capture) == NEW - 1 and all(step.slots.tolist() == [-1] * 4 for step in at_capture)
    given.req_pool_indices[:count] = torch.tensor([2, 4])
    given.seq_lens[:count] = given.positions[:count] = torch.tensor([40, 15])
    given.out_cache_loc[: count * NEW] = torch.tensor([376, 377, 378, 671, 672, 673])
    steps.init_forward_metadata_out_graph(SimpleNamespace(**vars(given), num_padding=2))
    replayed = [of.forward_metadata[False] for of in steps.attn_backends]
    assert all(a is b for a, b in zip(at_capture, replayed, strict=True))
    assert [step.slots.tolist() for step in replayed] == [[376, 671, -1, -1], [377, 672, -1, -1]]
    assert [step.positions.tolist()[:2] for step in replayed] == [[40, 15], [41, 16]]
    assert [step.batch.seq_lens.tolist()[:2] for step in replayed] == [[41, 16], [42, 17]]
    assert all(step.block_table.tolist() == [[21, 22, 23, 24], [41, 42, 43, 44], [0] * 4, [0] * 4] for step in replayed)


def test_the_first_slot_of_a_sequence_says_whether_it_is_there(backend):
    """Slots of padding are 0 and read page 0, whatever stands in SGLang's table; those of other sequences have no say."""
    given = verified([2, 4, 3], [40, 15, 1])
    given.out_cache_loc[NEW:-NEW] = 0
    backend.fill(given, NEW, NEW, given.out_cache_loc, given.positions)
    step = backend.forward_metadata[False]
    assert step.block_table.tolist() == [[21, 22, 23, 24], [0] * 4, [31, 32, 33, 34]]
    assert step.slots.tolist() == [376, 377, 378, -1, -1, -1, 497, 498, 499]


def test_a_chain_in_a_graph_reads_what_the_same_chain_without_one_reads(backend):
    steps, given = DraftSteps(backend, NEW), verified([2, 4], [40, 15])
    given.positions = given.seq_lens.clone()
    steps.init_forward_metadata(given)
    eager = [[t.tolist() for t in _read(of.forward_metadata[False])] for of in steps.attn_backends]
    steps.init_cuda_graph_state(LARGEST, LARGEST)
    steps.init_forward_metadata_out_graph(given)
    assert [[t.tolist() for t in _read(of.forward_metadata[False])] for of in steps.attn_backends] == eager
