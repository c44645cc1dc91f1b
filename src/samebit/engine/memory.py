"""Device memory that can be given back and taken again at the same address.

A range of virtual addresses is reserved once; physical memory is put behind its beginning, in chunks,
and taken away again by the driver's virtual memory calls. So CUDA graphs that read the cache stay valid
while the trainer uses the memory, and nothing fragments: chunks need not be neighbours.
"""

from __future__ import annotations

import ctypes

import torch

CHUNK_BYTES = 64 << 20
"""Bytes behind one mapping (a multiple of the driver's 2 MB granularity)."""

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Reservation:
    """`reserved` bytes of addresses on a GPU, the first `mapped` of them with memory behind.

    `tensor`: uint8 over all of it; only the mapped part may be touched. OutOfMemoryError of torch
    when the driver has no memory left.
    """

    def __init__(self, reserved: int, device: torch.device):
        torch.cuda.init()
        self.device = torch.device("cuda", device.index or 0)
        torch.zeros(1, device=self.device)  # makes the device's context current
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.reserved = _round_up(reserved)
        self.mapped = 0
        self._handles: list[int] = []
        pointer = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(pointer), ctypes.c_size_t(self.reserved),
            ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self.pointer = int(pointer.value or 0)
        self.resize(1)
        self.tensor = torch.as_tensor(_Range(self.pointer, self.reserved), device=self.device)

    def resize(self, size: int) -> None:
        """Have memory behind at least the first `size` bytes, and behind none past their last chunk."""
        assert size <= self.reserved
        wanted = _round_up(size)
        if wanted < self.mapped:
            torch.cuda.synchronize(self.device)
        while self.mapped > wanted:
            self.mapped -= CHUNK_BYTES
            self._call(
                "cuMemUnmap", ctypes.c_uint64(self.pointer + self.mapped),
                ctypes.c_size_t(CHUNK_BYTES),
            )  # fmt: skip
            self._call("cuMemRelease", ctypes.c_uint64(self._handles.pop()))
        while self.mapped < wanted:
            self._grow()

    def _grow(self) -> None:
        where = _Location(_DEVICE, self.device.index)
        properties = _Properties(type=_PINNED, location=where)
        handle, at = ctypes.c_uint64(), ctypes.c_uint64(self.pointer + self.mapped)
        size = ctypes.c_size_t(CHUNK_BYTES)
        self._call(
            "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0)
        )
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(where, _READ_WRITE)
        self._call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handles.append(int(handle.value or 0))
        self.mapped += CHUNK_BYTES

    def close(self) -> None:
        """Give memory and addresses back; the tensor must not be touched any more."""
        self.resize(0)
        self._call(
            "cuMemAddressFree", ctypes.c_uint64(self.pointer), ctypes.c_size_t(self.reserved)
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == 2:
            raise torch.OutOfMemoryError(
                f"no device memory for the KV cache beyond {self.mapped >> 20} MB; set "
                "rollout.cache_tokens or rollout.max_batch lower"
            )
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


class _Range:
    """Device addresses as torch reads them."""

    def __init__(self, pointer: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


def _round_up(size: int) -> int:
    return -(-size // CHUNK_BYTES) * CHUNK_BYTES


def free_bytes(device: torch.device, enough: int) -> int:
    """Device memory that nobody holds; torch gives its unused blocks back first unless there is plenty.

    Plenty: twice `enough`. Giving back is not free: the next update has to take the blocks again.
    """
    free = torch.cuda.mem_get_info(device)[0]
    if free < 2 * enough:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    return free
