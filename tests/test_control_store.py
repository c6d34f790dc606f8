"""The control store is killed and started again, or freezes for a while, under load; actors are killed meanwhile.

Ray's control store survives its own restart only where it keeps its tables in a Redis, so each run has one of its own.
It is a process of its own, too, with a Ray of its own: Ray reads the address of the Redis when it starts. What stock
Ray does in the same moments is printed (`pytest -rP`), not asserted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import logging
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers import RAY_ARGS, Worker, ms, our_threads, wait_for_state, wait_until, wait_until_watched
from subprocesses import run_function

import actorsub
from actorsub import ActorState

#: Stock Ray takes 1.2 s and more while its control store is away.
EARLY_S = 0.7
PATIENCE_S = 30.0
#: A run that takes longer hangs: it shows where, and ends.
WATCHDOG_S = 100.0
#: How many answers show that a load goes on.
ANSWERS = 10
#: Silence is not what these tests are about, and a busy machine looks like a silent peer.
PATIENT = {"silence_timeout_s": 30.0, "silence_in_flight_s": None}
#: What can tell while the control store is away.
LOCAL = ("process", "connection")
#: Once it is back, it may be the first to tell.
ANY = (*LOCAL, "ray", "table", "call")


@pytest.fixture
def redis(tmp_path: pathlib.Path) -> Iterator[str]:
    """The address of a Redis server that keeps nothing on disk."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server (Debian: apt-get install redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", "", "--appendonly", "no"]
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen([binary, *options], stdout=log, stderr=log)

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "redis.log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    try:
        wait_until(answers, what="the Redis server answers")
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class ControlStore:
    """That of the Ray that this process started."""

    def __init__(self, how: str) -> None:
        # No public API starts a control store again.
        self._node = ray._private.worker._global_node
        self._kill = how == "killed"

    def _signal(self, number: int) -> None:
        os.kill(self._node.all_processes["gcs_server"][0].process.pid, number)

    def leave(self) -> None:
        self._signal(signal.SIGKILL if self._kill else signal.SIGSTOP)

    def come_back(self) -> None:
        if self._kill:
            # Only bookkeeping is left to do for the first; the second uses the same command line and port again.
            self._node.kill_gcs_server(check_alive=False)
            self._node.start_gcs_server()
        else:
            self._signal(signal.SIGCONT)


class Actor:
    """A wrapped Worker with its directory, and what was told about it. Nothing is called before `up`."""

    def __init__(self, directory: pathlib.Path, restart_s: float | None = 0.0, **options: Any) -> None:
        directory.mkdir()
        self.directory = directory
        options = {"max_restarts": -1, "num_cpus": 0, **PATIENT, **options}
        self.handle = actorsub.remote(**options)(Worker).remote(str(directory), restart_s)
        self.pid = 0
        self.refused: list[str] = []
        self.told: list[ActorState] = []

    def up(self) -> None:
        """Waits until the sentinel watches its present incarnation, and takes its process id."""
        self.pid = self.handle.pid.options(on_unavailable="wait").call().result(PATIENCE_S)
        wait_until_watched(self.handle)

    def listen(self) -> None:
        actorsub.on_state_change(self.handle, lambda _, _old, new, _evidence: self.told.append(new))

    def kill(self) -> float:
        """SIGKILL. Returns when the process has ended, which takes it up to half a second on a busy machine."""
        process = os.pidfd_open(self.pid)
        try:
            os.kill(self.pid, signal.SIGKILL)
            select.select([process], [], [])
            return time.monotonic()
        finally:
            os.close(process)

    def first_refusal(
        self, begin_s: float, sources: tuple[str, ...] = LOCAL, state: ActorState = ActorState.RESTARTING
    ) -> float:
        """Calls until a call is refused. Returns how long after `begin_s` that was."""
        record = self.handle.record.options(on_unavailable="raise")
        calls = 0
        while True:
            calls += 1
            entry = f"after-{begin_s}-{calls}"
            try:
                record.remote(entry)
            except (actorsub.ActorUnavailableError, actorsub.ActorDiedError) as error:
                took_s = time.monotonic() - begin_s
                assert (error.sent, error.state) == (False, state)
                assert isinstance(error, actorsub.ActorDiedError) is (state is ActorState.DEAD)
                assert error.evidence in sources, error
                self.refused.append(entry)
                return took_s
            passed_s = time.monotonic() - begin_s
            assert passed_s < EARLY_S, f"{calls} calls were sent to one that is gone: {actorsub.stats(self.handle)}"

    @property
    def starts(self) -> list[str]:
        path = self.directory / "starts"
        return path.read_text().split() if path.exists() else []

    @property
    def ledger(self) -> Counter[str]:
        """How often each call ran."""
        path = self.directory / "ledger"
        return Counter(path.read_text().split() if path.exists() else [])


class Caller(threading.Thread):
    """Calls an actor in one way without pause, and keeps what became of each call."""

    def __init__(self, name: str, actor: Actor, run: Callable[[Any, str], Any], on_unavailable: str) -> None:
        super().__init__(name=name, daemon=True)
        self._method = actor.handle.record.options(on_unavailable=on_unavailable)
        self._run_one = run
        self._stopping = threading.Event()
        self.made = 0
        self.answered = 0
        self.slowest_s = 0.0
        self.ended: dict[str, BaseException | None] = {}
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            entry = f"{self.name}-{self.made}"
            self.made += 1
            begin_s = time.monotonic()
            try:
                answer = self._run_one(self._method, entry)
            except Exception as error:
                self.ended[entry] = error
            else:
                assert answer == entry
                self.ended[entry] = None
                self.answered += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
            # Leaves the processors to what restarts, and keeps it from refusals by the million.
            self._stopping.wait(0.002)

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"{self.name} is stuck"


def run_get(method: Any, entry: str) -> Any:
    return actorsub.get(method.remote(entry), timeout=PATIENCE_S)


def run_await(method: Any, entry: str) -> Any:
    async def one() -> Any:
        return await method.remote(entry)

    return asyncio.run(asyncio.wait_for(one(), PATIENCE_S))


def run_call(method: Any, entry: str) -> Any:
    return method.call(entry).result(PATIENCE_S)


def load(name: str, actor: Actor) -> list[Caller]:
    """One caller of each kind. Those of the last wait in line while the actor is away."""
    return [
        Caller(f"{name}-get", actor, run_get, "raise"),
        Caller(f"{name}-await", actor, run_await, "ref"),
        Caller(f"{name}-call", actor, run_call, "raise"),
        Caller(f"{name}-line", actor, run_call, "wait"),
    ]


def go_on(callers: list[Caller]) -> None:
    """Waits until each of them had more answers."""
    goals = [one.answered + ANSWERS for one in callers]
    wait_until(
        lambda: all(one.answered >= goal for one, goal in zip(callers, goals, strict=True)),
        PATIENCE_S,
        f"calls of {[one.name for one in callers]} are answered",
    )


def check_ledger(actor: Actor, callers: list[Caller]) -> Counter[str]:
    """Every call has ended, none ran twice, and none ran that was said not to have run. Counts the ends."""
    ran = actor.ledger
    assert [entry for entry in actor.refused if ran[entry]] == []
    ends: Counter[str] = Counter()
    for caller in callers:
        assert len(caller.ended) == caller.made, f"a call of {caller.name} has not ended"
        for entry, error in caller.ended.items():
            if error is None:
                assert ran[entry] == 1, entry
                ends["answered"] += 1
                continue
            assert isinstance(error, actorsub.ActorUnavailableError), (entry, error)
            # Lost or refused the first time that the actor was killed.
            first = error.incarnation == (0 if error.sent else 1)
            assert error.evidence in (LOCAL if first else ANY), (entry, error)
            assert ran[entry] <= int(error.sent), (entry, error)
            ends["lost" if error.sent else "refused"] += 1
    return ends


class Ended:
    """When a future ended, and how."""

    def __init__(self, future: Any) -> None:
        self.future = future
        self.at_s: float | None = None
        future.add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self.at_s = time.monotonic()

    def after(self, begin_s: float) -> str:
        if self.at_s is None:
            return f"not within {time.monotonic() - begin_s:.1f} s"
        return f"{ms(self.at_s - begin_s)} ({type(self.future.exception(0)).__name__})"


class Complaints(logging.Handler):
    """Whatever the library logs, and threads that an exception ended."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("actorsub").addHandler(self)
        threading.excepthook = lambda args: self.said.append(repr(args))

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


def own_threads() -> dict[str, int | None]:
    return {one.name: one.ident for one in our_threads()}


def run_without_control_store(directory: str, how: str) -> None:
    """In a process of its own."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    complaints = Complaints()
    ray.init(**{**RAY_ARGS, "num_cpus": 1})
    store = ControlStore(how)
    place = pathlib.Path(directory)
    live, doomed, uncalled = Actor(place / "live"), Actor(place / "doomed"), Actor(place / "uncalled")
    mortal = Actor(place / "mortal", max_restarts=0)
    # Its constructor waits for a file.
    coming = Actor(place / "coming", restart_s=None)
    for one in (live, doomed, mortal, coming):
        one.up()
        one.listen()
    wait_until(lambda: uncalled.starts, what="the one that nobody called is up, too")
    live_load, doomed_load = load("live", live), load("doomed", doomed)
    coming.kill()
    wait_until(lambda: len(coming.starts) == 2, PATIENCE_S, "it is on its way back")
    go_on(live_load + doomed_load)
    threads = own_threads()
    assert threads.keys() >= {"actorsub-watcher", "actorsub-table"}

    store.leave()
    # Calls go from process to process.
    go_on(live_load + doomed_load)
    held = [Ended(doomed.handle.hold.remote().future())]
    wait_until((doomed.directory / "held").exists, what="a call runs")
    held += [Ended(doomed.handle.record.remote("behind-1").future()), Ended(doomed.handle.record.call("behind-2"))]
    plain = doomed.handle._actorsub_inner
    stock = [Ended(plain.record.remote("stock-1").future())]
    begin_s = doomed.kill()
    refused_s = doomed.first_refusal(begin_s)
    stock.append(Ended(plain.record.remote("stock-2").future()))
    for one in held:
        error = one.future.exception(PATIENCE_S)
        assert isinstance(error, actorsub.ActorUnavailableError), error
        assert (error.sent, error.incarnation) == (True, 0)
        assert error.evidence in LOCAL, error
    # Some end before the process does, whose connections close first.
    failed_s = max(0.0, *(one.at_s - begin_s for one in held if one.at_s is not None))
    assert refused_s < EARLY_S
    assert failed_s < EARLY_S
    # The table said before that Ray will not restart it; nobody has to be asked again.
    mortal.first_refusal(mortal.kill(), state=ActorState.DEAD)
    # One waits here, the other goes to Ray, which has to ask the control store where that actor is.
    waiting = [coming.handle.record.options(on_unavailable="wait").call("waited"), uncalled.handle.record.call("first")]
    # Long enough for reads of the actor table, and for retries of Ray's, to begin meanwhile.
    concurrent.futures.wait([one.future for one in stock], timeout=3.0)
    stock_said = f"in flight {stock[0].after(begin_s)}, submitted after {stock[1].after(begin_s)}"
    go_on(live_load)
    doomed.first_refusal(time.monotonic())
    assert actorsub.state(coming.handle) is ActorState.RESTARTING

    # It comes back, and everything else by itself.
    begin_s = time.monotonic()
    store.come_back()
    wait_until(lambda: len(doomed.starts) == 2, PATIENCE_S, "Ray restarts it")
    started_s = time.monotonic() - begin_s
    wait_for_state(doomed.handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
    alive_s = time.monotonic() - begin_s
    go_on(doomed_load)
    assert actorsub.stats(doomed.handle)["incarnation"] == 1
    wait_for_state(mortal.handle, ActorState.DEAD, timeout_s=PATIENCE_S)
    with pytest.raises(actorsub.ActorDiedError):
        mortal.handle.record.options(on_unavailable="raise").remote("after its death")
    (coming.directory / "gate").touch()
    assert [call.result(PATIENCE_S) for call in waiting] == ["waited", "first"]

    # The new incarnation is watched like the first.
    doomed.up()
    refused_again_s = doomed.first_refusal(doomed.kill(), ANY)
    wait_for_state(doomed.handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
    go_on(live_load + doomed_load)

    for caller in live_load + doomed_load:
        caller.stop()
    assert complaints.said == []
    assert own_threads().items() >= threads.items()
    live_ends, doomed_ends = check_ledger(live, live_load), check_ledger(doomed, doomed_load)
    assert set(live_ends) == {"answered"}
    assert set(doomed_ends) == {"answered", "lost", "refused"}
    assert (coming.ledger, uncalled.ledger, mortal.ledger) == ({"waited": 1}, {"first": 1}, {})
    away_and_back = [ActorState.RESTARTING, ActorState.ALIVE]
    assert live.told == [ActorState.ALIVE]
    assert doomed.told == [ActorState.ALIVE, *away_and_back, *away_and_back]
    assert coming.told == [ActorState.ALIVE, *away_and_back]
    assert mortal.told == [ActorState.ALIVE, ActorState.DEAD]
    slowest_s = max(one.slowest_s for one in live_load)
    (place / "report").write_text(
        f"control store {how}: first refusal {ms(refused_s)}, in flight {ms(failed_s)}; stock Ray {stock_said};\n"
        f"  slowest of {live_ends['answered']} calls of a live actor {ms(slowest_s)};\n"
        f"  from its return until the killed actor starts {ms(started_s)}, until it is ALIVE {ms(alive_s)};\n"
        f"  killed again: first refusal {ms(refused_again_s)}; calls of that actor: {dict(doomed_ends)}\n"
    )
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(WATCHDOG_S + 50)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_actors_die_while_the_control_store_is_away(
    redis: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("RAY_REDIS_ADDRESS", redis)
    log = tmp_path / "output"
    code = run_function(run_without_control_store, str(tmp_path), how, log=log, timeout_s=WATCHDOG_S + 20)
    assert code == 0, log.read_text(errors="replace")[-8000:]
    print((tmp_path / "report").read_text())
