"""Daemon threads never keep a process alive: each submitted call runs once, and idle threads end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait
from functools import partial
from typing import Any

import patience
import pytest

import hybridkv.tiers.threads as module
from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread, DaemonPool

TIMEOUT_S = patience.seconds(6.0)


def test_every_call_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DaemonPool(3, "test-pool")
    futures = [pool.submit(divmod, number, 7) for number in range(200)]
    assert [future.result(TIMEOUT_S) for future in futures] == [divmod(number, 7) for number in range(200)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(TIMEOUT_S)
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
    assert pool.close(TIMEOUT_S)
    with pytest.raises(RuntimeError):
        pool.submit(abs, 1)


def test_at_most_max_threads_calls_run_at_once() -> None:
    pool, gate, begun = DaemonPool(2, "test-pool"), threading.Event(), threading.Semaphore(0)

    def work() -> int:
        begun.release()
        assert gate.wait(TIMEOUT_S)
        return threading.get_ident()

    futures = [pool.submit(work) for _ in range(5)]
    for _ in range(2):
        assert begun.acquire(timeout=TIMEOUT_S)
    assert not begun.acquire(timeout=0.05)
    assert not pool.close(0.0), "some calls still run"
    assert futures[-1].cancel()
    gate.set()
    wait(futures, TIMEOUT_S)
    assert len({future.result() for future in futures[:4]}) == 2
    assert pool.close(TIMEOUT_S)


def test_queued_calls_can_be_cancelled_at_shutdown() -> None:
    pool, gate, begun = DaemonPool(1, "test-pool"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return gate.wait(TIMEOUT_S)

    first, second = pool.submit(work), pool.submit(abs, 1)
    assert begun.wait(TIMEOUT_S)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    gate.set()
    assert first.result(TIMEOUT_S)


def test_idle_threads_end_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    pool = DaemonPool(4, "test-idle")
    for _ in range(3):
        assert pool.submit(abs, -1).result(TIMEOUT_S) == 1
        for thread in threading.enumerate():
            if thread.name == "test-idle":
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()


def test_no_thread_at_all_is_an_error_and_fewer_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate = DaemonPool(2, "test-pool"), threading.Event()
    first = pool.submit(gate.wait, TIMEOUT_S)
    with monkeypatch.context() as patched:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        second = pool.submit(abs, -1)
        with pytest.raises(RuntimeError, match="new thread"):
            DaemonPool(1, "test-pool").submit(abs, -1)
    gate.set()
    assert first.result(TIMEOUT_S) and second.result(TIMEOUT_S) == 1
    assert pool.close(TIMEOUT_S)


def test_a_call_that_never_returns_does_not_keep_a_process_alive() -> None:
    script = f"""
import threading
from hybridkv.tiers.threads import DaemonPool
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
DaemonPool(2, "stuck").submit(hang)
assert begun.wait({TIMEOUT_S})
"""
    path = "import sys; sys.path[:] = " + repr(sys.path)
    assert subprocess.run([sys.executable, "-c", path + script], check=False, timeout=TIMEOUT_S).returncode == 0


def test_a_background_thread_makes_calls_in_order_and_keeps_their_results() -> None:
    thread = BackgroundThread("test-thread")
    assert not thread.is_started and thread.wait_until_idle(0.0)
    outcomes = [thread.submit(partial(divmod, 1, divisor)) for divisor in (1, 0)]
    assert thread.wait_until_idle(TIMEOUT_S)
    [first, second] = outcomes
    assert first is not None and first.is_done and first.value == (1, 0)
    assert second is not None and isinstance(second.error, ZeroDivisionError)
    thread.close()
    assert thread.wait_until_ended(TIMEOUT_S)
    assert not thread.post(lambda: None) and thread.submit(lambda: None) is None


def test_a_call_that_was_accepted_during_a_close_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = BackgroundThread("test-thread")
    put = thread._queue.put_nowait

    def close_before_put(queued: Any) -> None:
        """Another thread closes before this call is queued, unless the lock makes it wait."""
        monkeypatch.setattr(thread._queue, "put_nowait", put)
        closing.start()
        if not thread._lock.locked():
            closing.join()
        put(queued)

    monkeypatch.setattr(thread._queue, "put_nowait", close_before_put)
    closing = threading.Thread(target=thread.close)
    outcome = thread.submit(lambda: 1)
    closing.join()
    assert thread.wait_until_ended(TIMEOUT_S)
    assert outcome is not None and outcome.value == 1


def test_a_background_thread_logs_a_bug_and_makes_delayed_calls_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    thread, made = BackgroundThread("test-thread"), list[str]()

    def fail() -> None:
        raise KeyError("a bug")

    assert thread.post(fail)
    assert thread.post(lambda: made.append("late"), 3600.0)
    assert thread.post(lambda: made.append("soon"), 0.001)
    assert thread.at_end(lambda: made.append("last"))
    thread.close()
    assert thread.wait_until_ended(TIMEOUT_S)
    assert sorted(made[:2]) == ["late", "soon"] and made[2:] == ["last"]
    assert "test-thread" in caplog.text
    assert not thread.at_end(lambda: made.append("never"))


def test_a_background_thread_starts_later_if_there_is_no_thread_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = BackgroundThread("test-thread", max_queued=0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            thread.post(lambda: None)
    assert not thread.is_started
    outcomes = [thread.submit(lambda: 1) for _ in range(3 * MAX_QUEUED)]
    thread.close()
    assert thread.wait_until_ended(TIMEOUT_S)
    assert all(outcome is not None and outcome.value == 1 for outcome in outcomes)
