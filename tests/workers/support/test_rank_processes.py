"""The tests' own ranks: a failure carries its traceback, a hang ends, and the next run starts afresh."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from engine_specs import document, layout_of
from rank_processes import RankFailure, meet
from rank_programs import fail_on_rank_one, hang, initial_parameters


def test_rank_failure_shows_the_traceback_of_the_rank_that_failed(ranks):
    with pytest.raises(RankFailure, match="RuntimeError: rank one was told to fail"):
        ranks.run(layout_of(data=4), fail_on_rank_one)


def test_rank_processes_that_hang_are_ended_with_their_stacks(ranks, tmp_path, monkeypatch):
    def nobody(waiting, deadline):
        """Has ended when the time is over, which is once both stand."""
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return []

    monkeypatch.setattr("manta.workers.liveness.stacks._ANSWER_SECONDS", 30.0)
    with monkeypatch.context() as patch, pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not end") as caught:
        patch.setattr(ranks, "_ready", nobody)
        ranks.run(layout_of(pipeline=2), hang, str(tmp_path))
    assert "in hang" in str(caught.value)
    assert "links.py" in str(caught.value)
    assert len(ranks.run(layout_of(pipeline=2), initial_parameters, document(parallel={"pipeline": 2}))) == 2


def test_rank_processes_start_only_when_all_have_connected():
    """Whoever leaves before would be a lost peer to the others."""
    store, begun = dist.HashStore(), []
    first = threading.Thread(target=lambda: begun.append(meet(store, 0, 2)))
    first.start()
    store.wait(["0"])
    assert begun == []
    meet(store, 1, 2)
    first.join(20)
    assert begun == [None]
