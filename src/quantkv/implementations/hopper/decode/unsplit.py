"""Which calls are unsplit: each (sequence, kv head) is read by the warps of one block, or of the blocks of one cluster, which write its
results. There is one launch then in place of two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....calls import AttendCall, Batch, Segment
from ....reads import window_size
from ..host.launch import SHARED_BYTES, Kernel
from .warps import COMBINE_WARPS, TILE, DecodeConfig

# That the longest run of a warp may have beyond an even share of all tiles: they take less than a second launch and its combining, which
# has little to combine where (sequence, kv head)s are few.
SPARE_TILES, SPARE_TILES_OF_FEW, FEW = 6, 3, 16
# Where lengths may differ, tiles of a run, at most: the longest sequence decides, as no warp of another one helps it.
MOST_TILES_RAGGED = 8
NEVER = -1  # in place of spare tiles: the call is split, whatever its lengths are
EVEN = 1 / 32  # lengths are even where the longest is above their mean by no larger a part of it
MOST_OF_SHARE = 1.25  # that the longest run is of an even share, where the host does not know lengths, and they turn out to be even


@dataclass(frozen=True)
class Unsplit:
    """Who reads a sequence and kv head: blocks of a cluster, or 1, and warps of a block."""

    blocks: int
    warps: int
    of_block: int  # (sequence, kv head)s of a block
    partials: int = 0  # capacity of a (sequence, kv head), where the cut is invariant
    spare: int | None = None  # tiles that a run may have beyond an even share, where the lengths on the device say whether there are more

    def grid(self, seq_heads: int) -> int:
        """Blocks that have so many (sequence, kv head)s."""
        return -(-seq_heads // self.of_block) * self.blocks

    def capacity(self, config: DecodeConfig) -> int:
        """Shared memory of a block for the partials of the packed query rows that it finishes."""
        return self.of_block * self.partials * -(-config.packed_rows // self.blocks) * config.partial_bytes

    def of(self, config: DecodeConfig) -> DecodeConfig:
        """The configuration that reads so."""
        return replace(config, unsplit=True, either=self.spare is not None, partial_capacity=self.capacity(config))

    def has_capacity(self, config: DecodeConfig) -> bool:
        """Whether shared memory holds these too, and what combiners of partials come to, in float32, in place of the rings of its warps."""
        combiners = min(COMBINE_WARPS, -(-self.partials // config.partials_at_once))
        combined = -(-config.packed_rows // self.blocks) * combiners * 4 * (1024 // config.partials_at_once + 4)
        all_ = self.of(config).shared_bytes
        return all_ <= SHARED_BYTES - 1024 and combined <= self.warps * config.worker_bytes  # 1024: which a device keeps for itself

    def held(self, kernel: Kernel, groups: int) -> int | None:
        """Blocks of such clusters that the device holds at once for each of so many groups of packed query rows; None: as many as it has
        room for."""
        return None if self.blocks == 1 else kernel.clusters(self.blocks) // groups * self.blocks


def longest(call: AttendCall, segment: Segment) -> int:
    """Tokens of a sequence in a segment, at most."""
    bound, capacity = call.batch.max_seq_len, segment.block_table.shape[1] * segment.k.codes.shape[1]
    return capacity if bound is None else min(capacity, bound)


def rounded_tiles(call: AttendCall, segment: Segment) -> int:
    """The tiles of so many tokens, to a power of two, so that few shapes of calls differ."""
    return 1 << max(-(-longest(call, segment) // TILE) - 1, 0).bit_length()


def longest_of_shape(call: AttendCall, segment: Segment) -> int:
    """Tokens of a sequence in a segment, at most, of any call that is prepared as this one: for which memory is taken."""
    return min(TILE * rounded_tiles(call, segment), segment.block_table.shape[1] * segment.k.codes.shape[1])


def _tiles(call: AttendCall, tokens: int) -> tuple[int, bool]:
    """Tiles of a sequence of so many tokens and a kv head, at most, and at least one; whether a window bounds them."""
    window, chunk = window_size(call.options)
    seen = chunk * (call.options.chunk_lookback + 1) if chunk else window
    reach = seen + call.batch.max_query_len - 1
    if seen == 0 or reach >= tokens:
        return max(-(-tokens // TILE), 1), False
    return (reach + TILE - 2) // TILE + 1, True  # the first may be any of a tile


def choose(call: AttendCall, config: DecodeConfig, blocks: int, largest_cluster: int) -> tuple[DecodeConfig, Unsplit | None]:
    """Who reads each (sequence, kv head) of `call`, which has so many blocks at once for each group of its packed query rows; None where
    they are split. With the configuration for it, which has more warps or fewer where the call is unsplit with these alone. Where they are
    split it is that of calls on which the device decides, if there are such: one kernel less is compiled."""
    for each in (config, config.with_more_warps, config.with_fewer_warps):
        if each is not None and (found := _of(call, each, blocks, largest_cluster)):
            return found.of(each), found
    either = Unsplit(1, 1, 1, spare=NEVER)
    decided = _can_be(config) and not config.invariant and either.has_capacity(config)
    return either.of(config) if decided else config, None


def _can_be(config: DecodeConfig) -> bool:
    """Whether calls of one source with that configuration may be unsplit."""
    ways = config.worker_warps > 1 or config.segments > 1 or config.exact or config.several_decodes
    return not ways and "MATRIX" not in (config.key_map, config.value_map)


def _of(call: AttendCall, config: DecodeConfig, blocks: int, largest_cluster: int) -> Unsplit | None:
    if not _can_be(config) or len(call.segments) > 1:
        return None
    seq_heads, (tiles, by_window) = call.batch.num_seqs * config.kv_heads, _tiles(call, longest(call, call.segments[0]))
    if seq_heads == 0 or seq_heads > blocks * config.warps:
        return None
    units = config.partials(tiles * TILE) if config.invariant else tiles  # which no two warps share
    most = max(1, min(largest_cluster, blocks // seq_heads))
    if config.invariant:
        cluster = min(most, units)  # partials are long: the fewer a multiprocessor has the better
    else:
        most = min(most, -(-tiles // config.warps))
        cluster = -(-tiles // (-(-tiles // (most * config.warps)) * config.warps))  # no more blocks than make the longest run shorter
    warps = max(n for n in range(1, config.warps + 1) if config.warps % n == 0 and (n == 1 or seq_heads <= blocks * (config.warps // n)))
    most_tiles, _ = _tiles(call, longest_of_shape(call, call.segments[0]))
    found = Unsplit(cluster, warps, config.warps // warps, config.partials(most_tiles * TILE) if config.invariant else 0)
    if not found.has_capacity(config):
        return None
    run, share = -(-units // (cluster * warps)) * tiles / units, tiles * seq_heads / (blocks * config.warps)
    if config.invariant:
        share = max(share, tiles / units)  # that of any other way
    spare, even = SPARE_TILES if seq_heads > FEW else SPARE_TILES_OF_FEW, is_even(call.batch)
    if run > MOST_TILES_RAGGED and not by_window and not even:
        decides = even is None and not config.invariant and run <= MOST_OF_SHARE * share
        return replace(found, spare=spare) if decides else None  # the device does
    return found if run - share <= spare else None


def is_even(batch: Batch) -> bool | None:
    """Whether all sequences are about as long; None where the host does not know."""
    if batch.num_seqs <= 1:
        return True
    if batch.lengths is None:
        return None
    lengths = [tokens for _, tokens in batch.lengths]
    return max(lengths) * len(lengths) <= sum(lengths) * (1 + EVEN)
