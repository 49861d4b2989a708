"""The demo kills one rank, once, and says what that cost."""

import io
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from manta.api.demo.failure import Killed, NotRecovered, RankKiller, outcome_of
from manta.api.schemas import Rank, Recovery


@pytest.fixture
def process():
    """A process that may be killed."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def make_rank(number, pid):
    return Rank.model_validate(
        {"rank": number, "tensor": number % 2, "pipeline": 0, "data": number // 2, "context": 0, "node": "n",
         "pid": pid, "device": "cpu", "generation": 1, "state": "running"}
    )  # fmt: skip


def make_recovery(rank, at, total, kept=3, redone=1):
    return Recovery.model_validate(
        {"generation": 2, "time": at, "kind": "killed", "rank": rank, "node": "n", "cause": "was killed",
         "forked": [rank], "kept": kept, "source": "snapshot", "resume_step": 6, "steps_redone": redone,
         "wait_seconds": 0.0, "seconds": {}, "total_seconds": total}
    )  # fmt: skip


class Ranks:
    """Stands for a client; knows the ranks of one job."""

    def __init__(self, *ranks):
        self.asked, self._ranks = 0, list(ranks)

    def ranks(self, job_id):
        self.asked += 1
        return SimpleNamespace(items=self._ranks)


def test_rank_killer_kills_one_rank_once_when_its_step_is_reached(process):
    out = io.StringIO()
    client = Ranks(*(make_rank(number, process.pid if number == 3 else -1) for number in range(4)))
    killer = RankKiller(client, "job", 5, Console(file=out))
    for step in (0, 4):
        killer.poll(SimpleNamespace(step=step, steps=10))
    assert process.poll() is None and client.asked == 0
    killer.poll(SimpleNamespace(step=6, steps=10))
    assert process.wait(10) == -9
    assert (killer.killed.rank.rank, killer.killed.step, killer.killed.ranks) == (3, 6, 4)
    killer.poll(SimpleNamespace(step=7, steps=10))
    assert client.asked == 1, "only once"
    assert f"kill -9 {process.pid}: rank 3 (tensor 1, pipeline 0, data 1), after step 6" in out.getvalue()


def test_rank_killer_kills_nothing_while_the_rank_has_no_process(process):
    killer = RankKiller(Ranks(make_rank(0, None)), "job", 5, Console(file=io.StringIO()))
    killer.poll(SimpleNamespace(step=6, steps=10))
    assert killer.killed is None


def test_demo_failure_cost_is_the_time_from_the_kill_to_the_end_of_its_recovery():
    at = time.time()
    killed = Killed(make_rank(3, 1), 4, 6, at)
    cost = outcome_of([make_recovery(1, at - 9, 1.0), make_recovery(3, at + 0.25, 0.5)], killed)
    assert cost.seconds == pytest.approx(0.75, abs=1e-4)
    assert (cost.kept, cost.steps_redone) == (3, 1)


def test_demo_kill_without_a_finished_recovery_raises_not_recovered():
    killed = Killed(make_rank(3, 1), 4, 6, time.time())
    with pytest.raises(NotRecovered, match="rank 3 was killed"):
        outcome_of([make_recovery(1, killed.at, 1.0), make_recovery(3, killed.at, None)], killed)
