"""How waits for calls in flight end, and what they leave behind: polling, cancelling, callbacks, a lost connection."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
from helpers import Restartable, wait_for_state, wait_until, wait_until_watched
from subprocesses import run_script

import actorsub
from actorsub import ActorState, _core, _ray_compat, listeners, refs

Maker = Callable[..., Restartable]

PATIENCE_S = 60


def nap(_: Any, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def wait_until_gone(path: pathlib.Path) -> Callable[[Any], str]:
    """A call that runs until the file is there."""

    def run(_: Any) -> str:
        while not path.exists():
            time.sleep(0.005)
        return "done"

    return run


def test_polling_leaves_one_callback_for_each_ref(restartable: Maker, tmp_path: pathlib.Path) -> None:
    one = restartable(max_concurrency=8)
    gate = tmp_path / "open"
    pending = [one.handle.__ray_call__.remote(wait_until_gone(gate)) for _ in range(5)]
    for _ in range(200):
        ready, _ = actorsub.wait(pending, timeout=0.001)
        assert ready == []
        with pytest.raises(ray.exceptions.GetTimeoutError):
            actorsub.get(pending[0], timeout=0.0005)
    ids = {ref.binary() for ref in pending}
    # Where Ray says only that a value is there, a wait takes its callback back; else there is one for all waits.
    if _ray_compat.can_tell_ready():
        assert not refs._told_ready and not any(key in ids for key in refs._hubs)
    else:
        assert sum(key in ids for key in refs._hubs) == len(pending)
    assert not any(hub.parties for key, hub in refs._hubs.items() if key in ids)
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is refs._Gathering]
    gate.touch()
    assert actorsub.get(pending, timeout=PATIENCE_S) == ["done"] * 5
    wait_until(lambda: not ids & refs._hubs.keys())


def test_cancelled_awaits_leave_nothing(restartable: Maker, tmp_path: pathlib.Path) -> None:
    one = restartable()
    gate = tmp_path / "open"
    ref = one.handle.__ray_call__.remote(wait_until_gone(gate))

    async def run() -> None:
        for _ in range(50):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ref, 0.001)

    asyncio.run(run())
    assert ref.future().cancel()
    assert len(one.handle._actorsub_actor.parties) == 0
    gate.touch()
    assert actorsub.get(ref, timeout=PATIENCE_S) == "done"


def test_a_deadline_error_that_a_method_lets_out_certifies_nothing(restartable: Maker) -> None:
    """Its caller gets Ray's RayTaskError of the same class; the method did run."""
    one = restartable()

    def fail(_: Any) -> None:
        raise actorsub.DeadlineExceededError("of another call", sent=False, actor_id="ab" * 16)

    for get in (actorsub.get, ray.get):
        with pytest.raises(actorsub.DeadlineExceededError) as caught:
            get(one.handle.__ray_call__.remote(fail))
        assert isinstance(caught.value, ray.exceptions.RayTaskError)
        assert caught.value.sent is True


def test_stop_iteration_out_of_a_method_does_not_crash_the_loop(ray_local: None) -> None:
    out = run_script(
        """
        ray.init(**RAY_ARGS)

        @actorsub.remote(num_cpus=0)
        class Stops:
            def stop(self):
                raise StopIteration("over")

        handle = Stops.remote()

        async def run():
            try:
                await handle.stop.remote()
            except ray.exceptions.RayTaskError as error:
                print("RAISED", "StopIteration" in str(error))

        asyncio.run(run())
        """
    )
    assert "RAISED True" in out


def test_a_callback_cannot_block_the_thread_that_would_end_its_wait(restartable: Maker) -> None:
    one = restartable(on_unavailable="wait", timeout_s=PATIENCE_S)
    other = restartable(1.0)
    running = other.handle.__ray_call__.remote(nap, PATIENCE_S)
    said: list[BaseException] = []
    done = threading.Event()

    def callback(_: Any) -> None:
        for call in (lambda: one.handle.echo.remote(1), lambda: actorsub.get(running, timeout=PATIENCE_S)):
            try:
                call()
            except Exception as error:
                said.append(error)
        done.set()

    future = one.handle.__ray_call__.remote(nap, PATIENCE_S).future()
    future.add_done_callback(callback)
    os.kill(one.pid, signal.SIGKILL)
    assert done.wait(PATIENCE_S)
    refusal, misuse = said
    assert isinstance(refusal, actorsub.ActorUnavailableError)
    assert refusal.sent is False
    assert "callback" in str(refusal)
    assert isinstance(misuse, RuntimeError)
    # And the thread goes on doing its work for others.
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        actorsub.get(running, timeout=PATIENCE_S)
    assert caught.value.evidence != "call"


def test_listeners_hear_changes_in_order_whoever_noted_them(restartable: Maker) -> None:
    """One change comes from the sentinel, the next from Ray, while the thread that tells is busy elsewhere."""
    busy, watched = restartable(), restartable(max_restarts=0)
    heard: list[tuple[ActorState, ActorState]] = []
    greeted, entered, leave = threading.Event(), threading.Event(), threading.Event()

    def hold(_id: str, old: ActorState, _new: ActorState, _evidence: str | None) -> None:
        greeted.set()
        if old is ActorState.ALIVE:
            entered.set()
            leave.wait(PATIENCE_S)

    wait_until_watched(watched.handle)
    actorsub.on_state_change(watched.handle, lambda _id, old, new, _why: heard.append((old, new)))
    wait_until(lambda: heard)
    actorsub.on_state_change(busy.handle, hold)
    assert greeted.wait(PATIENCE_S)
    os.kill(busy.pid, signal.SIGKILL)
    assert entered.wait(PATIENCE_S)
    os.kill(watched.pid, signal.SIGKILL)
    # The sentinel changes the state although nobody tells it yet; Ray's word is read here.
    wait_for_state(watched.handle, ActorState.RESTARTING, ActorState.DEAD)
    wait_until(
        lambda: watched.handle._actorsub_actor.observe_ray() or actorsub.state(watched.handle) is ActorState.DEAD
    )
    leave.set()
    wait_until(lambda: heard[-1][1] is ActorState.DEAD)
    assert [old for old, _ in heard[1:]] == [new for _, new in heard[:-1]]


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_a_state_that_came_and_went_untold_is_told(restartable: Maker) -> None:
    """`shutdown()` ends the sentinel with what it has seen and nobody has taken in; its slots are changed all the same,
    and a group, say, has closed its line since."""
    one = restartable()
    heard: list[tuple[Any, Any, Any]] = []
    actorsub.on_state_change(one.handle, lambda _id, old, new, evidence: heard.append((old, new, evidence)))
    wait_until(lambda: heard)
    actorsub.shutdown()
    actor = one.handle._actorsub_actor
    before = len(heard)
    version = actor.told_version
    actor.changes.append((version + 2 & 0xFFFF, ActorState.RESTARTING, ActorState.ALIVE, "ray"))
    listeners.tell(actor)
    assert heard[before:] == [
        (ActorState.ALIVE, ActorState.RESTARTING, None),
        (ActorState.RESTARTING, ActorState.ALIVE, "ray"),
    ]
    actor.changes.append((version + 3 & 0xFFFF, ActorState.ALIVE, ActorState.ALIVE, "table"))
    listeners.tell(actor)
    assert len(heard) == before + 2


@pytest.mark.parametrize("spend", [time.sleep, work])
def test_a_look_that_once_takes_long_does_not_put_off_the_next(
    restartable: Maker, spend: Callable[[float], None]
) -> None:
    """Looks are rare where looking costs much; waiting (for the GIL, say) and what is done once are no such cost."""
    one = restartable()
    one.kill()
    heard: list[ActorState] = []
    actorsub.on_state_change(one.handle, lambda _id, _old, new, _why: heard.append(new))
    actor = one.handle._actorsub_actor
    # Between two reads of the table, whose ends have the watcher look again.
    wait_until(lambda: actor.read_interval_s > 0.5 and 0.1 < actor.next_read_s - _core.now_s() < 0.3)
    actorsub.on_state_change(one.handle, lambda _id, _old, new, _why: (spend(0.3), heard.append(new)))
    wait_until(lambda: len(heard) == 2)
    one.let_restart()
    wait_until(lambda: heard[2:3] == [ActorState.ALIVE], 10.0)


def test_waits_end_with_the_connection(ray_local: None) -> None:
    out = run_script(
        """
        ray.init(**RAY_ARGS)
        one = Restartable(pathlib.Path(tempfile.mkdtemp()))
        ref = one.handle.__ray_call__.remote(lambda _: time.sleep(600))
        ends = []

        def block():
            try:
                actorsub.get(ref)
            except actorsub.ActorUnavailableError as error:
                ends.append(("get", error.sent))

        def loop():
            async def run():
                try:
                    await ref
                except actorsub.ActorUnavailableError as error:
                    ends.append(("await", error.sent))
            asyncio.run(run())

        threads = [threading.Thread(target=block), threading.Thread(target=loop)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(one.handle._actorsub_actor.parties) == 2)
        ray.shutdown()
        for thread in threads:
            thread.join(30)
        print("ENDED", sorted(ends))
        """
    )
    assert "ENDED [('await', True), ('get', True)]" in out


def test_ray_can_be_shut_down_while_failed_refs_are_made_ahead(ray_local: None) -> None:
    """Ray's core ends the process when somebody is inside it after its shutdown."""
    out = run_script(
        """
        for number in range(3):
            ray.init(**RAY_ARGS)
            one = Restartable(pathlib.Path(tempfile.mkdtemp()))
            one.kill()
            refs = [one.handle.echo.remote() for _ in range(40)]
            ray.shutdown()
            print("DOWN", number)
        """
    )
    assert out.split().count("DOWN") == 3
