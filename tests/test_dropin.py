"""A drop-in changes nothing that worked: calls that Ray resends, the state after an answer, and what is given by
mistake."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers import Restartable, Worker, wait_for_state, wait_until

import actorsub
from actorsub import ActorState

pytestmark = pytest.mark.usefixtures("ray_of_module")

PATIENCE_S = 60.0


class Flaky(Worker):
    """Methods with retries of their own, and such as end the process the first time."""

    @ray.method(max_task_retries=-1)
    def kept(self, value: Any) -> Any:
        return value

    @ray.method(max_task_retries=0)
    def never_again(self, value: Any) -> Any:
        return value

    @ray.method(max_task_retries=-1)
    def stream_kept(self, count: int) -> Iterator[int]:
        for number in range(count):  # noqa: UP028  a delegated range has no send(), which Ray calls
            yield number

    def fails_once(self, value: Any) -> Any:
        self.record("run")
        if len((self.directory / "ledger").read_text().split()) == 1:
            raise ValueError("the first time")
        return value


Make = Callable[..., Any]


class Pair(Restartable):
    """A wrapped actor with its defaults, and Ray's own handle of the same."""

    def __init__(self, directory: pathlib.Path, how: str, **options: Any) -> None:
        self.directory = directory
        actor_class = ray.remote(max_restarts=-1, num_cpus=0, **options)(Flaky)
        name = str(directory)
        self.plain = actor_class.options(name=name).remote(str(directory))
        self.pid = ray.get(self.plain.pid.remote(), timeout=PATIENCE_S)
        if how == "wrap":
            self.handle = actorsub.wrap(self.plain)
        elif how == "get_actor":
            self.handle = actorsub.get_actor(name)
        else:
            self.handle = ray.get(ray.remote(num_cpus=0)(lambda handle: [handle]).remote(actorsub.wrap(self.plain)))[0]
        wait_for_state(self.handle, ActorState.ALIVE)


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Make]:
    made: list[Pair] = []

    def make(how: str = "wrap", **options: Any) -> Pair:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Pair(directory, how, **options))
        return made[-1]

    yield make
    for one in made:
        ray.kill(one.plain)


def outcomes(refs: list[Any]) -> list[Any]:
    """What each ref gives: a value, or the class of Ray's error."""
    found: list[Any] = []
    for ref in refs:
        try:
            found.append(ray.get(ref, timeout=PATIENCE_S))
        except ray.exceptions.RayActorError as error:
            found.append(next(cls for cls in type(error).__mro__ if cls.__module__ == "ray.exceptions"))
    return found


def during(one: Pair, submit: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
    """What calls through the plain and the wrapped handle give that are made while the actor is away, side by side."""
    one.kill()
    plain = [submit(one.plain, number) for number in range(5)]
    wrapped = [submit(one.handle, number) for number in range(5)]
    assert actorsub.state(one.handle) is ActorState.RESTARTING
    # Nobody is told anything before the restart is over, on either side.
    one.let_restart()
    return outcomes(plain), outcomes(wrapped)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Any, int], Any]]] = {
    "of the actor": ({"max_task_retries": -1}, lambda handle, n: handle.echo.remote(n)),
    "of the actor, a number": ({"max_task_retries": 100}, lambda handle, n: handle.echo.remote(n)),
    "of the method": ({}, lambda handle, n: handle.kept.remote(n)),
    "of the call": ({}, lambda handle, n: handle.echo.options(max_task_retries=-1).remote(n)),
    "of the call, over the method's": (
        {},
        lambda handle, n: handle.never_again.options(max_task_retries=100).remote(n),
    ),
    "with other options": ({"max_task_retries": -1}, lambda handle, n: handle.echo.options(name="named").remote(n)),
    "with exceptions": (
        {"max_task_retries": -1},
        lambda handle, n: handle.echo.options(retry_exceptions=True).remote(n),
    ),
    "magic": ({"max_task_retries": -1}, lambda handle, n: handle.__ray_call__.remote(lambda self, n: n, n)),
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_ray_resends_are_carried_over_a_restart(pair: Make, way: str) -> None:
    options, submit = WAYS[way]
    one = pair(**options)
    plain, wrapped = during(one, submit)
    assert wrapped == plain == [0, 1, 2, 3, 4]
    assert actorsub.stats(one.handle)["refused"]["restarting"] == 0
    assert actorsub.policy(one.handle).on_unavailable == "auto"


@pytest.mark.parametrize("how", ["get_actor", "from elsewhere"])
def test_so_are_those_through_a_handle_that_was_not_made_here(pair: Make, how: str) -> None:
    plain, wrapped = during(pair(how, max_task_retries=-1), WAYS["of the actor"][1])
    assert wrapped == plain == [0, 1, 2, 3, 4]


NOT_RESENT: dict[str, tuple[dict[str, Any], Callable[[Any, int], Any]]] = {
    "none": ({}, lambda handle, n: handle.echo.remote(n)),
    "exceptions without retries": ({}, lambda handle, n: handle.echo.options(retry_exceptions=True).remote(n)),
    "switched off by the method": ({"max_task_retries": -1}, lambda handle, n: handle.never_again.remote(n)),
    "switched off by the call": (
        {"max_task_retries": -1},
        lambda handle, n: handle.echo.options(max_task_retries=0).remote(n),
    ),
    "switched off by the call, over the method's": (
        {},
        lambda handle, n: handle.kept.options(max_task_retries=0).remote(n),
    ),
}


@pytest.mark.parametrize("way", NOT_RESENT)
def test_calls_that_ray_does_not_resend_are_refused(pair: Make, way: str) -> None:
    options, submit = NOT_RESENT[way]
    one = pair(**options)
    one.kill()
    assert outcomes([submit(one.handle, number) for number in range(5)]) == [ray.exceptions.ActorUnavailableError] * 5
    assert actorsub.stats(one.handle)["refused"]["restarting"] == 5


WAITS: dict[str, Callable[[Any], Any]] = {
    "get": actorsub.get,
    "await": lambda ref: asyncio.run(_await(ref)),
    "future": lambda ref: ref.future().result(PATIENCE_S),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_call_in_flight_is_sent_again(pair: Make, wait: str) -> None:
    one = pair(max_task_retries=-1)

    def stay_first(worker: Any) -> int:
        import os

        held = worker.directory / "held"
        if held.exists():
            return os.getpid()
        held.touch()
        while True:
            threading.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(ray.get, one.plain.echo.remote("first"), timeout=PATIENCE_S)
        waiting = pool.submit(WAITS[wait], one.handle.__ray_call__.remote(stay_first))
        assert plain.result(PATIENCE_S) == "first"
        wait_until((one.directory / "held").exists)
        one.kill()
        behind = one.handle.echo.remote("behind")
        assert not waiting.done()
        one.let_restart()
        assert waiting.result(PATIENCE_S) != one.pid
    assert actorsub.get(behind, timeout=PATIENCE_S) == "behind"
    counted = actorsub.stats(one.handle)
    assert (counted["failed_early"], counted["refused"]["restarting"]) == (0, 0)


async def _await(ref: Any) -> Any:
    return await ref


def test_a_stream_with_retries_is_rays(pair: Make) -> None:
    one = pair()
    one.kill()
    streams = [handle.stream_kept.remote(3) for handle in (one.plain, one.handle)]
    assert [type(stream) for stream in streams] == [ray.ObjectRefGenerator] * 2
    one.let_restart()
    assert [[ray.get(ref, timeout=PATIENCE_S) for ref in stream] for stream in streams] == [[0, 1, 2]] * 2


def test_an_exception_is_retried_after_a_restart(pair: Make) -> None:
    one = pair(max_task_retries=-1)
    one.kill()
    ref = one.handle.fails_once.options(retry_exceptions=[ValueError]).remote(7)
    one.let_restart()
    assert actorsub.get(ref, timeout=PATIENCE_S) == 7
    assert one.ledger == ["run", "run"]


def test_an_explicit_policy_is_for_all_calls(pair: Make) -> None:
    one = pair(max_task_retries=-1)
    one.kill()
    for method in (
        actorsub.wrap(one.handle, on_unavailable="ref").echo,
        one.handle.echo.options(on_unavailable="ref"),
        one.handle.echo.options(on_unavailable="ref", max_task_retries=5),
        one.handle.echo.options(on_unavailable="ref").options(max_task_retries=5),
    ):
        with pytest.raises(actorsub.ActorUnavailableError) as caught:
            ray.get(method.remote(1), timeout=PATIENCE_S)
        assert caught.value.sent is False
    with pytest.raises(actorsub.ActorUnavailableError):
        one.handle.echo.options(on_unavailable="raise").remote(1)
    with pytest.raises(actorsub.DeadlineExceededError):
        one.handle.echo.options(on_unavailable="wait", timeout_s=0.05).remote(1)
    # And back.
    ref = one.handle.echo.options(on_unavailable="raise").options(on_unavailable="auto").remote(3)
    one.let_restart()
    assert ray.get(ref, timeout=PATIENCE_S) == 3


def test_requests_are_refused_all_the_same(pair: Make) -> None:
    """`.call()` sends with Ray's retries off."""
    one = pair(max_task_retries=-1)
    one.kill()
    error = one.handle.kept.call(1).exception(PATIENCE_S)
    assert isinstance(error, actorsub.ActorUnavailableError)
    assert error.sent is False
    for policy in ("auto", "ref"):
        group = actorsub.ReplicaGroup([one.handle], on_unavailable=policy)
        assert isinstance(group.kept.call(1).exception(PATIENCE_S), actorsub.NoReplicaError)
        with pytest.raises(actorsub.NoReplicaError):
            ray.get(group.kept.remote(1), timeout=PATIENCE_S)


def test_dead_is_rays_to_say(pair: Make) -> None:
    one = pair(max_task_retries=-1)
    ray.kill(one.plain)
    wait_for_state(one.handle, ActorState.DEAD)
    texts = []
    for handle in (one.plain, one.handle):
        with pytest.raises(ray.exceptions.ActorDiedError) as caught:
            ray.get(handle.echo.remote(1), timeout=PATIENCE_S)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_on_pending_is_explicit(pair: Make) -> None:
    @actorsub.remote(max_restarts=-1, max_task_retries=-1, resources={"nowhere": 1}, on_pending="fail")
    class Never:
        def ping(self) -> None: ...

    handle = Never.remote()
    wait_for_state(handle, ActorState.PENDING)
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        ray.get(handle.ping.remote(), timeout=PATIENCE_S)
    assert caught.value.state is ActorState.PENDING
    ready, _ = ray.wait([handle.ping.options(on_pending="submit").remote()], timeout=0.1)
    assert not ready
    ray.kill(handle)


def test_a_caller_is_carried_over_many_restarts(tmp_path: pathlib.Path) -> None:
    """The same loop on the plain and on the wrapped handle of an actor that is killed five times."""
    actors = []
    for kind in ("plain", "wrapped"):
        directory = tmp_path / kind
        directory.mkdir()
        handle = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(Worker).remote(str(directory), 0.05)
        actors.append(handle if kind == "plain" else actorsub.wrap(handle))
    over = threading.Event()
    ends: dict[str, list[Any]] = {"plain": [], "wrapped": []}

    def call(kind: str, handle: Any) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                ends[kind].append(actorsub.get(handle.echo.remote(number), timeout=PATIENCE_S) == number)
            except Exception as error:
                ends[kind].append(error)

    threads = [threading.Thread(target=call, args=pair) for pair in zip(ends, actors, strict=True)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for handle in actors:
            pid = ray.get(handle.pid.remote(), timeout=PATIENCE_S)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda handle=handle, pid=pid: ray.get(handle.pid.remote(), timeout=PATIENCE_S) != pid)
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    for made in ends.values():
        assert made
        assert set(made) == {True}
    for handle in actors:
        ray.kill(handle)


# ---------------------------------------------------------------------------------------------------------------------
# The state after an answer.


class Quick:
    def answer(self) -> int:
        return 42


def ask_by_call(handle: Any) -> Any:
    return handle.answer.call().result(PATIENCE_S)


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "ray.get": lambda handle: ray.get(handle.answer.remote(), timeout=PATIENCE_S),
    "get": lambda handle: actorsub.get(handle.answer.remote(), timeout=PATIENCE_S),
    "await": lambda handle: asyncio.run(_await(handle.answer.remote())),
    "future": lambda handle: handle.answer.remote().future().result(PATIENCE_S),
    "call": ask_by_call,
    "by the plain handle": lambda handle: ray.get(handle._actorsub_inner.answer.remote(), timeout=PATIENCE_S),
}


@pytest.mark.parametrize("how", ANSWERS)
@pytest.mark.parametrize("detect", ["auto", "ray"])
def test_an_actor_that_has_answered_is_alive(how: str, detect: str) -> None:
    create = actorsub.remote(num_cpus=0, detect=detect)(Quick)
    for _ in range(2):
        handle = create.remote()
        assert ANSWERS[how](handle) == 42
        assert actorsub.state(handle) is ActorState.ALIVE
        assert actorsub.stats(handle)["state"] is ActorState.ALIVE


def test_a_looked_up_actor_that_has_answered_is_alive() -> None:
    kept = ray.remote(num_cpus=0)(Quick).options(name="looked up").remote()
    ray.get(kept.answer.remote(), timeout=PATIENCE_S)
    handle = actorsub.get_actor("looked up")
    assert ray.get(handle.answer.remote(), timeout=PATIENCE_S) == 42
    assert actorsub.state(handle) is ActorState.ALIVE


def test_who_listens_hears_what_state_has_seen() -> None:
    handle = actorsub.remote(num_cpus=0)(Quick).remote()
    heard: list[tuple[ActorState, ActorState]] = []
    actorsub.on_state_change(handle, lambda _, old, new, why: heard.append((old, new)))
    assert ANSWERS["ray.get"](handle) == 42
    assert actorsub.state(handle) is ActorState.ALIVE
    wait_until(lambda: heard and heard[-1][1] is ActorState.ALIVE)
    # It is looked up then, and watched.
    wait_until(lambda: actorsub.stats(handle)["watched"] and actorsub.stats(handle)["incarnation"] == 0)
    assert [old for old, _ in heard[1:]] == [new for _, new in heard[:-1]]


def test_state_says_nothing_too_early(pair: Make) -> None:
    """An answer of the incarnation before does not make the next one alive."""
    one = pair()
    assert ray.get(one.handle.echo.remote(1), timeout=PATIENCE_S) == 1
    one.kill()
    for _ in range(1000):
        assert actorsub.state(one.handle) is ActorState.RESTARTING
    one.let_restart()
    wait_for_state(one.handle, ActorState.ALIVE)


# ---------------------------------------------------------------------------------------------------------------------
# What is given by mistake.


def test_a_call_is_no_ref() -> None:
    handle = actorsub.remote(num_cpus=0)(Quick).remote()
    call, ref = handle.answer.call(), handle.answer.remote()
    group_call = actorsub.ReplicaGroup([handle]).answer.call()
    for one in (call, group_call):
        for given in (one, [one], [ref, one], [ray.put(1), one], (one,)):
            with pytest.raises(TypeError, match=r"call\.result\(timeout\) or `await call`"):
                actorsub.get(given)
        for given in ([one], [ref, one], [ray.put(1), one]):
            with pytest.raises(TypeError, match=r"concurrent\.futures\.wait"):
                actorsub.wait(given)
    assert [call.result(PATIENCE_S), group_call.result(PATIENCE_S), actorsub.get(ref)] == [42, 42, 42]
    with pytest.raises(TypeError, match="list"):
        actorsub.wait(ref)
    with pytest.raises((TypeError, ValueError)):
        actorsub.get(3)


def test_a_deadline_is_every_kind_of_timeout() -> None:
    handle = actorsub.remote(num_cpus=0, resources={"nowhere": 1})(Quick).remote()
    call = handle.answer.options(timeout_s=0.01).call()
    for kind in (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError, ray.exceptions.GetTimeoutError):
        assert isinstance(call.exception(PATIENCE_S), kind)
        with pytest.raises(kind):
            call.result(PATIENCE_S)
    ray.kill(handle)
