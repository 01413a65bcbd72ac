"""The stand-ins for vLLM's CPU operators: without them right, nothing else here would mean much."""

import torch
import vllm_cpu_operators as operators


def test_tokens_are_drawn_by_their_probabilities():
    wanted = torch.tensor([0.6, 0.3, 0.1, 0.0])
    count = 4000
    drawn = operators.fused_gumbel_argmax(wanted.log().expand(count, -1), torch.arange(count))
    found = drawn.bincount(minlength=4) / count
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 0.5 / count**0.5)  # four standard deviations at most
    assert found[3] == 0
    again = operators.fused_gumbel_argmax(wanted.log().expand(count, -1), torch.arange(count))
    assert torch.equal(again, drawn)


def test_slots_follow_the_block_table():
    starts, positions = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([14, 15, 16, 0, 1])
    table = torch.tensor([[7, 2], [5, 0]], dtype=torch.int32)
    slots = torch.zeros(7, dtype=torch.int64)
    operators.compute_slot_mapping_kernel_impl(starts, positions, table, slots, 16)
    assert slots.tolist() == [7 * 16 + 14, 7 * 16 + 15, 2 * 16, 5 * 16, 5 * 16 + 1, -1, -1]


def test_drafts_are_taken_up_to_the_first_that_is_wrong():
    output = torch.full((3, 4), -1)
    drafted, wanted = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([5, 0, 7, 8, 9])
    operators.rejection_greedy_sample_kernel_impl(output, torch.tensor([3, 5, 5]), drafted, wanted, torch.tensor([[1], [2], [3]]), None, 3)
    assert output.tolist() == [[5, 0, -1, -1], [8, 9, 2, -1], [3, -1, -1, -1]]


def test_no_weight_is_packed_for_amx(monkeypatch):
    """By an operator that the wheel lacks, where a CPU has AMX and weights are small."""
    from vllm.model_executor.layers import utils

    operators.register()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not utils.check_cpu_sgl_kernel(16, 2048, torch.bfloat16)
