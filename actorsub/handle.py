"""The wrapped handle, its methods, and the ways to get one: `wrap`, `remote`, `get_actor`."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
import ray.actor

from actorsub import _core, _ray_compat, calls, listeners, refs, submit, watcher
from actorsub.policy import DEFAULT_POLICY, OPTION_NAMES, Policy, check_names, shown, split_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from actorsub.policy import PolicyOptions

_CLIENT = (
    "actorsub does not work through Ray Client (ray://): the actor's state and process are not visible from here. "
    "Connect with ray.init(address=...) from a machine of the cluster instead"
)


#: How many variants by `.options()` a method keeps. Few: each takes 1 to 2 kB, and there may be thousands of handles.
MAX_VARIANTS = 8
_PLAIN_OPTIONS = frozenset((bool, int, float, str, type(None)))


def _key_of(options: dict[str, Any]) -> tuple[Any, ...] | None:
    """A key that equal sets of options share.

    None where the method has to be made anew each time: for values that may change, and for words as `num_returns`,
    some of which Ray warns of.
    """
    for value in options.values():
        if type(value) not in _PLAIN_OPTIONS:
            return None
    if type(options.get("num_returns")) is str:
        return None
    # The types, because 1 == 1.0 == True, and not every option takes all three.
    return tuple([(name, type(value), value) for name, value in options.items()])


class ActorMethod(_core.MethodBase, ray.actor.ActorMethod):
    """One method of a wrapped handle. `remote` is in the core; the rest is looked up in Ray's own method object."""

    def __init__(self) -> None:
        raise TypeError("method objects are made by handles: handle.method")

    def options(self, **options: Any) -> ActorMethod:
        """The same method with options for the calls made through it: Ray's, and those of Policy.

        Raises TypeError for an option that neither knows, ValueError or TypeError for a value that one does not take.
        """
        key = _key_of(options)
        if key is None:
            return self._vary(options)
        # Services say the same thing at each call, and making a method takes longer than submitting.
        made = self._actorsub_variants
        variant: ActorMethod | None = made.get(key)
        if variant is None:
            variant = self._vary(options)
            if len(made) >= MAX_VARIANTS:
                made.clear()
            made[key] = variant
        return variant

    def _vary(self, options: dict[str, Any]) -> ActorMethod:
        ours, rays = split_options(options)
        policy = self._actorsub_policy.replace(**ours)
        if not rays:
            method = ActorMethod.__new__(ActorMethod)
            method.__dict__.update(self.__dict__)
            _core.fill_variant(method, self, policy, _wish_of(policy, self._actorsub_inner, self._actorsub_options))
            return method
        known = _ray_compat.method_option_names()
        for name in rays:
            if known is not None and name not in known:
                accepted = ", ".join(sorted(known))
                raise TypeError(
                    f"{self._actorsub_name}.options() got an unknown option {name!r}. "
                    f"Ray takes {accepted}; actorsub takes {', '.join(OPTION_NAMES)}"
                )
        merged = {**(self._actorsub_options or {}), **rays}
        return _make_method(
            self._actorsub_actor, self._actorsub_handle, self._actorsub_name, self._actorsub_inner, merged, policy
        )

    def call(self, *args: Any, **kwargs: Any) -> calls.Call:
        """Calls the method as a request: with a deadline, a place in line, and exactly one end. See Call and Policy.

            >>> worker.infer.options(timeout_s=0.5).call(x).result()

        Never waits for the actor. Arguments are taken as they are now, also if the call has to wait in line. The result
        of a streaming method is the stream, as soon as the call was sent. Its deadline covers only the waiting, and it
        counts for `max_in_flight` until the stream ends.

        Raises:
            TypeError: the arguments do not fit the method, or cannot be pickled.
            QueueFullError: too many calls wait already.
            ActorUnavailableError, ActorDiedError, DeadlineExceededError: the call is refused and `on_unavailable` is
                "raise". With the other values the Call fails.
        """
        return calls.submit_call(self, args, kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Ray's `.bind`: makes a node of a DAG. The DAG submits the call by itself; no policy applies to it."""
        inner = self._actorsub_inner
        return (inner.options(**self._actorsub_options) if self._actorsub_options else inner).bind(*args, **kwargs)

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        # Libraries call this one with Ray's options.
        method = self.options(**options) if options else self
        return method.remote(*(args or ()), **(kwargs or {}))

    def __repr__(self) -> str:
        return f"<method {self._actorsub_name} of {self._actorsub_handle!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        handle = _make_handle(self._actorsub_handle, self._actorsub_actor, self._actorsub_policy)
        return _method_of, (handle, self._actorsub_name, self._actorsub_options or {})


def _method_of(handle: ActorHandle, name: str, options: dict[str, Any]) -> ActorMethod:
    method: ActorMethod = getattr(handle, name)
    return method.options(**options) if options else method


def _make_method(
    actor: _core.Actor, handle: ray.actor.ActorHandle, name: str, inner: Any, options: Any, policy: Policy
) -> ActorMethod:
    method = ActorMethod.__new__(ActorMethod)
    call = _ray_compat.call_with_options(inner, options) if options else inner.remote
    # What Ray's code, and libraries that know it, read from a method: as attributes of its own rather than through
    # __getattr__, which would cost a bound method at every `.remote`.
    method.__dict__.update(inner.__dict__)
    early = refs.is_bound() and _ray_compat.fails_early(inner, options)
    parts = _ray_compat.submission_of(inner, options)
    submission = None if parts is None else _core.Submission(*parts)
    wish = _wish_of(policy, inner, options)
    return _core.fill_method(method, actor, handle, name, inner, call, options, policy, wish, early, submission)


def _wish_of(policy: Policy, inner: Any, options: dict[str, Any] | None) -> str:
    """What `.remote()` does while the actor is away. Settles what "auto" means, once for each method object."""
    if policy.on_unavailable != "auto":
        return policy.on_unavailable
    return "ray" if _ray_compat.resends(inner, options) else "ref"


class ActorHandle(_core.HandleBase, ray.actor.ActorHandle):
    """A handle to an actor, in place of Ray's. It does all that a plain one does, and refuses calls as its policy says.

        >>> ref = worker.infer.remote(x)               # as with Ray
        >>> call = worker.infer.call(x)                # a request with a deadline, that can be cancelled

    `wrap`, `remote` and `get_actor` make it. It is equal to the plain handle and has the same hash. It holds Ray's own
    handle, which keeps the actor alive, and adds nothing to the actor's reference count. Its attributes are the methods
    of the actor; an unknown name raises Ray's AttributeError.

    `method.options(...)` takes Ray's options and those of Policy, for the calls made through it. Errors:
    `method.remote(...)` raises ActorUnavailableError, ActorDiedError or DeadlineExceededError where its Policy says
    "raise" or "wait". `method.call(...)` returns a Call, or raises as its own help says.
    """

    def __init__(self) -> None:
        raise TypeError("actorsub.wrap(handle) makes wrapped handles")

    def __getattr__(self, name: str) -> Any:
        inner = self._actorsub_inner
        if inner is None:
            # A half-built object, as copy and pickle make them.
            raise AttributeError(f"'ActorHandle' object has no attribute {name!r}")
        value = getattr(inner, name)
        if isinstance(value, ray.actor.ActorMethod):
            value = _make_method(self._actorsub_actor, inner, name, value, None, self._actorsub_policy)
            # Kept, so that the next access is a plain attribute. No cycle: a method knows only Ray's handle.
            self.__dict__[name] = value
        return value

    def __del__(self) -> None:
        # Ray's would take away a reference that belongs to the handle inside.
        pass

    def _serialization_helper(self) -> tuple[Any, Any, bool]:
        # Ray calls this when the handle itself is the value to be pickled: see _core.Traveller.
        serialized, handle_ref, weak_ref = _serialize(self)
        return _core.Traveller((serialized, weak_ref, self._actorsub_policy.changes)), handle_ref, weak_ref

    # `ActorHandle[Worker]` in annotations, as with Ray's class.
    __class_getitem__: Any = classmethod(types.GenericAlias)

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle and copy; inside Ray's own serialization `reduce_in_ray` comes first.
        if not _ray_compat.can_travel():
            return wrap_with_policy, (self._actorsub_inner, self._actorsub_policy)
        serialized, _, weak_ref = _serialize(self)
        return _core.rebuild_handle, (serialized, weak_ref, self._actorsub_policy.changes)


def _serialize(handle: ActorHandle) -> tuple[bytes, Any, bool]:
    if handle._actorsub_actor.session is not _ray_compat.session_token():
        # Ray's core would abort the process.
        raise RuntimeError(f"{handle!r} belongs to an earlier connection to Ray and cannot be sent over this one")
    return _ray_compat.serialize_handle(handle._actorsub_inner)


def reduce_in_ray(handle: ActorHandle) -> tuple[Any, ...]:
    serialized, handle_ref, weak_ref = _serialize(handle)
    _ray_compat.note_contained(handle_ref, weak_ref)
    return _core.rebuild_handle, (serialized, weak_ref, handle._actorsub_policy.changes)


def rebuild(serialized: bytes, weak_ref: bool, changes: dict[str, Any]) -> ActorHandle:
    handle = _ray_compat.deserialize_handle(serialized, weak_ref)
    return wrap_with_policy(handle, DEFAULT_POLICY.replace(**changes), received=True)


def _make_handle(inner: ray.actor.ActorHandle, actor: _core.Actor, policy: Policy) -> ActorHandle:
    handle = ActorHandle.__new__(ActorHandle)
    _core.fill_handle(handle, actor, inner, policy)
    _take_limits(actor, policy)
    # Ray's own code reads this one at every turn.
    handle.__dict__["_ray_actor_id"] = actor.ray_id
    return handle


def _take_limits(actor: _core.Actor, policy: Policy) -> None:
    """The actor is watched once for all its handles, with the shortest limits that any of them asked for."""
    if policy.detect != "auto":
        return
    in_flight_s = policy.silence_in_flight_s
    if actor.detects and actor.silence_in_flight_s is not None:
        in_flight_s = min(actor.silence_in_flight_s, math.inf if in_flight_s is None else in_flight_s)
    silence_s = min(actor.silence_s, policy.silence_timeout_s)
    if actor.detects and (silence_s, in_flight_s) == (actor.silence_s, actor.silence_in_flight_s):
        return
    begin = not actor.detects
    actor.silence_s, actor.silence_in_flight_s, actor.detects = silence_s, in_flight_s, True
    if actor.armed:
        _core.update_limits(actor)
    elif begin and actor.state_name != "unknown":
        # A first read is planned already.
        actor.next_read_s = _core.now_s()


def wrap_with_policy(handle: ray.actor.ActorHandle, policy: Policy, *, received: bool = False) -> ActorHandle:
    if isinstance(handle, ActorHandle):
        return _make_handle(handle._actorsub_inner, handle._actorsub_actor, policy)
    if not isinstance(handle, ray.actor.ActorHandle):
        if _ray_compat.is_client_handle(handle):
            raise TypeError(_CLIENT)
        raise TypeError(f"wrap() takes a Ray actor handle, got {shown(handle)} of type {type(handle).__name__}")
    _refuse_unusable_connection()
    _ray_compat.warn_once()
    actor = _core.actor_of(_ray_compat.actor_id_of(handle), _ray_compat.session_token())
    if actor.state_name == "unknown" and _ray_compat.is_original(handle):
        # Created a moment ago by this process: it cannot have been up before.
        actor.apply("table", "pending", 0, actor.version)
    if actor.state_name == "unknown" and actor.next_read_s == 0.0:
        # Nothing was planned yet. Before anything else, because the watcher may be looking.
        actor.unhurried = received
        actor.next_read_s = _core.now_s() + (watcher.RECEIVED_READ_S if received else 0.0)
    made = _make_handle(handle, actor, policy)
    running = watcher.ensure_if_possible()
    if running is None:
        return made
    if actor.unhurried and received:
        running.look_by(actor.next_read_s)
    elif not actor.armed:
        watcher.hurry(actor)
        running.nudge()
    return made


def wrap(handle: Any, **options: Unpack[PolicyOptions]) -> ActorHandle:
    """Makes a wrapped handle of any Ray actor handle.

        >>> worker = actorsub.wrap(plain, on_unavailable="raise")

    Args:
        handle: a `ray.actor.ActorHandle`. One that is wrapped already comes back as it is, or, with options, as a new
            handle whose policy is the old one with these options changed.
        **options: see Policy.

    Returns:
        ActorHandle: equal to `handle`, with the same hash.

    Raises:
        TypeError: `handle` is not a Ray actor handle, or belongs to Ray Client; or an option is unknown.
        ValueError: an option has a value that it does not take.
        RuntimeError: this process is connected by Ray Client, or is a fork that has its parent's connection.
    """
    check_names(options)
    if isinstance(handle, ActorHandle):
        _check_handle(handle)
        return wrap_with_policy(handle, handle._actorsub_policy.replace(**options)) if options else handle
    return wrap_with_policy(handle, DEFAULT_POLICY.replace(**options))


def get_actor(name: str, namespace: str | None = None, **options: Unpack[PolicyOptions]) -> ActorHandle:
    """Looks up a named actor, as `ray.get_actor` does, and returns a wrapped handle.

        >>> worker = actorsub.get_actor("worker-1", namespace="models", on_unavailable="raise")

    Args:
        name, namespace: as in `ray.get_actor`.
        **options: see Policy.

    Raises:
        ValueError: there is no such actor (raised by Ray), or an option has a value that it does not take.
        TypeError: an option is unknown.
        RuntimeError: this process is connected by Ray Client, or is a fork that has its parent's connection.
    """
    policy = DEFAULT_POLICY.replace(**options)
    _refuse_unusable_connection()
    return wrap_with_policy(ray.get_actor(name, namespace=namespace), policy)


def _refuse_unusable_connection() -> None:
    if _ray_compat.is_client_connected():
        raise RuntimeError(_CLIENT)
    if _ray_compat.is_inherited_session():
        raise RuntimeError(submit.PARENT)


# ---------------------------------------------------------------------------------------------------------------------
# Creation.


# `actorsub.remote` turns Ray's actor class (an instance of ray.actor.ActorClass) into one of a subclass with these two
# methods over Ray's. A subclass with one base, because only then may `__class__` be assigned.


def _create(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> ActorHandle:
    _refuse_unusable_connection()
    ours, rays = split_options(options)
    policy = self._actorsub_policy.replace(**ours)
    return _note_groups(self, wrap_with_policy(self._actorsub_ray_class._remote(self, args, kwargs, **rays), policy))


def _note_groups(actor_class: Any, handle: ActorHandle) -> ActorHandle:
    handle._actorsub_actor.method_groups = _ray_compat.concurrency_groups(actor_class)
    return handle


def _class_options(self: Any, **options: Any) -> _ActorClassOptions:
    """Takes Ray's options for an actor and those of Policy together. They override those of the class.

    Raises TypeError or ValueError for an option that is unknown or has a value that it does not take.
    """
    ours, rays = split_options(options)
    policy = self._actorsub_policy.replace(**ours)
    # With none of Ray's, its own `options()` would drop the concurrency groups from those of the class.
    inner = self._actorsub_ray_class.options(self, **rays) if rays else self
    return _ActorClassOptions(self, inner, policy)


class _ActorClassOptions:
    def __init__(self, actor_class: Any, inner: Any, policy: Policy) -> None:
        self._actor_class = actor_class
        self._inner = inner
        self._policy = policy

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        return _note_groups(self._actor_class, wrap_with_policy(self._inner.remote(*args, **kwargs), self._policy))

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.bind(*args, **kwargs)


def remote(*args: Any, **options: Any) -> Any:
    """`ray.remote` for actor classes whose handles come wrapped.

        >>> Worker = actorsub.remote(max_restarts=-1, on_unavailable="raise")(Worker)
        >>> worker = Worker.options(name="worker-1", timeout_s=1.0).remote()

    Use it bare (`@actorsub.remote`), with options (`@actorsub.remote(max_restarts=-1, on_unavailable="raise")`), or as
    a function (`actorsub.remote(Worker)`). It takes Ray's options for actors and those of Policy together, and so does
    `Worker.options(...)`.

    Raises:
        TypeError: it was given anything but a class (use `ray.remote` for functions), or an option whose name is close
            to one of Policy, or a value of a wrong type.
        ValueError: a value is out of range, or Ray does not know the option.
    """
    if len(args) == 1 and not options:
        return _make_actor_class(args[0], {})
    if args or not options:
        raise TypeError(
            "actorsub.remote is used bare on a class, or with keyword options only: "
            "@actorsub.remote(max_restarts=-1, on_unavailable='raise')"
        )
    # Checked now rather than when the class is there: the mistake is on this line.
    DEFAULT_POLICY.replace(**split_options(options)[0])
    return functools.partial(_make_actor_class, options=options)


def _make_actor_class(cls: Any, options: dict[str, Any]) -> Any:
    if isinstance(cls, ray.actor.ActorClass):
        raise TypeError(
            "actorsub.remote takes the plain class; this one went through ray.remote already. "
            "Use actorsub.remote instead of ray.remote, or actorsub.wrap on its handles"
        )
    if not inspect.isclass(cls):
        raise TypeError(f"actorsub.remote takes a class, got {shown(cls)}; for functions use ray.remote")
    ours, rays = split_options(options)
    actor_class = ray.remote(**rays)(cls) if rays else ray.remote(cls)
    ray_class = type(actor_class)
    actor_class.__class__ = type(
        ray_class.__name__,
        (ray_class,),
        {
            "__module__": ray_class.__module__,
            "_remote": _create,
            "options": _class_options,
            "_actorsub_ray_class": ray_class,
            "_actorsub_policy": DEFAULT_POLICY.replace(**ours),
        },
    )
    return actor_class


# ---------------------------------------------------------------------------------------------------------------------


def _check_handle(handle: Any) -> ActorHandle:
    if not isinstance(handle, ActorHandle) or handle._actorsub_actor is None:
        raise TypeError(
            f"expected a handle made by actorsub (actorsub.wrap makes one of any Ray handle), got {shown(handle)}"
        )
    return handle


def policy(handle: ActorHandle) -> Policy:
    """The Policy of a wrapped handle.

        >>> actorsub.policy(worker).on_unavailable
        'auto'

    Raises TypeError for anything but a wrapped handle.
    """
    found: Policy = _check_handle(handle)._actorsub_policy
    return found


def stats(handle: ActorHandle) -> dict[str, Any]:
    """Counts what happened to the calls to this actor in this process, over all its handles; no RPC.

        >>> actorsub.stats(worker)["refused"]["restarting"]
        0

    Returns a new dict:
        actor_id: hex.
        state, evidence, incarnation: an ActorState, and the fields of an error (see ActorUnavailableError).
        submitted: calls given to Ray.
        waited: those of them that were held back first.
        refused: by reason: "restarting", "unreachable", "dead", "pending", "deadline", "event_loop" ("wait" on a thread
            that must not block).
        entered: how often each state was entered.
        stale_reports: evidence that was older than what was known.
        failed_early: waits for refs in flight that were ended here, before Ray ended them.
        late_replies: outcomes that arrived after that.
        watched: True while the actor's process or connection is watched.
        calls: what became of the `.call()`s: `waiting` and `in_flight` now; `sent`, `completed`, `failed` (by class of
            the error), `expired_here` and `expired_there` (deadline passed before and after sending), `cancelled`,
            `lost`, `late_replies`, `refused_full`.
        sentinel: counters of the thread that watches processes and connections, for this whole process. They are named
            in csrc/sentinel.h (SentinelCounters). `false_alarms`: an actor was declared unreachable, then answered in
            the same incarnation.

    Raises TypeError for anything but a wrapped handle.
    """
    actor = _check_handle(handle)._actorsub_actor
    _, evidence, incarnation = actor.belief()
    return {
        "actor_id": actor.key.hex(),
        "state": _core.state(handle),
        "evidence": None if evidence == "none" else evidence,
        "incarnation": incarnation,
        **actor.counters(),
        "failed_early": actor.failed_early,
        "late_replies": actor.late_replies,
        "watched": actor.watched,
        "calls": calls.counters(actor),
        "sentinel": _core.sentinel_counters(),
    }


def on_state_change(handle: ActorHandle, fn: listeners.Listener) -> Callable[[], None]:
    """Calls `fn(actor_id, old, new, evidence)` whenever the state of the handle's actor changes.

        >>> cancel = actorsub.on_state_change(worker, lambda *change: print(*change))
        >>> cancel()

    Args:
        handle: a wrapped handle. The registration lasts as long as any wrapped handle of the actor in this process.
        fn: called on a background thread of this library, one call after the other, so it must not block. `actor_id`
            is hex, `old` and `new` are ActorStates, and `evidence` is as in the errors. `evidence` is None also for a
            state that came and went while `fn` could not be called (during `shutdown()`). The first call says the
            present state, with ActorState.UNKNOWN as `old`; while nothing is known there is none. An exception in `fn`
            is logged.

    Returns:
        A function without arguments that ends the registration.

    Raises:
        TypeError: `handle` is not a wrapped handle, or `fn` cannot be called.
        RuntimeError: the background thread cannot be started.
    """
    actor = _check_handle(handle)._actorsub_actor
    if not callable(fn):
        raise TypeError(f"on_state_change takes a function of (actor_id, old, new, evidence), got {shown(fn)}")
    registration = listeners.Registration(actor, fn)
    actor.listeners.append(registration)
    watcher.hurry(actor)
    if not watcher.is_exiting():
        watcher.ensure().nudge()
    return registration.cancel
