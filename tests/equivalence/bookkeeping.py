"""What Ray keeps of a call: its row in the state API, the count of its references, who owns its result."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import uuid
from typing import Any

import ray
import ray.exceptions
from helpers import GET_S, get, wait_until

import actorsub
from equivalence.actors import Methods
from equivalence.world import World, answer_or_error, case, fields


def task_rows(ids: list[str]) -> dict[str, list[Any]]:
    """For each task, its attempts as the control store has them, which is what the state API reads; [] of none."""
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import TaskEvents

    state.profile_events()  # Connects.
    accessor = getattr(state, "_global_state_accessor", None) or state.global_state_accessor
    rows: dict[str, list[Any]] = {one: [] for one in ids}
    for raw in accessor.get_task_events():
        event = TaskEvents.FromString(raw)
        if event.task_id.hex() in rows and event.HasField("task_info"):
            rows[event.task_id.hex()].append(event)
    return rows


@case("state API: rows of calls")
def _(w: World) -> Any:
    actor = w.retrying
    calls = {
        "plain": actor.echo.remote(1),
        "named": actor.echo.options(name="my task").remote(1),
        "without a row": actor.echo.options(enable_task_events=False).remote(1),
        "without a row by @ray.method": actor.silent.remote(),
        "with a row after all": actor.silent.options(enable_task_events=True).remote(),
        "several returns": actor.three.remote()[0],
        "a stream": actor.items.remote(2)._generator_ref,
        "a named stream": actor.items.options(name="my stream").remote(2)._generator_ref,
        "magic": actor.__ray_call__.remote(lambda self: 1),
        "retried": actor.fail_first.options(retry_exceptions=True).remote(uuid.uuid4().hex, 1),
        "retried by @ray.method": actor.flaky.remote(uuid.uuid4().hex, 1),
        "failed": actor.fail.remote(),
        "static": actor.static.remote(1),
    }
    ids = {name: ref.task_id().hex() for name, ref in calls.items()}
    parent = ray.get_runtime_context().get_task_id()
    expected = {name: 2 if "retried" in name else 0 if "without" in name else 1 for name in calls}

    def complete() -> Any:
        rows = task_rows(list(ids.values()))
        return rows if all(sum(map(ended, rows[ids[name]])) == expected[name] for name in ids) else None

    rows = wait_until(complete, GET_S)
    return {
        name: [
            (
                one.attempt_number,
                one.task_info.name,
                one.task_info.func_or_class_name,
                one.task_info.type,
                one.task_info.actor_id == actor._actor_id.binary(),
                one.task_info.parent_task_id.hex() == parent,
                dict(one.task_info.required_resources),
                one.state_updates.error_info.error_type,
            )
            for one in sorted(rows[ids[name]], key=lambda one: one.attempt_number)
        ]
        for name in calls
    }


def ended(event: Any) -> bool:
    from ray.core.generated.common_pb2 import TaskStatus

    return bool({TaskStatus.Value("FINISHED"), TaskStatus.Value("FAILED")} & set(event.state_updates.state_ts_ns))


def counts(*refs: Any) -> Any:
    everything = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return [everything.get(ref if isinstance(ref, str) else ref.hex()) for ref in refs]


@case("reference count: of a result, as it is kept, passed on and dropped")
def _(w: World) -> Any:
    actor = w.methods
    gate = w.path()
    held = actor.hold.remote(str(gate))
    ref = actor.echo.remote(1)
    seen = [counts(held, ref)]
    first, second = actor.echo.remote(ref), actor.echo.remote([ref])
    seen.append(counts(held, ref, first, second))
    again = copy.copy(ref)
    seen.append(counts(ref))
    del again
    gate.touch()
    get([held, first, second])
    names = [one.hex() for one in (held, ref, first, second)]
    seen.append(wait_until(lambda: settled(names)))
    del held, ref, first, second
    seen.append(wait_until(lambda: counts(*names) == [None] * 4))
    return seen


def settled(names: list[str]) -> Any:
    """Ray takes back what a call counted a moment after its result."""
    now = counts(*names)
    return None if any(one and one["submitted"] for one in now) else now


@case("reference count: of an actor, as its handle is copied, passed on and dropped")
def _(w: World) -> Any:
    actor = w.create(Methods)
    name = actor._serialization_helper()[1].hex()
    get(actor.nothing.remote())
    seen = [wait_until(lambda: counts(name))]
    others = [copy.copy(actor), pickle.loads(pickle.dumps(actor)), w.wrap(actor)]
    get([one.nothing.remote() for one in others])
    del others
    gate = w.path()
    held = actor.hold.remote(str(gate))
    later = actor.nothing.options(name="n").remote()
    seen.append(counts(name))
    gate.touch()
    get([held, later])
    get(w.asynchronous.echo.remote([actor]))
    del actor
    return [*seen, wait_until(lambda: counts(name) == [None])]


@case("ownership: results belong to the caller")
def _(w: World) -> Any:
    own = ray.put(1).owner_address()
    refs = [w.methods.echo.remote(1), w.methods.echo.options(name="n").remote(1), *w.methods.three.remote()]
    refs += list(w.methods.items.remote(2))
    return [ref.owner_address() == own for ref in refs]


class Owner:
    """A process of its own that has something, and may be killed for it."""

    def call(self, actor: Any, key: str) -> Any:
        # Not at its end: a small result would be with whoever was given the reference before the owner dies.
        self.ref = actor.forever.remote(key)
        return os.getpid(), [self.ref]

    def create(self, cls: Any, wrapped: bool) -> Any:
        actor = cls.remote()
        self.actor = actorsub.wrap(actor) if wrapped else actor
        ray.get(self.actor.nothing.remote())
        return os.getpid(), self.actor


@case("ownership: the caller's death takes its results along", raises=ray.exceptions.OwnerDiedError)
def _(w: World) -> Any:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    pid, (ref,) = get(owner.call.remote(w.asynchronous, uuid.uuid4().hex))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: isinstance(answer_or_error(owner, "__ray_ready__"), ray.exceptions.ActorDiedError))
    return get(ref)


@case("ownership: the creator's death takes its actor along")
def _(w: World) -> Any:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    pid, actor = get(owner.create.remote(w.actor_class(Methods), w.kind == "wrapped"))
    get(actor.nothing.remote())
    os.kill(pid, signal.SIGKILL)
    error = wait_until(
        lambda: (found := answer_or_error(actor)) and isinstance(found, ray.exceptions.ActorDiedError) and found
    )
    return [fields(error, actor), "owner" in str(error)]
