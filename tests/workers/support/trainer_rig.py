"""A trainer process on a thread, with stand-ins for its engine and its communication, and the agent's end of its
socket."""

import json
import queue
import socket
import threading
import time
from types import SimpleNamespace

from manta.workers.comm.repair_self_test import RepairSelfTest
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import Progress
from manta.workers.protocol.messages import LaunchOrder
from manta.workers.protocol.reports import Report
from manta.workers.protocol.requests import Asked
from manta.workers.rank.control_socket import command_line
from manta.workers.rank.trainer_process import TrainerProcess

SECONDS = 20.0


class FakeComm:
    """Notes what it is told; the size of the world is that of the order's spec."""

    def __init__(self, order, progress):
        self.rank, self.progress = order.rank, progress if progress is not None else Progress()
        self.world, self.generation = order.spec.get("world", 1), 0
        self.ended, self.closed, self.forgotten, self.connected, self.breaks = [], 0, 0, [], 0
        self.repair = order.spec.get("repair") and RepairSelfTest(**order.spec["repair"])
        self.ends = queue.SimpleQueue()
        self.step = SimpleNamespace(on_phase=None)

    def size(self, axis):
        return self.world

    def connect(self, store, generation, host, secret):
        self.connected.append((store, generation, host, secret))

    def end(self, generation):
        self.ended.append(generation)
        self.ends.put(generation)

    def until_asked(self, **what):
        """Wait until the process that this belongs to is asked for that in the present generation."""
        deadline = time.monotonic() + SECONDS
        while self.requests.of(self.generation) != Asked(**what):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self):
        self.closed += 1

    def forget(self):
        self.forgotten += 1

    def try_repair(self, store, generation):
        self.connected.append(("tries repair", store, generation))
        return self.repair

    def break_connections(self):
        self.breaks += 1


class FakeTrainer:
    """Each call of `train` is one of `acts`."""

    def __init__(self, comm, reporter, acts):
        self.comm, self.reporter, self._acts = comm, reporter, acts
        self.step, self.settled_step, self.ends_early = 0, None, False
        self.restored, self.rests, self.closed = [], 0, False
        self.clock = SimpleNamespace(lap=lambda: {"wall": 0.5})

    def restore(self, resume, roll_backs):
        self.restored.append((resume, roll_backs))
        self.step = resume.step

    def train(self):
        self._acts.pop(0)(self)

    def rest(self):
        self.rests += 1

    def close(self):
        self.closed = True


def finish(trainer):
    """Be at the last step."""
    trainer.step = 10


def lose_peer(trainer):
    """Find a peer gone behind step 4."""
    trainer.step = trainer.settled_step = 4
    raise PeerLost("rank 1 is gone")


class Rig:
    """A trainer process on a thread, and the agent's end of its control socket."""

    def __init__(self, *acts):
        self.acts, self.built = list(acts), []
        self.hung_up = threading.Event()
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(SECONDS)
        self._lines = self._ours.makefile("rb")

    def build(self, order, progress, reporter):
        """In place of the engine."""
        comm = FakeComm(order, progress)
        self.built.append(FakeTrainer(comm, reporter, self.acts))
        return comm, self.built[-1]

    def start(self, order, prepare=False):
        """Let it run beside the test."""
        self.process = TrainerProcess(order, self._theirs, self.build, self.hung_up.set)
        self.status = None

        def run():
            self.status = self.process.run(prepare)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def say(self, command):
        """As the agent."""
        self._ours.sendall(command_line(command))

    def hear(self, skipped=0):
        """The next report, after so many others."""
        for _ in range(skipped):
            self._lines.readline()
        return Report.from_json(json.loads(self._lines.readline()))

    def ended(self):
        """Its exit status."""
        self._thread.join(SECONDS)
        return self.status

    def hang_up(self):
        """As the agent's death does."""
        self._lines.close()
        self._ours.close()

    def close(self):
        self.hang_up()
        assert self.hung_up.wait(SECONDS)
        self._theirs.close()


def order(generation=1, rank=3, **changes):
    """What an agent starts a rank with."""
    return LaunchOrder("job-1", generation, rank, **{"spec": {}, **changes})
