"""The reservation's book of chunks against a driver that only remembers."""

from __future__ import annotations

import pytest
import torch

from samebit.engine import memory
from samebit.engine.memory import CHUNK_BYTES, Reservation


class Driver:
    """Keeps the mapped ranges; fails to create more than `most` chunks."""

    def __init__(self, most: int = 100):
        self.most, self.handles, self.mapped, self.readable = most, set(), {}, set()

    def cuMemAddressReserve(self, pointer, size, *_):
        pointer._obj.value, self.size = 1 << 40, size.value
        return 0

    def cuMemAddressFree(self, pointer, size):
        assert not self.mapped and not self.handles and size.value == self.size
        self.size = 0
        return 0

    def cuMemCreate(self, handle, size, properties, flags):
        if len(self.handles) == self.most:
            return 2
        assert size.value == CHUNK_BYTES and properties._obj.location.id == 0
        handle._obj.value = max(self.handles, default=0) + 1
        self.handles.add(handle._obj.value)
        return 0

    def cuMemMap(self, at, size, offset, handle, flags):
        assert at.value not in self.mapped and offset.value == 0
        self.mapped[at.value] = handle.value
        return 0

    def cuMemSetAccess(self, at, size, access, count):
        assert access._obj.flags == 3 and count.value == 1
        self.readable.add(at.value)
        return 0

    def cuMemUnmap(self, at, size):
        del self.mapped[at.value]
        self.readable.remove(at.value)
        return 0

    def cuMemRelease(self, handle):
        assert handle.value not in self.mapped.values(), "released while mapped"
        self.handles.remove(handle.value)
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: x)
    return found


def test_chunks_come_and_go_at_one_address(driver):
    held = Reservation(10 * CHUNK_BYTES - 5, torch.device("cuda"))
    base = 1 << 40
    interface = held.tensor.__cuda_array_interface__
    assert interface["data"] == (base, False) and interface["shape"] == (10 * CHUNK_BYTES,)
    assert sorted(driver.mapped) == [base] and held.mapped == CHUNK_BYTES
    held.resize(3 * CHUNK_BYTES + 1)
    assert sorted(driver.mapped) == [base + i * CHUNK_BYTES for i in range(4)]
    held.resize(2 * CHUNK_BYTES)
    assert sorted(driver.mapped) == [base, base + CHUNK_BYTES] == sorted(driver.readable)
    held.resize(0)
    assert not driver.mapped and not driver.handles and held.mapped == 0
    held.resize(1)
    assert sorted(driver.mapped) == [base]
    held.close()
    assert driver.size == 0


def test_out_of_memory_names_the_settings_and_keeps_the_book(driver):
    driver.most = 2
    held = Reservation(10 * CHUNK_BYTES, torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError, match=r"beyond 128 MB; set rollout\.cache_tokens"):
        held.resize(5 * CHUNK_BYTES)
    assert held.mapped == 2 * CHUNK_BYTES and len(driver.mapped) == 2
    held.close()


def test_other_errors_are_ours(driver):
    held = Reservation(4 * CHUNK_BYTES, torch.device("cuda"))
    driver.cuMemMap = lambda *_: 1
    with pytest.raises(RuntimeError, match="cuMemMap failed with CUDA error 1"):
        held.resize(2 * CHUNK_BYTES)
