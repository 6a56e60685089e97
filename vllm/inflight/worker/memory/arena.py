"""The memory that holds live and shadow weights, and the flip between them.

    with arena.loading():        # tensors made here lie in the arena
        model = load()
    arena.consolidate()          # few handles; no tensor moves
    arena.pair()                 # the shadow range, with equal bytes
    ...                          # then for every update:
    arena.shadow_tensor(t).copy_() #   write the shadow weights
    seconds = arena.flip()       #   the live addresses show the new weights
    arena.settle()               #   the shadow range shows the old ones
    arena.unpair()               # sleep: the memory is given back,
    arena.suspend()              #   the addresses stay,
    arena.resume()               #   and get memory again; then `pair`

Between `flip` and `settle` the shadow range shows the live weights. A write to a shadow
tensor would then change the weights in use, so `shadow_tensor` raises. A second `flip`
instead of `settle` is a rollback. On the host, the memory is memory files, for tests.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import ArenaFault, ArenaTorn, ConfigError, OutOfDeviceMemory

HOST_RESERVE_BYTES = 1 << 30
RESERVES_PER_MEMORY = 4
"""Reserved addresses, as a multiple of the GPU's memory; no address is used twice."""


class Arena:
    """The arena of one device; open it before the model is loaded."""

    def __init__(self, device: torch.device, core: Any, handle: int) -> None:
        self.device = device
        self._core = core
        self._handle = handle
        self._pools: list[torch.cuda.MemPool] = []
        self._loading = False

    @classmethod
    def open(cls, device: torch.device, reserve_bytes: int | None = None) -> Arena:
        """Open an empty arena that holds at most `reserve_bytes` in its whole life.

        Raises:
            ConfigError: torch would not take its segments from the arena.

        """
        core = ops.native_core()
        number, enough = -1, HOST_RESERVE_BYTES
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            enough = RESERVES_PER_MEMORY * properties.total_memory
            number = device.index
            number = torch.cuda.current_device() if number is None else number
            device = torch.device("cuda", number)
            snapshot: Any = torch.cuda.memory._snapshot()
            refuse_expandable_segments(snapshot["allocator_settings"])
        with _translated(device):
            return cls(device, core, core.arena_open(number, reserve_bytes or enough))

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Place the device tensors that this thread makes in the arena.

        Tensors that other threads make are not placed in it. Check with `contains`.
        """
        if self._loading:
            raise RuntimeError("loading is under way in this arena; it does not nest")
        self._loading = True
        try:
            if self.device.type == "cpu":
                yield
                return
            self._core.arena_fill(self._handle)
            with torch.cuda.device(self.device):
                pool = torch.cuda.MemPool(_allocator(self._core.__file__).allocator())
            atexit.register(self._release_pools)  # more than once does no harm
            # A pool is never entered twice: it would hand out the memory dropped below.
            self._pools.append(pool)
            try:
                with torch.cuda.use_mem_pool(pool, device=self.device):
                    yield
            except torch.cuda.OutOfMemoryError as error:
                error.add_note(f"the arena says: {self.stats()['last_error']}")
                raise
            self._drop_idle(pool)
        finally:
            self._loading = False

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A tensor in a segment of its own, freed with it; on the host only."""
        if self.device.type != "cpu":
            raise RuntimeError(f"on {self.device} tensors are made inside loading()")
        numel = math.prod(shape)
        num_bytes = max(1, numel) * dtype.itemsize
        with _translated(self.device):
            address = self._core.arena_allocate(self._handle, num_bytes)
        buffer = _host_buffer(address, num_bytes, self)
        gone = weakref.finalize(buffer, self._core.arena_free, self._handle, address)
        gone.atexit = False
        return torch.frombuffer(buffer, dtype=dtype)[:numel].view(tuple(shape))

    def consolidate(self) -> None:
        """Merge the memory into few handles; needs spare room for the largest run."""
        self._make_room()
        with _translated(self.device):
            self._core.arena_consolidate(self._handle)

    def pair(self) -> None:
        """Give the shadow range memory, with the bytes of the live range."""
        self._make_room()
        with _translated(self.device):
            self._core.arena_pair(self._handle)

    def unpair(self) -> None:
        """Free the shadow weights' memory; shadow tensors wait for the next `pair`."""
        with _translated(self.device):
            self._core.arena_unpair(self._handle)

    def suspend(self) -> None:
        """Free the live weights' memory, and lose their bytes; the addresses stay."""
        with _translated(self.device):
            self._core.arena_suspend(self._handle)

    def resume(self) -> None:
        """Back the same addresses with memory again; the content is undefined."""
        self._make_room()
        with _translated(self.device):
            self._core.arena_resume(self._handle)

    def flip(self) -> float:
        """Exchange live and shadow weights at the live addresses; returns the seconds.

        The caller must have waited for all work that reads the weights.
        """
        with _translated(self.device):
            return self._core.arena_flip(self._handle)

    def settle(self) -> None:
        """Let the shadow range, at rest since the flip, show the shadow weights."""
        with _translated(self.device):
            self._core.arena_settle(self._handle)

    def shadow_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in the shadow range, whichever weights the range shows."""
        place = (self._handle, tensor.data_ptr(), extent(tensor))
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        with _translated(self.device):
            try:
                address, num_bytes, offset = self._core.arena_shadow_address(*place)
            except ValueError:
                raise ValueError(
                    f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on "
                    f"{tensor.device} does not lie in the arena; it was not made "
                    "inside loading(), or another thread made it"
                ) from None
        data = self.bytes_at(address, num_bytes)
        start, rest = divmod(offset, tensor.element_size())
        assert rest == 0  # runs are aligned, and torch aligns elements
        made = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return made.set_(data.untyped_storage(), start, tensor.size(), tensor.stride())

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """The memory at an address of either range, as bytes; it must be backed."""
        if self.device.type == "cpu":
            buffer = _host_buffer(address, num_bytes, self)
            return torch.frombuffer(buffer, dtype=torch.uint8)
        cuda_buffer = _CudaBuffer(address, num_bytes, self)
        return torch.as_tensor(cuda_buffer, device=self.device)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the whole tensor lies in the live range, under one handle."""
        place = (self._handle, tensor.data_ptr(), extent(tensor))
        return tensor.numel() == 0 or self._core.arena_contains(*place)

    @property
    def phase(self) -> str:
        """`loading`, `consolidated`, `paired`, `suspended`, `torn` or `closed`."""
        return self.stats()["phase"]

    def runs(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each handle, within a range."""
        return self._core.arena_runs(self._handle)

    def stats(self) -> dict[str, Any]:
        """`phase`, `settled`, `base`, `num_handles`, `backed_bytes` and others."""
        return self._core.arena_stats(self._handle)

    def close(self) -> None:
        """Free all memory; may be called twice. Waits for all work of the device.

        No tensor of the arena, live or shadow, may be touched afterwards.
        """
        self._release_pools()
        atexit.unregister(self._release_pools)
        with _translated(self.device):
            self._core.arena_close(self._handle)

    def _drop_idle(self, pool: torch.cuda.MemPool) -> None:
        # torch's cache keeps the memory that loading has freed, and nobody will use it.
        gc.collect()
        torch.cuda.synchronize(self.device)
        idle = [one["address"] for one in pool.snapshot() if not one["allocated_size"]]
        with _translated(self.device):
            for address in idle:
                if self._core.arena_contains(self._handle, address, 1):
                    self._core.arena_drop(self._handle, address)

    def _make_room(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _release_pools(self) -> None:
        # Released while their allocator lives. At process exit the allocator may be
        # destroyed first, and a pool without an allocator aborts the process.
        self._pools.clear()


def refuse_expandable_segments(settings: dict[str, Any]) -> None:
    """Raise `ConfigError` if torch would not take its segments from the arena."""
    if settings.get("expandable_segments"):
        raise ConfigError(
            "shadow weights on the device and expandable segments exclude "
            "each other; take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF "
            "(or PYTORCH_ALLOC_CONF)"
        )


@functools.cache
def _allocator(library: str) -> Any:
    """torch's interface to the arena's C functions; lives as long as the process."""
    return torch.cuda.memory.CUDAPluggableAllocator(
        library, "inflight_arena_malloc", "inflight_arena_free"
    )


class _CudaBuffer:
    """Device memory that torch imports; a tensor over it keeps the arena alive."""

    def __init__(self, address: int, num_bytes: int, arena: Arena) -> None:
        self.arena = arena
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _host_buffer(address: int, num_bytes: int, arena: Arena) -> Any:
    """Host memory that torch imports; a tensor over it keeps the arena alive."""
    buffer: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    buffer.arena = arena
    return buffer


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()


@contextmanager
def _translated(device: torch.device) -> Iterator[None]:
    """Turn errors of the native arena into our error classes."""
    core = ops.native_core()
    try:
        yield
    except core.ArenaError as error:
        message, kind, call, code, missing = error.args
        if kind == "out_of_memory":
            raise OutOfDeviceMemory(
                f"{device} lacks {missing / 2**30:.2f} GiB: {message}",
                missing_bytes=missing,
            ) from None
        fault = ArenaTorn if kind == "torn" else ArenaFault
        raise fault(f"{device}: {message}", call=call, driver_code=code) from None
