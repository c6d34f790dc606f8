"""The errors that actorsub raises, and the states they speak of.

Every class is also Ray's own class for the same thing, so `except ray.exceptions.RayActorError` goes on working. Each
error carries a certificate: `sent`, `state`, `evidence`, `actor_id`, `incarnation` (see CertifiedError).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import enum
from typing import Any

import ray.exceptions

from actorsub import _core


class ActorState(enum.Enum):
    """What this process believes about an actor."""

    UNKNOWN = "unknown"  #: Nobody has said anything yet.
    PENDING = "pending"  #: Never up so far: waiting for resources, or running its first constructor.
    ALIVE = "alive"  #: Takes calls.
    RESTARTING = "restarting"  #: Its process ended; Ray is making the next incarnation.
    #: Believed to run, but it does not answer, or its port refuses. Withdrawn when it answers; after a refusal, when
    #: Ray's table agrees, too.
    UNREACHABLE = "unreachable"
    DEAD = "dead"  #: Gone for good, as far as anybody knows.


_WHAT_IS_WRONG = {
    ActorState.UNKNOWN: "is in an unknown state",
    ActorState.PENDING: "was never up yet",
    ActorState.ALIVE: "was lost",
    ActorState.RESTARTING: "is restarting",
    ActorState.UNREACHABLE: "cannot be reached",
    ActorState.DEAD: "is dead",
}


def _describe(error: Any) -> str:
    """One line from the certificate; made only when somebody reads the error."""
    known = [] if error.incarnation is None else [f"incarnation {error.incarnation}"]
    known += [] if error.evidence is None else [f"evidence: {error.evidence}"]
    headline = getattr(error, "_HEADLINE", None)
    if headline is None:
        headline = f"The actor {error.actor_id or '(id unknown)'} {_WHAT_IS_WRONG[error.state]}"
    elif error.actor_id is not None:
        known.insert(0, f"actor {error.actor_id}, {error.state.value}")
    text = f"{headline} ({', '.join(known)})." if known else f"{headline}."
    if error.detail:
        text += f" {error.detail}"
    tried = [f"{one.actor_id[:8]} {one.error} ({'sent' if one.sent else 'not sent'})" for one in error.attempts]
    if tried:
        text += f" Tried: {', '.join(tried)}."
    if error.sent:
        return text + " The call may or may not have run."
    return text + " The call never left this process and cannot have run."


def _rebuild(cls: Any, certificate: dict[str, Any], extra: dict[str, Any]) -> Any:
    error = cls.__new__(cls)
    error._certify(**certificate)
    error.__dict__.update(extra)
    return error


class _Readable:
    """What the classes below share on top of CertifiedError."""

    #: What a call of a ReplicaGroup tried, in order; empty for other calls.
    attempts: tuple[Attempt, ...] = ()

    # Ray's classes read these two, and set them in constructors that are not run here.
    _preempted = False
    _actor_init_failed = False

    def __str__(self) -> str:
        return str(self.error_msg)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error_msg!r})"

    @property
    def error_msg(self) -> str:
        return _describe(self)

    def __reduce__(self) -> tuple[Any, ...]:
        extra = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return _rebuild, (type(self), self._certificate(), extra)  # type: ignore[attr-defined]


class ActorUnavailableError(_Readable, _core.CertifiedError, ray.exceptions.ActorUnavailableError):
    """The actor cannot take calls now, or was lost while the call was in flight; it may come back.

    Args:
        detail: a sentence for the message, beside what the certificate says.
        actor_id: hex, as Ray prints it.
        sent, state, evidence, incarnation: the certificate, see the properties of the same names.
    """

    def __init__(
        self,
        detail: str | None = None,
        *,
        actor_id: str | None = None,
        sent: bool = True,
        state: ActorState = ActorState.UNKNOWN,
        evidence: str | None = None,
        incarnation: int | None = None,
    ) -> None:
        self._certify(
            actor_id=actor_id,
            sent=sent,
            state=state.value,
            evidence=evidence or "none",
            incarnation=incarnation,
            detail=detail,
        )


class ActorDiedError(_Readable, _core.CertifiedError, ray.exceptions.ActorDiedError):
    """The actor is gone for good. `preempted`, `actor_init_failed` and the message come from Ray, as soon as Ray knows.

    Args:
        cause: Ray's own ActorDiedError, whose facts are taken over; None when the cause is not known.
        actor_id, sent, state, evidence, incarnation: the certificate, see the properties of the same names.
    """

    _cause_text: str | None = None

    def __init__(
        self,
        cause: ray.exceptions.ActorDiedError | None = None,
        *,
        actor_id: str | None = None,
        sent: bool = True,
        state: ActorState = ActorState.DEAD,
        evidence: str | None = None,
        incarnation: int | None = None,
    ) -> None:
        self._certify(
            actor_id=actor_id, sent=sent, state=state.value, evidence=evidence or "none", incarnation=incarnation
        )
        self._take_cause(cause)

    def _take_cause(self, cause: ray.exceptions.ActorDiedError | None) -> None:
        if cause is not None:
            self._cause_text = str(cause)
            self._preempted = bool(cause.preempted)
            self._actor_init_failed = bool(cause.actor_init_failed)

    @property
    def error_msg(self) -> str:
        text = _describe(self)
        return f"{text}\n{self._cause_text}" if self._cause_text else text


class _Certified:
    """The certificate in plain attributes, for classes whose Ray base allows no other native base."""

    # In the class too, and there in doubt: when a method lets this error out, its caller gets a RayTaskError that is of
    # this class as well and asks its cause for what it lacks itself, but the cause's certificate is about another call.

    #: hex, as Ray prints it; None when unknown.
    actor_id: str | None = None
    #: False: the call never left this process and cannot have run. True: it may or may not have run.
    sent: bool = True
    #: The ActorState at that moment.
    state: ActorState = ActorState.UNKNOWN
    #: Which source said so; None when no source did.
    evidence: str | None = None
    #: Ray's restart count at that moment; None when unknown.
    incarnation: int | None = None
    detail: str | None = None
    #: What a call of a ReplicaGroup tried, in order; empty for other calls.
    attempts: tuple[Attempt, ...] = ()

    def __init__(
        self,
        detail: str | None = None,
        *,
        actor_id: str | None = None,
        sent: bool = True,
        state: ActorState = ActorState.UNKNOWN,
        evidence: str | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.actor_id = actor_id
        self.sent = sent
        self.state = state
        self.evidence = evidence
        self.incarnation = incarnation
        self.detail = detail
        super().__init__(str(self))  # type: ignore[call-arg]

    def __str__(self) -> str:
        return _describe(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_plain, (type(self), dict(self.__dict__))


def _rebuild_plain(cls: Any, attributes: dict[str, Any]) -> Any:
    error = cls.__new__(cls)
    error.__dict__.update(attributes)
    error.args = (str(error),)
    return error


# Until Python 3.10 these were classes of their own; and TimeoutError is one through Ray's GetTimeoutError.
_OTHER_TIMEOUTS = [
    one for one in (asyncio.TimeoutError, concurrent.futures.TimeoutError) if not issubclass(one, TimeoutError)
]


class DeadlineExceededError(_Certified, ray.exceptions.GetTimeoutError, *_OTHER_TIMEOUTS):  # type: ignore[misc]
    """The deadline of a call, or of a wait for its actor, has passed.

    Also a TimeoutError, that of asyncio and of concurrent.futures included. Carries the same certificate as the others.
    """

    _HEADLINE = "The deadline of the call passed"


class QueueFullError(_Certified, ray.exceptions.PendingCallsLimitExceeded):
    """As many calls as `max_queued` allows wait for the actor already. Raised by `.call()` itself; never sent."""

    _HEADLINE = "Too many calls wait already"

    def __init__(self, detail: str | None = None, *, sent: bool = False, **certificate: Any) -> None:
        super().__init__(detail, sent=sent, **certificate)


class NoReplicaError(ActorUnavailableError):
    """No member of a ReplicaGroup could take the call. `attempts` says what was tried; `sent` is True only where one of
    the attempts may have run."""

    _HEADLINE = "No member of the group can take the call"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try of a call of a group, in the `attempts` of the error that it ended with."""

    actor_id: str  #: hex, of the member
    error: str  #: name of the error's class
    evidence: str | None  #: as in the error
    sent: bool  #: whether this try may have run


def refusal(actor: _core.Actor, detail: str | None = None) -> ActorUnavailableError:
    """The error of a call that is refused here, from what is believed about the actor now."""
    error = ActorUnavailableError.__new__(ActorUnavailableError)
    error._certify_refusal(actor, detail)
    return error


def death(actor: _core.Actor) -> ActorDiedError:
    """The error of a call that is refused here because the actor is dead."""
    error = ActorDiedError.__new__(ActorDiedError)
    error._certify_refusal(actor)
    error._take_cause(actor.death)
    return error


def loss(actor: _core.Actor) -> Any:
    """The error of a call that was in flight when its incarnation was lost."""
    cls: Any = ActorDiedError if actor.state is ActorState.DEAD else ActorUnavailableError
    error = cls.__new__(cls)
    error._certify_loss(actor)
    if cls is ActorDiedError:
        error._take_cause(actor.death)
    return error


def certified(value: Any, actor: _core.Actor) -> Any:
    """Ray's own error about the actor of a call, with a certificate; anything else as it is.

    A RayTaskError is the application's, also when its cause is the death of some other actor.
    """
    if not isinstance(value, ray.exceptions.RayActorError) or isinstance(
        value, (ray.exceptions.RayTaskError, _core.CertifiedError)
    ):
        return value
    error: ActorUnavailableError | ActorDiedError
    if isinstance(value, ray.exceptions.ActorDiedError):
        error = ActorDiedError(value, actor_id=actor.key.hex(), evidence="call")
    elif isinstance(value, ray.exceptions.ActorUnavailableError):
        error = ActorUnavailableError(str(value), actor_id=actor.key.hex(), state=actor.state, evidence="call")
    else:
        return value
    return error


def deadline(actor: _core.Actor, detail: str | None = None, *, sent: bool) -> DeadlineExceededError:
    """The error of a call whose time ran out: here, before it was sent, or there."""
    state, evidence, incarnation = actor.belief()
    if not sent:
        actor.count_refused("deadline")
    return DeadlineExceededError(
        detail,
        actor_id=actor.key.hex(),
        sent=sent,
        state=ActorState(state),
        evidence=None if evidence == "none" else evidence,
        incarnation=incarnation,
    )


def queue_full(actor: _core.Actor, detail: str) -> QueueFullError:
    """The error of a call for which there was no room in the line."""
    state, evidence, incarnation = actor.belief()
    return QueueFullError(
        detail,
        actor_id=actor.key.hex(),
        state=ActorState(state),
        evidence=None if evidence == "none" else evidence,
        incarnation=incarnation,
    )
