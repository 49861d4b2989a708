"""Copies in host memory are of the last two states that were kept, whatever became of the state since."""

import pytest
import torch

from workers.snapshot.host_copies import HostCopies


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


def test_the_oldest_makes_room_and_each_is_loaded_as_it_was_with_its_note(copies):
    for step in (1, 2, 3):
        keep(copies, step)
    assert copies.steps == [2, 3]
    for step in (2, 3, 2):
        assert copies.load(step) == f"note of {step}"
        assert all((tensor == step).all() for tensor in copies.state)


def test_what_was_forgotten_is_not_loaded_and_makes_room_first(copies):
    keep(copies, 1)
    keep(copies, 2)
    copies.forget(2)
    with pytest.raises(KeyError):
        copies.load(2)
    keep(copies, 3)
    assert copies.steps == [1, 3]
