"""What `.remote()` does while the actor cannot take calls: every policy, with real kills and real restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import ray
from helpers import Restartable, wait_for_state, wait_until

import actorsub
from actorsub import ActorState

Maker = Callable[..., Restartable]


def test_raise_refuses_at_once_and_certifies(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")
    one.kill()
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        one.handle.record.remote("never")
    error = caught.value
    assert isinstance(error, ray.exceptions.ActorUnavailableError)
    assert error.sent is False
    assert error.state is ActorState.RESTARTING
    assert error.evidence in ("ray", "table", "process", "connection")
    assert error.actor_id == one.handle._actor_id.hex()
    assert error.preempted is False
    assert error.actor_init_failed is False
    assert "is restarting" in str(error)
    assert "cannot have run" in str(error)
    one.restart()
    assert one.ledger == []


def test_the_incarnation_is_rays_restart_count(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")
    wait_until(lambda: actorsub.stats(one.handle)["incarnation"] == 0)
    for incarnation in (1, 2):
        one.kill()
        with pytest.raises(actorsub.ActorUnavailableError) as caught:
            one.handle.echo.remote()
        assert caught.value.incarnation == incarnation
        one.restart()
        wait_until(lambda n=incarnation: actorsub.stats(one.handle)["incarnation"] == n)


def test_ref_is_a_real_ref_that_has_failed(restartable: Maker) -> None:
    one = restartable()
    one.kill()
    ref = one.handle.echo.remote(1)
    assert isinstance(ref, ray.ObjectRef)
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        ray.get(ref, timeout=10)
    assert caught.value.sent is False
    assert caught.value.state is ActorState.RESTARTING
    assert caught.value.actor_id == one.handle._actor_id.hex()

    async def by_await() -> None:
        await ref

    with pytest.raises(actorsub.ActorUnavailableError):
        asyncio.run(by_await())
    with pytest.raises(actorsub.ActorUnavailableError):
        ref.future().result(timeout=10)
    one.restart()
    # A ref that failed stays failed; a new call works.
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(ref, timeout=10)
    assert ray.get(one.handle.echo.remote(2), timeout=30) == 2


def test_a_failed_ref_passes_into_tasks(restartable: Maker) -> None:
    one = restartable()

    @ray.remote(num_cpus=0)
    def take(value: object) -> object:
        return value

    @ray.remote(num_cpus=0)
    def take_nested(refs: list[ray.ObjectRef]) -> tuple[str, bool]:
        try:
            ray.get(refs[0])
        except actorsub.ActorUnavailableError as error:
            return type(error).__name__, error.sent
        return "no error", True

    one.kill()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(take.remote(one.handle.echo.remote()), timeout=30)
    assert isinstance(caught.value, ray.exceptions.ActorUnavailableError)
    assert ray.get(take_nested.remote([one.handle.echo.remote()]), timeout=30) == (
        "ActorUnavailableError",
        False,
    )


def test_a_refusal_has_the_shape_of_the_call(restartable: Maker) -> None:
    one = restartable()
    one.kill()
    handle = one.handle
    assert handle.echo.options(num_returns=0).remote() is None
    refs = handle.pair.options(num_returns=2).remote()
    assert isinstance(refs, list)
    assert len(set(refs)) == 2
    for ref in refs:
        with pytest.raises(actorsub.ActorUnavailableError):
            ray.get(ref, timeout=10)
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(handle.stream.options(num_returns="dynamic").remote(), timeout=10)
    stream = handle.stream.remote(3)
    assert isinstance(stream, ray.ObjectRefGenerator)
    assert not stream.is_finished()
    items = list(stream)
    assert len(items) == 1
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(items[0], timeout=10)
    assert stream.is_finished()

    async def by_async_for() -> list[ray.ObjectRef]:
        return [ref async for ref in handle.stream.remote(3)]

    items = asyncio.run(by_async_for())
    assert len(items) == 1
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(items[0], timeout=10)


def test_wrong_arguments_raise_also_while_refused(restartable: Maker) -> None:
    one = restartable()
    one.kill()
    with pytest.raises(TypeError, match="too many positional arguments"):
        one.handle.echo.remote(1, 2, 3)
    with pytest.raises(TypeError, match="unknown option 'nonsense'"):
        one.handle.echo.options(nonsense=1)
    with pytest.raises(AttributeError):
        one.handle.no_such_method  # noqa: B018


def test_wait_runs_once_after_the_restart(restartable: Maker) -> None:
    one = restartable(on_unavailable="wait", timeout_s=30)
    one.kill()
    done: list[str] = []

    def call() -> None:
        done.append(ray.get(one.handle.record.remote("waited"), timeout=30))

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: one.handle._actorsub_actor.waiters, what="the call waits")
    assert one.ledger == []
    one.let_restart()
    thread.join(30)
    assert done == ["waited"]
    assert one.ledger == ["waited"]
    assert actorsub.stats(one.handle)["waited"] == 1


def test_wait_that_runs_out_of_time_never_runs(restartable: Maker) -> None:
    one = restartable(on_unavailable="wait", timeout_s=0.3)
    one.kill()
    begin = time.monotonic()
    with pytest.raises(actorsub.DeadlineExceededError) as caught:
        one.handle.record.remote("late")
    took = time.monotonic() - begin
    assert 0.3 <= took < 5
    assert caught.value.sent is False
    assert caught.value.state is ActorState.RESTARTING
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, ray.exceptions.GetTimeoutError)
    one.restart()
    ray.get(one.handle.record.remote("after"), timeout=30)
    assert one.ledger == ["after"]


def test_wait_on_an_event_loop_thread_raises_at_once(restartable: Maker) -> None:
    one = restartable(on_unavailable="wait", timeout_s=30)
    one.kill()

    async def call() -> None:
        one.handle.echo.remote()

    begin = time.monotonic()
    with pytest.raises(actorsub.ActorUnavailableError, match=r"\.call\(\)") as caught:
        asyncio.run(call())
    assert time.monotonic() - begin < 5
    assert caught.value.sent is False
    assert actorsub.stats(one.handle)["refused"]["event_loop"] == 1


def test_waiting_ends_when_the_actor_dies(restartable: Maker) -> None:
    one = restartable(on_unavailable="wait")
    one.kill()
    caught: list[BaseException] = []

    def call() -> None:
        try:
            one.handle.echo.remote()
        except actorsub.ActorDiedError as error:
            caught.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(one.handle._actorsub_actor.waiters) == 4)
    ray.kill(one.handle)
    for thread in threads:
        thread.join(30)
    assert len(caught) == 4
    assert all(not error.sent and "ray.kill" in str(error) for error in caught)


def test_a_waiting_call_costs_no_retry(restartable: Maker) -> None:
    """A6 of Ray issue 44719: retries are for calls that were sent."""
    one = restartable(on_unavailable="wait", timeout_s=30, max_task_retries=1)
    attempts = one.directory / "attempts"
    one.kill()

    def die_first(worker: object, path: str) -> int:
        import os
        import pathlib

        file = pathlib.Path(path)
        count = len(file.read_text()) if file.exists() else 0
        file.write_text("x" * (count + 1))
        if count == 0:
            os._exit(1)
        return count + 1

    threading.Timer(0.3, one.let_restart).start()
    # Waits for the restart, dies in its first run, and has its one retry left for that.
    ref = one.handle.__ray_call__.remote(die_first, str(attempts))
    assert ray.get(ref, timeout=60) == 2


def test_dead_raises_rays_cause_or_lets_ray_answer(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")
    ray.kill(one.handle)
    wait_for_state(one.handle, ActorState.DEAD)
    for policy in ("raise", "wait"):
        with pytest.raises(actorsub.ActorDiedError) as caught:
            actorsub.wrap(one.handle, on_unavailable=policy).echo.remote()
        assert isinstance(caught.value, ray.exceptions.ActorDiedError)
        assert caught.value.sent is False
        assert caught.value.state is ActorState.DEAD
        assert "it was killed by `ray.kill`" in str(caught.value)
    ref = actorsub.wrap(one.handle, on_unavailable="ref").echo.remote()
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"ray\.kill"):
        ray.get(ref, timeout=30)


def test_a_failed_constructor_is_a_death_with_its_traceback(ray_local: None) -> None:
    @actorsub.remote(max_restarts=-1, num_cpus=0, on_unavailable="raise")
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no such model")

        def ping(self) -> None: ...

    handle = Broken.remote()
    wait_for_state(handle, ActorState.DEAD)
    with pytest.raises(actorsub.ActorDiedError, match="no such model") as caught:
        handle.ping.remote()
    assert caught.value.actor_init_failed is True


def test_recovery_is_seen_without_a_call(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")
    one.kill()
    before = actorsub.stats(one.handle)["submitted"]
    one.let_restart()
    wait_for_state(one.handle, ActorState.ALIVE)
    assert actorsub.stats(one.handle)["submitted"] == before
    assert ray.get(one.handle.echo.remote(3), timeout=30) == 3


def test_a_fresh_handle_is_refused_on_its_first_call(restartable: Maker) -> None:
    """Ray itself knows nothing of an actor before the first call of a process."""
    one = restartable(on_unavailable="raise", name="fresh", namespace="refusal")

    @ray.remote(num_cpus=0, max_calls=1)
    def first_call(handle: actorsub.ActorHandle) -> tuple[str, str, bool, object]:
        try:
            handle.echo.remote()
        except actorsub.ActorUnavailableError as error:
            return type(error).__name__, error.state.value, error.sent, error.incarnation
        return "sent", "", True, None

    @ray.remote(num_cpus=0, max_calls=1)
    def first_call_by_name() -> str:
        handle = actorsub.get_actor("fresh", "refusal", on_unavailable="raise")
        try:
            handle.echo.remote()
        except actorsub.ActorUnavailableError as error:
            return error.state.value
        return "sent"

    one.kill()
    assert ray.get(first_call.remote(one.handle), timeout=60) == (
        "ActorUnavailableError",
        "restarting",
        False,
        1,
    )
    assert ray.get(first_call_by_name.remote(), timeout=60) == "restarting"


def test_a_fresh_handle_sees_recovery_by_itself(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")

    @ray.remote(num_cpus=0, max_calls=1)
    def wait_until_up(handle: actorsub.ActorHandle) -> tuple[str, int]:
        first = "sent"
        try:
            handle.echo.remote()
        except actorsub.ActorUnavailableError as error:
            first = error.state.value
        wait_for_state(handle, ActorState.ALIVE)
        return first, ray.get(handle.echo.remote(5), timeout=30)

    one.kill()
    result = wait_until_up.remote(one.handle)
    timer = threading.Timer(1.0, one.let_restart)
    timer.start()
    assert ray.get(result, timeout=60)[1] == 5
    timer.join()


def test_many_threads_refuse_and_recover(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")
    stop = threading.Event()
    answered, refused, other = [0] * 8, [0] * 8, []

    def run(number: int) -> None:
        while not stop.is_set():
            try:
                answered[number] += ray.get(one.handle.echo.remote(1), timeout=60)
            except actorsub.ActorUnavailableError as error:
                refused[number] += not error.sent
                stop.wait(0.0005)
            except ray.exceptions.ActorUnavailableError:
                # In flight when the process died: Ray's own error.
                pass
            except BaseException as error:
                other.append(error)
                return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        one.kill()
        wait_until(lambda: min(refused) > 0)
        one.restart()
        refused[:] = [0] * 8
        before = list(answered)
        wait_until(lambda b=before: all(now > then for now, then in zip(answered, b, strict=True)))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert other == []


def test_works_inside_sync_and_async_actors(restartable: Maker) -> None:
    one = restartable(on_unavailable="raise")

    class Proxy:
        def keep(self, handle: actorsub.ActorHandle) -> None:
            self.handle = handle

        def state(self) -> ActorState:
            return actorsub.state(self.handle)

    @ray.remote(num_cpus=0)
    class SyncProxy(Proxy):
        def ask(self) -> str:
            try:
                return str(ray.get(self.handle.echo.remote("up"), timeout=30))
            except actorsub.ActorUnavailableError as error:
                return error.state.value

    @ray.remote(num_cpus=0)
    class AsyncProxy(Proxy):
        async def ask(self) -> str:
            try:
                return str(await self.handle.echo.remote("up"))
            except actorsub.ActorUnavailableError as error:
                return error.state.value

    proxies = [SyncProxy.remote(), AsyncProxy.remote()]
    ray.get([proxy.keep.remote(one.handle) for proxy in proxies], timeout=60)

    def all_know(state: ActorState) -> bool:
        return ray.get([proxy.state.remote() for proxy in proxies], timeout=60) == [state] * 2

    for expected in ("up", "restarting", "up"):
        if expected == "restarting":
            one.kill()
            # Each process finds out by itself.
            wait_until(lambda: all_know(ActorState.RESTARTING))
        answers = ray.get([proxy.ask.remote() for proxy in proxies], timeout=60)
        assert answers == [expected] * 2
        if expected == "restarting":
            one.restart()
            wait_until(lambda: all_know(ActorState.ALIVE))


def test_pending_has_a_policy_of_its_own(ray_local: None) -> None:
    """E5: an actor that cannot be placed."""

    @actorsub.remote(num_cpus=0, resources={"nowhere": 1}, on_unavailable="raise")
    class Unplaceable:
        def ping(self) -> int:
            return 1

    handle = Unplaceable.remote()
    assert actorsub.state(handle) is ActorState.PENDING
    ready, waiting = ray.wait([handle.ping.remote()], timeout=0.2)
    assert (len(ready), len(waiting)) == (0, 1)
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        actorsub.wrap(handle, on_pending="fail").ping.remote()
    assert caught.value.state is ActorState.PENDING
    assert not caught.value.sent
    ref = actorsub.wrap(handle, on_pending="fail", on_unavailable="ref").ping.remote()
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(ref, timeout=10)
    with pytest.raises(actorsub.DeadlineExceededError) as late:
        actorsub.wrap(handle, on_pending="wait", timeout_s=0.2).ping.remote()
    assert not late.value.sent
    assert late.value.state is ActorState.PENDING
    ray.kill(handle)


def test_per_call_options_win(restartable: Maker) -> None:
    """A3: who fails fast and who waits is decided for each handle and each call, whatever the retry count."""
    one = restartable(max_task_retries=-1)
    one.kill()
    with pytest.raises(actorsub.ActorUnavailableError):
        one.handle.echo.options(on_unavailable="raise").remote(1)
    with pytest.raises(actorsub.ActorUnavailableError):
        ray.get(one.handle.echo.options(on_unavailable="ref").remote(1), timeout=10)
    waiting = actorsub.wrap(one.handle, on_unavailable="wait", timeout_s=30)
    with pytest.raises(actorsub.ActorUnavailableError):
        waiting.echo.options(on_unavailable="raise", max_task_retries=5).remote(1)
    with pytest.raises(actorsub.DeadlineExceededError):
        waiting.echo.options(timeout_s=0.1).remote(1)
    threading.Timer(0.2, one.let_restart).start()
    assert ray.get(waiting.echo.remote(4), timeout=30) == 4


def test_ray_wait_over_every_kind_of_ref(restartable: Maker) -> None:
    """F3: a refused ref and one of a dead actor count as ready."""
    alive, away, dead = restartable(), restartable(), restartable()

    def never(worker: object) -> None:
        threading.Event().wait()

    pending = alive.handle.__ray_call__.remote(never)
    away.kill()
    ray.kill(dead.handle)
    wait_for_state(dead.handle, ActorState.DEAD)
    refs = [ray.put(1), away.handle.echo.remote(), dead.handle.echo.remote(), pending]
    ready, waiting = ray.wait(refs, num_returns=3, timeout=30)
    assert ready == refs[:3]
    assert waiting == [pending]
