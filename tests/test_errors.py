"""The errors: whose classes they also are, what they certify, and that they travel."""

from __future__ import annotations

import copy
import pickle

import pytest
import ray.exceptions
from ray import cloudpickle

import actorsub
from actorsub import ActorState, _core

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
        f"The actor {'ab' * 16} is restarting (incarnation 3, evidence: ray). "
        "The call never left this process and cannot have run."
    )
    assert str(actorsub.ActorUnavailableError()) == (
        "The actor (id unknown) is in an unknown state. The call may or may not have run."
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
