"""The errors: whose classes they also are, what they certify, and that they travel."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import pickle
import types
from typing import Any

import pytest
import ray.exceptions
from ray import cloudpickle
from ray.core.generated import common_pb2, gcs_pb2

import actorsub
from actorsub import ActorState, _core, _ray_compat, errors, watcher
from actorsub.errors import Kind

CERTIFICATE = {
    "actor_id": "ab" * 16,
    "sent": False,
    "state": ActorState.RESTARTING,
    "evidence": "ray",
    "incarnation": 3,
}


def make(cls: type[Exception]) -> Exception:
    return cls(**CERTIFICATE)  # type: ignore[arg-type]


CLASSES = [actorsub.ActorUnavailableError, actorsub.ActorDiedError, actorsub.DeadlineExceededError]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_errors_travel(cls: type[Exception], module: object) -> None:
    error = make(cls)
    error.__dict__["note"] = "kept"
    for again in (module.loads(module.dumps(error)), copy.copy(error)):  # type: ignore[attr-defined]
        assert type(again) is cls
        for name, value in CERTIFICATE.items():
            assert getattr(again, name) == value
        assert str(again) == str(error)


def test_whose_classes_they_are() -> None:
    unavailable, died, deadline = [make(cls) for cls in CLASSES]
    assert isinstance(unavailable, ray.exceptions.ActorUnavailableError)
    assert isinstance(died, ray.exceptions.ActorDiedError)
    assert isinstance(deadline, ray.exceptions.GetTimeoutError)
    assert isinstance(deadline, TimeoutError)
    assert not isinstance(unavailable, ray.exceptions.ActorDiedError)
    assert not isinstance(died, ray.exceptions.ActorUnavailableError)
    for error in (unavailable, died):
        assert isinstance(error, ray.exceptions.RayActorError)
        assert isinstance(error, _core.CertifiedError)


def test_messages_say_what_is_known() -> None:
    assert str(make(actorsub.ActorUnavailableError)) == (
        f"The actor {'ab' * 16} is unavailable: it is restarting (incarnation 3, evidence: ray). "
        "The call never left this process and cannot have run."
    )
    assert str(actorsub.ActorUnavailableError()) == (
        "The actor (id unknown) is unavailable: it is in an unknown state. The call may or may not have run."
    )
    assert "'The actor" in repr(make(actorsub.ActorUnavailableError))


def test_when_in_doubt_it_was_sent() -> None:
    for cls in CLASSES:
        assert cls().sent is True  # type: ignore[attr-defined]


def test_a_death_keeps_what_ray_says() -> None:
    cause = ray.exceptions.ActorDiedError()
    cause._preempted = True
    cause._actor_init_failed = True
    error = actorsub.ActorDiedError(cause, **CERTIFICATE)
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert one.preempted is True
        assert one.actor_init_failed is True
        assert "died unexpectedly" in str(one)


def test_rays_own_way_of_sending_errors_keeps_the_class() -> None:
    error = make(actorsub.ActorUnavailableError)
    again = ray.exceptions.RayError.from_bytes(error.to_bytes())  # type: ignore[attr-defined]
    assert type(again) is actorsub.ActorUnavailableError
    assert again.sent is False


# ---------------------------------------------------------------------------------------------------------------------
# Ray's own errors.


RAYS = {
    name: cls
    for name, cls in vars(ray.exceptions).items()
    if inspect.isclass(cls) and issubclass(cls, ray.exceptions.RayError) and cls.__module__ == "ray.exceptions"
}


def rays_error(cls: Any) -> Any:
    """One that holds what Ray would put in."""
    if cls is ray.exceptions.ActorUnavailableError:
        return cls("of Ray", b"a" * 16)
    if cls in (ray.exceptions.RayActorError, ray.exceptions.ActorDiedError):
        return cls()
    if "reason" in inspect.signature(cls.__init__).parameters and issubclass(cls, ray.exceptions.ObjectLostError):
        return cls("ab" * 28, reason=None, owner_address=None, call_site="")
    if issubclass(cls, (ray.exceptions.ObjectLostError, ray.exceptions.OutOfDiskError)):
        return cls("ab" * 28, b"", "")
    return cls("of Ray")


@pytest.fixture
def actor() -> Any:
    """Of a connection that never was: nobody looks at it."""
    return _core.actor_of(ray.ActorID(os.urandom(16)), _ray_compat.session_token())


def test_every_error_of_rays_is_decided() -> None:
    undecided = set(RAYS) - set(errors.KINDS)
    assert not undecided, f"what does a call that ends with one of {undecided} do in a group? errors.KINDS has to say"


def test_every_death_cause_of_rays_is_read() -> None:
    cause = gcs_pb2.ActorTableData.DESCRIPTOR.fields_by_name["death_cause"].message_type
    contexts = {field.name for field in cause.oneofs_by_name["context"].fields}
    assert contexts == set(_ray_compat._DEATHS)


@pytest.mark.parametrize("name", sorted(set(RAYS) - {"RayTaskError", "CrossLanguageError"}))
def test_every_error_of_rays_is_certified(name: str, actor: Any) -> None:
    cls = RAYS[name]
    text = str(rays_error(cls))
    actor.apply("table", "alive", 2)
    error = errors.certified(rays_error(cls), actor, actor.losses())
    copies = [error]
    if name != "RayChannelTimeoutError":
        # Which Ray cannot unpickle itself.
        copies += [pickle.loads(pickle.dumps(error)), cloudpickle.loads(cloudpickle.dumps(error))]
    for one in copies:
        assert isinstance(one, cls)
        assert (one.sent, one.evidence, one.actor_id, one.incarnation) == (True, "call", actor.key.hex(), 2)
        assert one.state is ActorState.ALIVE
        assert str(one).startswith(text)
        assert actorsub.may_have_run(one)
    ours = {Kind.DIED: actorsub.ActorDiedError, Kind.LOST: actorsub.ActorUnavailableError}
    kind = errors.kind_of(error)
    assert isinstance(error, ours.get(kind, cls))
    assert kind is errors.kind_of(rays_error(cls)) is errors.KINDS[name]


def test_what_a_method_raised_stays_as_it_is(actor: Any) -> None:
    cause = ray.exceptions.ActorDiedError()
    error = ray.exceptions.RayTaskError("f", "a traceback", cause, "title", 1, "127.0.0.1")
    assert errors.certified(error, actor, 0) is error
    dual = error.as_instanceof_cause()
    assert isinstance(dual, ray.exceptions.ActorDiedError)
    assert not hasattr(dual, "sent")
    assert actorsub.may_have_run(dual)


def test_a_cancelled_task_is_certified_through_the_tasks_error(actor: Any) -> None:
    error = ray.exceptions.RayTaskError("f", "", ray.exceptions.TaskCancelledError(), "title", 1, "127.0.0.1")
    dual = errors.certified(error, actor, 0).as_instanceof_cause()
    assert isinstance(dual, ray.exceptions.TaskCancelledError)
    assert (dual.sent, dual.evidence, dual.actor_id) == (True, "call", actor.key.hex())


def test_a_certified_error_as_a_value_is_about_no_call_but_its_own(actor: Any) -> None:
    for cls in [*CLASSES, actorsub.QueueFullError, actorsub.NoReplicaError]:
        inner = make(cls)
        outer = errors.as_value_of_a_call(inner)
        assert type(outer) is cls
        assert (inner.sent, outer.sent) == (False, True)  # type: ignore[attr-defined]
        assert (outer.actor_id, outer.evidence) == (inner.actor_id, inner.evidence)  # type: ignore[attr-defined]
        assert errors.certified(inner, actor, 0).sent is True


def test_may_have_run() -> None:
    for cls in CLASSES:
        assert not actorsub.may_have_run(make(cls))
        assert actorsub.may_have_run(cls())
    assert not actorsub.may_have_run(actorsub.QueueFullError())
    doubtful = [
        ValueError("mine"),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        ray.exceptions.TaskCancelledError(),
        ray.exceptions.GetTimeoutError(),
        ray.exceptions.ActorDiedError(),
    ]
    foreign = ConnectionError()
    foreign.sent = False  # type: ignore[attr-defined]
    assert all(actorsub.may_have_run(error) for error in [*doubtful, foreign])
    # What the worker's own call of somebody else ended with: that call cannot have run, this one did.
    inner = make(actorsub.ActorDiedError)
    outer = ray.exceptions.RayTaskError("f", "", inner, "title", 1, "127.0.0.1").as_instanceof_cause()
    assert isinstance(outer, actorsub.ActorDiedError)
    assert actorsub.may_have_run(outer)
    for nonsense in (None, "error", ValueError, 3):
        with pytest.raises(TypeError, match="may_have_run takes the exception"):
            actorsub.may_have_run(nonsense)  # type: ignore[arg-type]


def test_an_error_that_was_handed_out_learns_the_cause(actor: Any) -> None:
    actor.apply("table", "alive", 1)
    mark = actor.losses()
    actor.set_last(1)
    actor.apply("process", "restarting", 1)
    lost, refused = errors.loss(actor), errors.death(actor)
    for error in (lost, refused):
        assert isinstance(error, actorsub.ActorDiedError)
        assert error.incarnation == 1
        assert str(error).startswith(ray.exceptions.ActorDiedError.BASE_ERROR_MSG)
        assert "preemption" not in str(error)
        assert error.preempted is False
    cause = common_pb2.ActorDiedErrorContext(actor_id=actor.key, error_message="by preemption")
    cause.node_death_info.reason = common_pb2.NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED
    actor.row = types.SimpleNamespace(may_restart=False, state="alive", unborn=False)
    try:
        raise ray.exceptions.ActorDiedError(cause)
    except ray.exceptions.ActorDiedError as rays:
        watcher.learn(actor, rays, mark)
    # The record keeps no frame of whoever waited.
    assert actor.death.__traceback__ is None
    for error in (lost, pickle.loads(pickle.dumps(lost)), refused, pickle.loads(pickle.dumps(refused))):
        assert "by preemption" in str(error)
        assert error.preempted is True
    assert (lost.sent, refused.sent) == (True, False)


def test_a_preempted_incarnation_is_told_apart_from_the_next(actor: Any) -> None:
    actor.apply("table", "alive", 1)
    mark = actor.losses()
    actor.apply("process", "restarting", 1)
    lost, refused = errors.loss(actor), errors.refusal(actor)
    assert (lost.preempted, refused.preempted) == (False, False)
    # Ray concludes "died" from a broken connection and a node that is taken away, also where a restart is to come.
    error = ray.exceptions.ActorDiedError()
    error._preempted = True
    watcher.learn(actor, error, mark)
    assert actor.state is ActorState.RESTARTING
    assert (lost.preempted, refused.preempted) == (True, True)
    assert pickle.loads(pickle.dumps(lost)).preempted is True
    actor.apply("table", "alive", 2)
    actor.apply("process", "restarting", 2)
    assert (errors.loss(actor).preempted, errors.refusal(actor).preempted) == (False, False)
    assert lost.preempted is True


def test_what_ray_says_late_is_about_the_incarnation_of_the_call(actor: Any) -> None:
    actor.apply("table", "alive", 1)
    mark = actor.losses()
    actor.apply("process", "restarting", 1)
    actor.apply("table", "alive", 2)
    watcher.learn(actor, ray.exceptions.ActorDiedError(), mark)
    assert actor.state is ActorState.ALIVE
    # Nor is it when it names another actor.
    error = ray.exceptions.ActorDiedError()
    error.actor_id = "cd" * 16
    watcher.learn(actor, error, actor.losses())
    assert actor.state is ActorState.ALIVE
    watcher.learn(actor, ray.exceptions.ActorDiedError(), actor.losses())
    assert actor.state is ActorState.DEAD
    assert actor.belief() == ("dead", "call", 2)


ROWS: dict[str, tuple[dict[str, Any], type[Exception], str, bool]] = {
    "runtime_env_failed_context": ({"error_message": "no such zip"}, RAYS["RuntimeEnvSetupError"], "no such zip", True),
    "actor_unschedulable_context": ({"error_message": "no node"}, RAYS["ActorUnschedulableError"], "no node", True),
    "oom_context": ({"error_message": "too much"}, RAYS["OutOfMemoryError"], "too much", False),
    "actor_died_error_context": ({"error_message": "killed"}, RAYS["ActorDiedError"], "killed", False),
}


@pytest.mark.parametrize("context", sorted(ROWS))
@pytest.mark.parametrize("restarts", [0, 1])
def test_rows_of_dead_actors(context: str, restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, cls, text, at_creation = ROWS[context]
    row = gcs_pb2.ActorTableData(state=gcs_pb2.ActorTableData.DEAD, num_restarts=restarts, max_restarts=5)
    getattr(row.death_cause, context).CopyFrom(
        type(getattr(row.death_cause, context))(**fields, **({"actor_id": b"a" * 16} if "died" in context else {}))
    )
    monkeypatch.setattr(_ray_compat, "_read_table", lambda _: row.SerializeToString())
    read = _ray_compat.read_actor_table(ray.ActorID(b"a" * 16))
    assert read is not None
    assert type(read.death) is cls
    assert text in str(read.death)
    assert read.unborn is (at_creation and restarts == 0)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"max_restarts": 0}, False),
        ({"max_restarts": -1, "num_restarts": 9}, True),
        ({"max_restarts": 2, "num_restarts": 1}, True),
        ({"max_restarts": 2, "num_restarts": 2}, False),
        # What a node that was taken away costs is free.
        ({"max_restarts": 2, "num_restarts": 2, "num_restarts_due_to_node_preemption": 1}, True),
        ({"max_restarts": 2, "num_restarts": 2, "preempted": True}, True),
        ({"max_restarts": 0, "preempted": True}, False),
    ],
)
def test_how_many_restarts_are_left(fields: dict[str, Any], left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not set(fields) <= set(gcs_pb2.ActorTableData.DESCRIPTOR.fields_by_name):
        pytest.skip("this Ray does not count them")
    row = gcs_pb2.ActorTableData(state=gcs_pb2.ActorTableData.ALIVE, **fields)
    monkeypatch.setattr(_ray_compat, "_read_table", lambda _: row.SerializeToString())
    read = _ray_compat.read_actor_table(ray.ActorID(b"a" * 16))
    assert read is not None
    assert read.restarts_left is left
