"""Copies in host memory are of the last two states that were kept, whatever became of the state since."""

import mmap
import threading

import pytest
import torch

from manta.workers.snapshot import state_copy
from manta.workers.snapshot.state_copy import HostCopies


@pytest.fixture
def copies():
    kept = HostCopies([torch.zeros(3), torch.zeros(2)])
    yield kept
    kept.close()


def keep(copies, step):
    for tensor in copies.state:
        tensor.fill_(step)
    copies.start(step, f"note of {step}")
    copies.finish()


def test_two_newest_copies_are_kept_and_loaded_with_their_notes(copies):
    for step in (1, 2, 3):
        keep(copies, step)
    assert copies.steps == [2, 3]
    for step in (2, 3, 2):
        assert copies.load(step) == f"note of {step}"
        assert all((tensor == step).all() for tensor in copies.state)


def test_forgotten_copy_cannot_be_loaded_and_is_replaced_first(copies):
    keep(copies, 1)
    keep(copies, 2)
    copies.forget(2)
    with pytest.raises(KeyError):
        copies.load(2)
    keep(copies, 3)
    assert copies.steps == [1, 3]
    keep(copies, 3)
    assert copies.steps == [1, 3], "a step that is kept again takes no room but its own"


def test_host_copies_keep_dtype_and_bits():
    state = [torch.tensor([1.0 + 2**-40, -0.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.bfloat16)]
    before, copies = [tensor.clone() for tensor in state], HostCopies(state)
    copies.start(1, "note")
    copies.finish()
    for tensor in state:
        tensor.zero_()
    copies.load(1)
    assert all(torch.equal(now, then) for now, then in zip(state, before, strict=True))
    assert [tensor.dtype for slot in copies._slots for tensor in slot.tensors] == [torch.float64, torch.bfloat16]
    copies.close()


def test_host_copies_reuse_the_memory_that_they_took_first(copies):
    for step in (1, 2):
        keep(copies, step)
    places = {tensor.data_ptr() for slot in copies._slots for tensor in slot.tensors}
    for step in (3, 4, 5):
        keep(copies, step)
    assert {tensor.data_ptr() for slot in copies._slots for tensor in slot.tensors} == places


@pytest.mark.parametrize("closed", [True, False])
def test_memory_of_copies_is_pinned_whole_and_released_before_it_is_freed(monkeypatch, closed):
    registered = {}

    class Noted:
        def __init__(self, memory, on_gpu):
            self.address = memory.data_ptr()
            registered[self.address] = (memory.untyped_storage().nbytes(), on_gpu)

        def release(self):
            registered.pop(self.address, None)

    monkeypatch.setattr(state_copy, "PinnedMemory", Noted)
    copies = HostCopies([torch.zeros(33), torch.zeros(5, dtype=torch.bfloat16)])
    keep(copies, 1)
    keep(copies, 2)
    assert list(registered.values()) == [(192 + 64, False)] * 2
    assert all(address % mmap.PAGESIZE == 0 for address in registered)
    if closed:
        copies.close()
    else:
        copies._copier.close()
        del copies
    assert not registered


def test_a_copy_that_is_under_way_is_waited_for_before_it_is_used_or_forgotten(copies):
    go_on = threading.Event()
    copies._copier._thread.submit(go_on.wait, 30)
    copies.state[0].fill_(1)
    copies.start(1, "note")
    loading = threading.Thread(target=copies.load, args=(1,))
    loading.start()
    go_on.set()
    loading.join(30)
    assert copies._copier._copying is None
    copies.start(2, "note")
    copies.forget(2)
    assert copies._copier._copying is None
    assert copies.steps == [1]


def test_closed_host_copies_accept_no_further_copy():
    copies = HostCopies([torch.zeros(3)])
    copies.start(1, "note")
    copies.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        copies._copier.start(copies.state, lambda ready: None)


def test_copy_that_fails_midway_discards_the_step_that_it_was_replacing(copies, monkeypatch):
    keep(copies, 1)
    keep(copies, 2)

    def fail(state, copy):
        copy(None)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(copies._copier, "start", fail)
    with pytest.raises(RuntimeError):
        copies.start(3, "note of 3")
    assert copies.steps == [2]
