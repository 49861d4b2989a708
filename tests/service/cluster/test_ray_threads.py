"""Calls that may hang have threads of their own: a few, which are given back when the call returns."""

import threading

from manta.service.cluster.connection import RayThreads

SECONDS = 20.0


def test_ray_threads_are_bounded_and_answer_every_call():
    threads = RayThreads(2)
    calls = [threads.submit(threading.current_thread) for _ in range(5)]
    assert {call.result(SECONDS).name for call in calls} <= {"ray-0", "ray-1"}
    assert len(threads._started) == 2


def test_threads_hang_once_all_of_their_calls_are_given_up_and_until_one_returns():
    threads, go_on, begun = RayThreads(2), threading.Event(), threading.Semaphore(0)

    def hang():
        begun.release()
        assert go_on.wait(SECONDS)

    calls = [threads.submit(hang) for _ in range(2)]
    try:
        assert all(begun.acquire(timeout=SECONDS) for _ in calls)
        waiting = threads.submit(lambda: "never begun")
        threads.give_up(waiting)
        threads.give_up(calls[0])
        assert waiting.cancelled() and not threads.all_hang, "a call that is not begun takes no thread"
        threads.give_up(calls[1])
        assert threads.all_hang
    finally:
        go_on.set()
    after = threads.submit(lambda: "answered")
    assert after.result(SECONDS) == "answered"
    assert not threads.all_hang
