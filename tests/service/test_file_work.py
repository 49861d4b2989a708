"""Work on files that do not answer is waited for only so long, by nobody twice, and holds up no other."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from manta.service.control import file_work
from manta.service.control.file_work import FileWork, ServiceEnds, StillRunning, TooManyRunning

SECONDS = 60.0


@pytest.fixture
def hang():
    """Work that ends with the test. `begun(times)`: the threads on which it has begun, once these are so many."""
    answers, threads, changed = threading.Event(), [], threading.Condition()

    def work():
        with changed:
            threads.append(threading.current_thread())
            changed.notify_all()
        assert answers.wait(SECONDS)
        return "done"

    def begun(times):
        with changed:
            assert changed.wait_for(lambda: len(threads) >= times, SECONDS)
        return threads

    work.begun, work.answer = begun, answers.set
    yield work
    answers.set()


def test_file_work_continues_after_its_caller_timed_out(hang):
    work = FileWork()
    for _ in range(3):
        with pytest.raises(StillRunning, match=r"^that takes longer than 0.01 s$"):
            work.run("a job", 0.01, hang)
    (thread,) = hang.begun(1)
    assert thread.daemon
    assert work.run("another", SECONDS, lambda: "at once") == "at once"
    hang.answer()
    assert work.run("a job", SECONDS, hang) == "done"


def test_file_work_error_is_raised_to_its_caller_and_the_next_call_starts_anew():
    def fail():
        raise TimeoutError("the system's own")

    work = FileWork()
    with pytest.raises(TimeoutError, match="the system's own"):
        work.run("a job", SECONDS, fail)
    assert work.run("a job", SECONDS, lambda: 7) == 7


def test_file_work_refuses_new_work_while_all_places_hang(hang, monkeypatch):
    monkeypatch.setattr(file_work, "MAX_THREADS", 2)
    work = FileWork()
    for about in ("one", "another"):
        with pytest.raises(StillRunning):
            work.run(about, 0.01, hang)
    with pytest.raises(TooManyRunning, match=r"^2 others were under way for 0.01 s$"):
        work.run("one more", 0.01, hang)
    assert len(hang.begun(2)) == 2
    hang.answer()
    assert [work.run(about, SECONDS, hang) for about in ("one", "another", "one more")] == ["done"] * 3


def test_file_work_beyond_its_places_waits_for_one(monkeypatch):
    monkeypatch.setattr(file_work, "MAX_THREADS", 2)
    work, at_once, most = FileWork(), [], []

    def briefly():
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()
        return "done"

    with ThreadPoolExecutor(12) as requests:
        assert set(requests.map(lambda about: work.run(about, SECONDS, briefly), range(12))) == {"done"}
    assert len(most) == 12 and max(most) <= 2


def test_file_work_waiting_for_a_place_ends_with_the_service(hang, monkeypatch):
    monkeypatch.setattr(file_work, "MAX_THREADS", 1)
    work = FileWork()
    with pytest.raises(StillRunning):
        work.run("one", 0.01, hang)
    with ThreadPoolExecutor(1) as requests:
        waiting = requests.submit(work.run, "another", SECONDS, hang)
        work.close()
        with pytest.raises(ServiceEnds):
            waiting.result(SECONDS / 2)
    assert len(hang.begun(1)) == 1


def test_file_work_callers_are_released_when_the_service_ends(hang):
    work, said = FileWork(), []

    def wait():
        with pytest.raises(ServiceEnds) as raised:
            work.run("a job", SECONDS, hang)
        said.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    work.close()
    waiting.join(SECONDS)
    work.close()
    assert said == ["the service is ending"]
