"""The structs of NCCL, laid out as its header says; no GPU is needed for that."""

from __future__ import annotations

import ctypes

from vllm.inflight.transport.collective import nccl_api

# offsetof() of each field in nccl.h 2.27.5, x86-64; later headers append fields.
OFFSETS = {
    "size": 0,
    "magic": 8,
    "version": 12,
    "blocking": 16,
    "cgaClusterSize": 20,
    "minCTAs": 24,
    "maxCTAs": 28,
    "netName": 32,
    "splitShare": 40,
    "trafficClass": 44,
}


def test_the_config_is_laid_out_as_in_the_header():
    found = {name: getattr(nccl_api.Config, name).offset for name, _ in _fields()}
    assert found == OFFSETS
    assert ctypes.sizeof(nccl_api.Config) == 48


def test_the_config_ends_without_padding_that_nccl_would_read():
    last, kind = _fields()[-1]
    end = getattr(nccl_api.Config, last).offset + ctypes.sizeof(kind)
    assert end == ctypes.sizeof(nccl_api.Config)


def test_the_config_asks_for_a_communicator_that_does_not_block():
    config = nccl_api.config(22705, max_ctas=8)
    assert (config.size, config.magic, config.version) == (48, 0xCAFEBEEF, 22705)
    assert (config.blocking, config.minCTAs, config.maxCTAs) == (0, 1, 8)
    assert config.netName is None
    # Where the other rank is torch's: ranks whose bounds differ cannot connect.
    unbounded = nccl_api.config(22705)
    assert unbounded.minCTAs == unbounded.maxCTAs == nccl_api.UNDEFINED
    assert config.cgaClusterSize == config.trafficClass == -(2**31)


def test_a_unique_id_survives_its_way_through_the_store():
    sent = bytes(range(128))
    unique = nccl_api.UniqueId.from_buffer_copy(bytes.fromhex(sent.hex()))
    assert ctypes.sizeof(unique) == 128
    assert bytes(unique) == sent


def _fields():
    return nccl_api.Config._fields_
