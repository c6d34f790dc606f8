"""The errors that actorsub raises, and the states they speak of.

Every class is also Ray's own class for the same thing, so `except ray.exceptions.RayActorError` goes on working. Each
error carries a certificate: `sent`, `state`, `evidence`, `actor_id`, `incarnation` (see CertifiedError).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import dataclasses
import enum
import functools
from typing import Any

import ray.exceptions

from actorsub import _core


class ActorState(enum.Enum):
    """What this process believes about an actor.

        >>> actorsub.state(worker) is actorsub.ActorState.ALIVE
        True

    UNKNOWN: nothing is known yet, or the connection to Ray that the handle belongs to has ended.
    PENDING: it was never up so far: it waits for resources, or runs its first constructor.
    ALIVE: it takes calls.
    RESTARTING: its process ended, and Ray starts the next one.
    UNREACHABLE: it is believed to run, but it does not answer, or its port refuses connections. It is ALIVE again when
    it answers; after a refusal Ray's actor table has to say so, too.
    DEAD: it is gone for good, as far as anybody knows.

    The value of a member is its name in lower case.
    """

    UNKNOWN = "unknown"
    PENDING = "pending"
    ALIVE = "alive"
    RESTARTING = "restarting"
    UNREACHABLE = "unreachable"
    DEAD = "dead"


class Kind(enum.Enum):
    """What an error of Ray's that ended a call is about. Decides the class that the caller gets, and what a group does
    with the call."""

    DIED = "died"  #: The actor is gone for good; the caller gets an ActorDiedError that is of Ray's class, too.
    LOST = "lost"  #: Its process was lost, or is out of reach; an ActorUnavailableError that is of Ray's class, too.
    RESULT = "result"  #: The call may have run, and there is no result; Ray's error with a certificate.
    OWN = "own"  #: The application's error, or wanted, or a misuse; as RESULT, but no other actor could do better.


#: The Kind of each class of ray.exceptions. A subclass that is not named here has that of its base.
KINDS = {
    "ActorDiedError": Kind.DIED,
    "ActorPlacementGroupRemoved": Kind.DIED,
    "ActorUnschedulableError": Kind.DIED,
    "OutOfMemoryError": Kind.DIED,
    "RuntimeEnvSetupError": Kind.DIED,
    "ActorUnavailableError": Kind.LOST,
    "LocalRayletDiedError": Kind.LOST,
    "NodeDiedError": Kind.LOST,
    "RayActorError": Kind.LOST,
    "TaskPlacementGroupRemoved": Kind.LOST,
    "TaskUnschedulableError": Kind.LOST,
    "WorkerCrashedError": Kind.LOST,
    "ObjectFetchTimedOutError": Kind.RESULT,
    "ObjectFreedError": Kind.RESULT,
    "ObjectLostError": Kind.RESULT,
    "ObjectReconstructionFailedError": Kind.RESULT,
    "ObjectReconstructionFailedLineageEvictedError": Kind.RESULT,  # Up to Ray 2.49.
    "ObjectReconstructionFailedMaxAttemptsExceededError": Kind.RESULT,  # Up to Ray 2.49.
    "ObjectStoreFullError": Kind.RESULT,
    "OutOfDiskError": Kind.RESULT,
    "OwnerDiedError": Kind.RESULT,
    "RayError": Kind.RESULT,
    "RaySystemError": Kind.RESULT,
    "ReferenceCountingAssertionError": Kind.RESULT,
    "RpcError": Kind.RESULT,
    "ActorAlreadyExistsError": Kind.OWN,
    "ActorHandleNotFoundError": Kind.OWN,
    "AsyncioActorExit": Kind.OWN,
    "AuthenticationError": Kind.OWN,
    "CrossLanguageError": Kind.OWN,
    "GetTimeoutError": Kind.OWN,
    "ObjectRefStreamEndOfStreamError": Kind.OWN,
    "OufOfBandObjectRefSerializationException": Kind.OWN,
    "PendingCallsLimitExceeded": Kind.OWN,
    "PlasmaObjectNotAvailable": Kind.OWN,
    "RayCgraphCapacityExceeded": Kind.OWN,
    "RayChannelError": Kind.OWN,
    "RayChannelTimeoutError": Kind.OWN,
    "RayDirectTransportError": Kind.OWN,
    "RayTaskError": Kind.OWN,
    "StreamingGeneratorReplayInconsistentError": Kind.OWN,
    "TaskCancelledError": Kind.OWN,
    "UnserializableException": Kind.OWN,
    "UserCodeException": Kind.OWN,
}


def kind_of(error: BaseException) -> Kind:
    """What an error is about; OWN for one that is not Ray's."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return Kind.OWN
    for base in type(error).__mro__:
        if base.__module__ == ray.exceptions.__name__ and base.__name__ in KINDS:
            return KINDS[base.__name__]
    return Kind.OWN


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
    headline = error._HEADLINE
    if error._NAMES_ACTOR:
        headline = headline.format(actor=error.actor_id or "(id unknown)", wrong=_WHAT_IS_WRONG[error.state])
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
    return text + f" {error._WHY_UNSENT} and cannot have run."


@functools.cache
def _both(ours: Any, rays: Any) -> Any:
    """`ours` for an error that Ray has a class of its own for: a class that is both, so that `except` finds either."""
    if issubclass(ours, rays):
        return ours
    return type(f"{ours.__name__}({rays.__name__})", (ours, rays), {"__module__": __name__, "_both": (ours, rays)})


def _rebuild(cls: Any, certificate: dict[str, Any], extra: dict[str, Any]) -> Any:
    if isinstance(cls, tuple):
        cls = _both(*cls)
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

    #: What Ray says of it, in Ray's words; None: not known when the error was made.
    _cause_text: str | None = None
    # Of a class that `_both` has made: its arguments.
    _both: tuple[Any, Any] | None = None
    _WHY_UNSENT = "The call never left this process"

    def _take_cause(self, cause: ray.exceptions.RayError | None) -> None:
        if cause is None:
            return
        self._cause_text = str(cause)
        self._preempted = bool(getattr(cause, "preempted", False))
        self._actor_init_failed = bool(getattr(cause, "actor_init_failed", False))
        for name, value in vars(cause).items():
            # What Ray's class has beside what is certified: `error_message`, say.
            if not hasattr(type(self), name) and not name.startswith("_"):
                self.__dict__[name] = value

    @property
    def preempted(self) -> bool:
        """True: the actor's node was taken away (a spot instance)."""
        actor: _core.Actor | None = self._actor  # type: ignore[attr-defined]
        if self._preempted or actor is None or actor.preempted is None:
            return self._preempted
        # A refusal names the incarnation to come.
        ended = actor.preempted + (self.state is ActorState.RESTARTING and not self.sent)  # type: ignore[attr-defined]
        return bool(self.incarnation == ended)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return str(self.error_msg)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error_msg!r})"

    @property
    def error_msg(self) -> str:
        text = _describe(self)
        return f"{self._cause_text}\n{text}" if self._cause_text else text

    def __reduce__(self) -> tuple[Any, ...]:
        extra = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        # Where it arrives there is no record to ask.
        extra["_preempted"] = self.preempted
        return _rebuild, (self._both or type(self), self._certificate(), extra)  # type: ignore[attr-defined]


class ActorUnavailableError(_Readable, _core.CertifiedError, ray.exceptions.ActorUnavailableError):
    """The actor cannot take calls now, or was lost while the call was in flight; it may come back.

        >>> except actorsub.ActorUnavailableError as error:
        ...     retry = not error.sent

    Args, and attributes of the same names:
        detail: a sentence for the message; None: none.
        actor_id: in hex, as Ray prints it; None when unknown.
        sent: False: the call cannot have run. True: it may or may not have run.
        state: the ActorState at that moment.
        evidence: which source said so; None when none did. "ray": Ray's local state. "table": Ray's actor table.
            "process": the actor's process. "connection": its RPC port. "silence": no answer from there. "call": the
            outcome of a call.
        incarnation: Ray's restart count, which tells the processes of the actor apart; None when unknown. In the
            refusal of a restarting actor it is that of the process to come, in a loss that of the process which had
            the call.

    Further attributes: `preempted` (True: the actor's node was taken away), `attempts` (a tuple of what a call of a
    ReplicaGroup tried, in order; empty for other calls).
    """

    # Begins as Ray's own message does.
    _NAMES_ACTOR = True
    _HEADLINE = "The actor {actor} is unavailable: it {wrong}"

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
    """The actor is gone for good.

        >>> except actorsub.ActorDiedError as error:
        ...     replace(error.actor_id, at_once=error.preempted)

    Args:
        cause: Ray's own error, whose message and facts are taken over; None when the cause is not known.
        actor_id, sent, state, evidence, incarnation: as in ActorUnavailableError, also as attributes.

    Further attributes: `preempted` (True: the actor's node was taken away), `actor_init_failed` (True: its constructor
    failed), `attempts` (as in ActorUnavailableError). The first two and the message come from Ray. An error that was
    raised before this process knew them shows them, too, once they are known.
    """

    _NAMES_ACTOR = True
    _HEADLINE = "The actor {actor} {wrong}"

    def __init__(
        self,
        cause: ray.exceptions.RayError | None = None,
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

    def _learn(self) -> None:
        """Takes over what the actor's record has heard since."""
        if self._cause_text is None and self._actor is not None:
            self._take_cause(self._actor.death)

    @property
    def error_msg(self) -> str:
        self._learn()
        # Ray's first sentence, where nothing more is known.
        return f"{self._cause_text or ray.exceptions.ActorDiedError.BASE_ERROR_MSG}\n{_describe(self)}"

    @property
    def preempted(self) -> bool:
        """True: the actor died because its node was taken away (a spot instance)."""
        self._learn()
        return super().preempted

    @property
    def actor_init_failed(self) -> bool:
        """True: the actor died in its constructor."""
        self._learn()
        return self._actor_init_failed

    def __reduce__(self) -> tuple[Any, ...]:
        self._learn()
        return super().__reduce__()


class _Certified:
    """The certificate in plain attributes, for classes whose Ray base allows no other native base."""

    # In the class too, and there in doubt: when a method lets this error out, its caller gets a RayTaskError that is of
    # this class as well and asks its cause for what it lacks itself, but the cause's certificate is about another call.

    #: hex, as Ray prints it; None when unknown.
    actor_id: str | None = None
    #: False: the call cannot have run. True: it may or may not have run.
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
    _NAMES_ACTOR = False
    _WHY_UNSENT = "The call never left this process"

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

        >>> except actorsub.DeadlineExceededError as error:
        ...     log(error.actor_id, "may run still" if error.sent else "never ran")

    It is also a TimeoutError, an asyncio.TimeoutError and a concurrent.futures.TimeoutError.

    Args, and attributes of the same names: those of ActorUnavailableError. Further attribute: `attempts`.
    """

    # Ray's own sentence, and ours.
    _HEADLINE = "Get timed out: some object(s) not ready. The deadline of the call passed"


class QueueFullError(_Certified, ray.exceptions.PendingCallsLimitExceeded):
    """As many calls as `max_queued` allows wait for the actor, or the group, already. `.call()` itself raises it.

        >>> except actorsub.QueueFullError:
        ...     return Response(status=503)

    So does `.remote()` of a group's method. Ray's own limit for an actor (`max_pending_calls`) gives a `.call()` this
    error, too; one that has waited in line ends with it.

    Args, and attributes of the same names: those of ActorUnavailableError. `sent` is False, unless it is a call of a
    ReplicaGroup and an earlier attempt may have run. Further attribute: `attempts`. Further argument:
        cause: Ray's error if it is Ray's limit, for the message; None: it is the limit of this library.
    """

    _HEADLINE = "Too many calls wait already"

    def __init__(
        self, detail: str | None = None, *, sent: bool = False, cause: Exception | None = None, **certificate: Any
    ) -> None:
        if cause is not None:
            # Ray's own limit, in Ray's words.
            self._HEADLINE = str(cause).rstrip(".")
        super().__init__(detail, sent=sent, **certificate)


class NoReplicaError(ActorUnavailableError):
    """No member of a ReplicaGroup could take the call.

        >>> except actorsub.NoReplicaError as error:
        ...     log([(attempt.actor_id, attempt.error) for attempt in error.attempts])

    Args, and attributes of the same names: those of ActorUnavailableError. `attempts` says what was tried, in order.
    Each Attempt has `actor_id` (hex), `error` (the name of its class), `evidence` and `sent`. The error's own `sent` is
    True if one of the attempts may have run.
    """

    _NAMES_ACTOR = False
    _HEADLINE = "No member of the group can take the call"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try of a call of a group, in `attempts` of the call and of the error that the call ended with.

    Attributes:
        actor_id: of the member, in hex.
        error: the name of the class of the error that the try ended with.
        evidence: as in that error; see ActorUnavailableError.
        sent: False: this try cannot have run. True: it may or may not have run.
    """

    actor_id: str
    error: str
    evidence: str | None
    sent: bool


def as_raised(error: Any) -> Any:
    """The error as `ray.get` raises it: a method's own is also of the class that it raised, whose code may run."""
    return error.as_instanceof_cause() if type(error) is ray.exceptions.RayTaskError else error


def may_have_run(error: BaseException) -> bool:
    """Whether the call that ended with `error` may have run. Takes any exception of a call.

        >>> except Exception as error:
        ...     again = not actorsub.may_have_run(error)

    False: the error says `sent=False`, so the call cannot have run and can be made again anywhere. True: all other
    errors. Those are errors with `sent=True`, exceptions of the method (ray.exceptions.RayTaskError, also where the
    cause is another actor's death), and exceptions that are not of this library.

    Raises TypeError if `error` is no exception.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"may_have_run takes the exception that a call ended with, got {error!r}")
    if isinstance(error, ray.exceptions.RayTaskError):
        return True
    return not (isinstance(error, (_core.CertifiedError, _Certified)) and error.sent is False)


def refusal(actor: _core.Actor, detail: str | None = None) -> ActorUnavailableError:
    """The error of a call that is refused here, from what is believed about the actor now."""
    error = ActorUnavailableError.__new__(ActorUnavailableError)
    error._certify_refusal(actor, detail)
    return error


def death(actor: _core.Actor) -> ActorDiedError:
    """The error of a call that is refused here because the actor is dead."""
    error: ActorDiedError = _new(ActorDiedError, actor.death)
    error._certify_refusal(actor)
    return error


def loss(actor: _core.Actor) -> Any:
    """The error of a call that was in flight when its incarnation was lost."""
    is_dead = actor.state is ActorState.DEAD
    error = _new(ActorDiedError, actor.death) if is_dead else _new(ActorUnavailableError, None)
    error._certify_loss(actor)
    return error


def _new(ours: Any, cause: Any) -> Any:
    cls: Any = ours if cause is None else _both(ours, cause.__class__)
    error = cls.__new__(cls)
    error._take_cause(cause)
    return error


def certified(value: Any, actor: _core.Actor, mark: int) -> Any:
    """Ray's own error for a call of the actor, with a certificate. `mark`: the actor's losses() when it was sent.

    An error of the method (RayTaskError) is the application's, and stays as it is; it ran.
    """
    if isinstance(value, ray.exceptions.RayTaskError):
        if isinstance(value.cause, ray.exceptions.TaskCancelledError):
            _stamp(value.cause, actor, mark)
        return value
    if isinstance(value, (_core.CertifiedError, _Certified)):
        return as_value_of_a_call(value)
    kind = kind_of(value)
    if kind in (Kind.DIED, Kind.LOST):
        error = _new(ActorDiedError if kind is Kind.DIED else ActorUnavailableError, value)
        sent = kind is Kind.LOST or not is_unborn(actor)
        error._certify(**{**_certificate(actor, mark), "state": actor.state_name}, sent=sent, actor=actor)
        if not sent:
            error._WHY_UNSENT = "The actor was never up: the call never reached it"
        return error
    _stamp(value, actor, mark)
    return value


def is_unborn(actor: _core.Actor) -> bool:
    """True where the actor's table says that it died without ever having been up: no call can have run."""
    return actor.row is not None and actor.row.unborn


def as_value_of_a_call(value: Any) -> Any:
    """An error object that a method returned, to be raised as Ray does. It then says `sent=True`: this call did run,
    and what the error says is about another one."""
    if getattr(value, "sent", None) is not False or not isinstance(value, (_core.CertifiedError, _Certified)):
        return value
    value = copy.copy(value)
    resign(value, sent=True)
    return value


def resign(error: Any, *, sent: bool) -> None:
    """Changes what an error certifies."""
    if isinstance(error, _core.CertifiedError):
        error._certify(**{**error._certificate(), "sent": sent})
    else:
        error.sent = sent


def _certificate(actor: _core.Actor, mark: int) -> dict[str, Any]:
    _, _, incarnation = actor.belief()
    losses = actor.losses()
    if losses > mark:
        # It was lost here before, and the present one is another.
        incarnation = actor.lost_incarnation if losses == mark + 1 else None
    return {"actor_id": actor.key.hex(), "evidence": "call", "incarnation": incarnation}


def _stamp(error: Any, actor: _core.Actor, mark: int) -> None:
    """The certificate on an error of Ray's that keeps its class."""
    error.__dict__.update(_certificate(actor, mark), sent=True, state=actor.state)


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


def queue_full(
    actor: _core.Actor, detail: str | None, cause: ray.exceptions.PendingCallsLimitExceeded | None = None
) -> QueueFullError:
    """The error of a call for which there was no room in the line, or with Ray (`cause`)."""
    state, evidence, incarnation = actor.belief()
    return QueueFullError(
        detail,
        cause=cause,
        actor_id=actor.key.hex(),
        state=ActorState(state),
        evidence=None if evidence == "none" else evidence,
        incarnation=incarnation,
    )
