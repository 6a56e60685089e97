"""Decoding a part on a GPU: one launch for all gaps, torch for the other forms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from vllm.inflight.delta import reference
from vllm.inflight.delta.part import CHUNK_CODES, Block


def decode_blocks(
    blocks: Sequence[Block],
    data: torch.Tensor,
    slots: Sequence[int],
    places: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Decode the blocks of a checked table.

    Args:
        blocks: the blocks.
        data: data of the part.
        slots: for each block its first place in `places` and its first byte in `bits`.
        places: gets the places; int64.
        bits: gets the bits; uint8.

    Raises:
        Malformed: the message names the row, and what is wrong with it.

    """
    if data.data_ptr() % 8:
        data = data.clone()
    gaps: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        if block.form in reference.CODE_BYTES:
            gaps[block.width].append(index)
    if gaps:
        _decode_gaps(gaps, blocks, data, slots, places, bits)
    for index, block in enumerate(blocks):
        if block.form in reference.CODE_BYTES:
            continue
        found, values = reference.decode_block(block, index, data)
        place, byte = slots[2 * index : 2 * index + 2]
        places[place : place + block.num_entries] = found
        octets = block.num_entries * block.width
        bits[byte : byte + octets] = values.view(torch.uint8)


def _decode_gaps(
    gaps: dict[int, list[int]],
    blocks: Sequence[Block],
    data: torch.Tensor,
    slots: Sequence[int],
    places: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    from vllm.inflight.delta import triton_kernels as kernels

    faults = []
    for width, indexes in gaps.items():
        rows, counts, num_chunks = [], [], 0
        for index in indexes:
            block = blocks[index]
            place, byte = slots[2 * index : 2 * index + 2]
            rows.append(
                [
                    *(index, block.first, block.num_elements, block.num_entries),
                    *(block.num_exceptions, block.num_codes),
                    *(reference.CODE_BYTES[block.form], block.code_bytes),
                    *(block.chunks_at, block.places_at, block.values_at),
                    *(block.exceptions_at, num_chunks, place, byte, 0),
                ]
            )
            counts.append(-(-block.num_codes // CHUNK_CODES))
            num_chunks += counts[-1]
        # Made on the host, whatever device is the thread's default.
        with torch.device("cpu"):
            table = torch.tensor(rows)
            owners = torch.arange(len(rows), dtype=torch.int32)
            owners = owners.repeat_interleave(torch.tensor(counts))
        on_device = (table.to(data.device), owners.to(data.device))
        fault = kernels.decode_gaps(*on_device, data, places, bits, width, CHUNK_CODES)
        faults.append(fault)
    found = kernels.fault_of(faults)
    reference.demand(found is None, *(found or (0, "")))
