"""How the combine kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass

from .warps import COMBINE_PACKED_ROWS, COMBINE_WARPS, DecodeConfig

BLOCKS = 8  # of combine_kernel, that a multiprocessor has at once
BLOCKS_OF_HALF = 4  # of combine_one_kernel with half its warps


@dataclass(frozen=True)
class Combine:
    """How partials are combined: whether a block combines each packed query row, or a warp, and the grid and the threads of a block of the
    kernel that does."""

    by_blocks: bool
    grid: tuple[int, int, int]
    threads: int


def launched(config: DecodeConfig, sequences: int, packed_rows: int, partials: int, multiprocessors: int) -> Combine:
    """What suits so many sequences. partials: that a sequence and kv head has room for, where the cut is invariant."""
    seq_heads, warps = sequences * config.kv_heads, COMBINE_WARPS
    if config.invariant:
        blocks = by_blocks(seq_heads * packed_rows, partials, config.partials_at_once, multiprocessors)
    elif multiprocessors >= 8 * seq_heads:
        blocks = True  # few sequences: with more than eight partials each
    else:  # one that is longer than the others may have as many, and the host may not know: if all rows have a block at once
        blocks = config.combiners_vary and seq_heads * packed_rows <= BLOCKS_OF_HALF * multiprocessors
        warps = COMBINE_WARPS // 2
    if blocks:
        return Combine(True, (sequences, config.kv_heads, packed_rows), 32 * warps)
    across, groups = -(-sequences // config.combine_sequences), -(-packed_rows // COMBINE_PACKED_ROWS)
    in_turn = turns(config, across * config.kv_heads * groups, multiprocessors)
    return Combine(False, (across, config.kv_heads, -(-groups // in_turn)), 32 * COMBINE_PACKED_ROWS * config.combine_sequences)


def by_blocks(rows: int, partials: int, at_once: int, multiprocessors: int) -> bool:
    """Whether a block combines each of so many rows, or a warp, where the cut is invariant: then both come to the same bits, so the batch
    may decide. By how many batches of partials, `at_once` of which a warp loads together, some warp has one after the other, and by what
    goes before and behind: by a fit to times on an H200, in us, 1.7 a batch, 2.2 beside them for a warp and 0.6 for a block. Of
    `partials`, the capacity, most calls have fewer."""
    batches = -(-min(partials, 128) // at_once)
    by_warps = -(-rows // (32 * multiprocessors)) * (2.2 + 1.7 * batches)
    return -(-rows // (32 // COMBINE_WARPS * multiprocessors)) * (0.6 + 1.7 * -(-batches // COMBINE_WARPS)) < by_warps


def turns(config: DecodeConfig, blocks: int, multiprocessors: int) -> int:
    """Groups of packed query rows that a block of combine_kernel combines, one after the other, where each group had a block it would
    take so many: more than there are at once take turns anyway, and what is counted of a sequence and kv head is then counted once. As
    IN_TURNS in combine.cuh."""
    if config.value_map == "MATRIX" or config.exact:
        return 1
    return -(-blocks // (BLOCKS * multiprocessors))
