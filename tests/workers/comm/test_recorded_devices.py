"""What is recorded of a GPU is what it does, however far its host runs ahead."""

import pytest
import torch
from engine_specs import layout_of
from pretended_devices import Event, Gang, Network, no_thread

from manta.workers.comm.grid import RankGrid
from manta.workers.timing.recorder import DeviceMoments, Recorder


def test_recorded_collective_waits_are_on_the_device_and_not_on_the_host():
    """Two replicas: one computes for 1 s, the other for 3 s, and a sum takes 0.5 s more."""
    gang = Gang(RankGrid(layout_of(data=2)), Network(seconds=0.5))
    with no_thread():
        for comm, device, seconds in zip(gang.comms, gang.devices, (1.0, 3.0), strict=True):
            moments = DeviceMoments(lambda device=device: Event(device), lambda: None)
            comm.step.recorder = Recorder(1, 1, moments)
            comm.step.begin(1)
            comm.step.recorder.begin_step(1)
            with comm.step.phase("backward", 0, 0):
                device.queue("compute", seconds)
                comm.all_reduce("data", torch.zeros(4))
            device.queue("compute", 0.25)
            comm.step.recorder.end_step()
        gang.run()
    for comm, computed, waited in zip(gang.comms, (1.0, 3.0), (2.5, 0.5), strict=True):
        recording = comm.step.recorder.recording()
        backward, collective = recording.slices
        assert recording.device
        assert recording.steps[0].end - recording.steps[0].start == pytest.approx(computed + waited + 0.25)
        assert backward.end - backward.start == pytest.approx(computed + waited)
        assert (collective.axis, collective.bytes, collective.wait) == ("data", 16, None)
        assert collective.end - collective.start == pytest.approx(waited)
        assert collective.issued == pytest.approx(collective.start)
