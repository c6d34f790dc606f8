"""The only module that looks up and calls Ray's private API.

Some classes elsewhere are subclasses of Ray's and override private members: `handle.ActorHandle`
(`_serialization_helper`, `_ray_actor_id`), the subclass that `handle.remote` makes of an actor class (`_remote`,
`options`), and `refs.ObjectRefGenerator` (`_next_sync`, `_next_async`). Each is looked up here before it is relied on.

Each private name is looked up in the installed Ray when this module is imported. If one is missing, a public way takes
its place and one warning says so. `report()` lists what is missing. Tried on Ray 2.49 to 2.60.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
import ray.actor
import ray.exceptions

logger = logging.getLogger("actorsub")

_missing: dict[str, str] = {}


def _try(name: str, find: Callable[[], Any], instead: str) -> Any:
    """`find()`, or None with a note of what is used instead."""
    try:
        found = find()
    except (ImportError, AttributeError) as error:
        found = None
        instead = f"{instead} ({error})"
    if found is None:
        _missing[name] = instead
    return found


def _global_worker() -> Any:
    from ray._private.worker import global_worker

    # Both are set in Worker.__init__ or by connect(); a Ray without them keeps the connection elsewhere.
    return global_worker if "_is_connected" in vars(global_worker) else None


def _local_state_getter() -> Any:
    return importlib.import_module("ray._raylet").CoreWorker.get_local_actor_state


def _actor_table() -> Any:
    from ray.core.generated.gcs_pb2 import ActorTableData

    return ActorTableData


def _table_reader() -> Any:
    from ray._private.state import GlobalState, state

    if hasattr(GlobalState, "get_actor_info"):
        return state.get_actor_info
    if not hasattr(GlobalState, "_check_connected") or not hasattr(state, "global_state_accessor"):
        return None

    def read(actor_id: Any) -> Any:
        # Ray 2.49 has the reader one layer below.
        state._check_connected()
        return state.global_state_accessor.get_actor_info(actor_id)

    return read


def _handle_helpers() -> Any:
    cls = ray.actor.ActorHandle
    parameters = list(inspect.signature(cls._deserialization_helper).parameters)
    known = hasattr(cls, "_serialization_helper") and parameters[1:3] == ["weak_ref", "outer_object_ref"]
    return cls if known else None


def _validate_args() -> Any:
    try:
        from ray._common.signature import validate_args
    except ImportError:
        from ray._private.signature import validate_args
    return validate_args


def _ref_parts() -> Any:
    ref = ray.ObjectRef
    made_from = (ref.__doc__ or "").startswith("ObjectRef(id, owner_addr=")
    return (
        ref
        if made_from and all(hasattr(ref, name) for name in ("_on_completed", "owner_address", "call_site"))
        else None
    )


@dataclasses.dataclass(frozen=True)
class _Put:
    """How an error is written to the object store, past the pickling of `ray.put`."""

    name: str
    arguments: dict[str, Any]
    pack: Callable[..., bytes]
    serialized: Any
    task_execution_exception: int


def _put_object() -> _Put | None:
    raylet = importlib.import_module("ray._raylet")
    from ray.core.generated.common_pb2 import ErrorType

    arguments = {"pin_object": True, "inline_small_object": True, "_is_experimental_channel": False}
    for name in ("put_object", "put_serialized_object_and_increment_local_ref"):
        method = getattr(raylet.CoreWorker, name, None)
        signature = (method.__doc__ or "").split("\n")[0] if method is not None else ""
        if all(argument in signature for argument in arguments):
            # Ray 2.54 has it without a default.
            more = {"owner_address": None} if "owner_address," in signature else {}
            return _Put(
                name=name,
                arguments={**arguments, **more},
                pack=raylet.MessagePackSerializer.dumps,
                serialized=raylet.MessagePackSerializedObject,
                task_execution_exception=ErrorType.Value("TASK_EXECUTION_EXCEPTION"),
            )
    return None


@dataclasses.dataclass(frozen=True)
class _Direct:
    """How an actor call is given to Ray's core, past Ray's Python layers."""

    parameters: tuple[str, ...]  #: names of submit_actor_task's, in order
    positional: bytes  #: stands before each positional argument
    tracing: dict[str, Any]  #: the module with the flag


# What each parameter of `submit_actor_task` is called in the versions that are known, 2.49 to 2.60.
_SUBMIT_PARAMETERS = {
    "language",
    "actor_id",
    "function_descriptor",
    "args",
    "name",
    "num_returns",
    "max_retries",
    "retry_exceptions",
    "retry_exception_allowlist",
    "num_method_cpus",
    "concurrency_group_name",
    "generator_backpressure_num_objects",
    "num_objects_per_yield",
    "enable_task_events",
    "tensor_transport",
    "py_tensor_transport",
    "labels",
}
# Options of `ActorMethod._remote` that are known; a Ray with others may do more in there than is done here.
_METHOD_OPTIONS = {
    "name",
    "num_returns",
    "max_task_retries",
    "retry_exceptions",
    "concurrency_group",
    "_generator_backpressure_num_objects",
    "_num_objects_per_yield",
    "enable_task_events",
    "tensor_transport",
    "_labels",
}
# Those of them that are taken over as they are when they are set by `.options()`.
_DIRECT_OPTIONS = {"name", "num_returns", "max_task_retries", "retry_exceptions", "concurrency_group"}


def _submit_parameters(core_worker_class: Any) -> tuple[str, ...] | None:
    """The names, from the signature in the docstring that compiled methods carry; None when one is not known."""
    first_line = (core_worker_class.submit_actor_task.__doc__ or "").split("\n")[0]
    inside = first_line.partition("(")[2].rpartition(")")[0]
    names = []
    for one in inside.split(", ")[1:]:
        declared = one.split("=")[0].split(":")[0].strip()
        names.append(declared.rpartition(" ")[2])
    return tuple(names) if "args" in names and set(names) <= _SUBMIT_PARAMETERS else None


def _direct_submission() -> _Direct | None:
    raylet = importlib.import_module("ray._raylet")
    from ray.util.tracing import tracing_helper

    try:
        from ray._common import signature
    except ImportError:
        from ray._private import signature
    parameters = _submit_parameters(raylet.CoreWorker)
    options = method_option_names()
    if parameters is None or options is None or not options <= _METHOD_OPTIONS:
        return None
    if tracing_helper._global_is_tracing_enabled not in (True, False):
        return None
    return _Direct(parameters, signature.DUMMY_TYPE, vars(tracing_helper))


@functools.lru_cache(maxsize=1)
def method_option_names() -> frozenset[str] | None:
    """The options that Ray's ActorMethod.options passes on; None when they cannot be told."""
    remote = getattr(ray.actor.ActorMethod, "_remote", None)
    if remote is None:
        return None
    parameters = inspect.signature(remote).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return None
    return frozenset(parameters) - {"self", "args", "kwargs"}


def _stored_reader() -> str | None:
    method = importlib.import_module("ray._raylet").CoreWorker.get_objects
    return "get_objects" if "object_refs, int64_t timeout_ms" in (method.__doc__ or "") else None


global_worker: Any = _try("worker", _global_worker, "Ray's local actor state is not read")
_local_state: Any = _try("local state", _local_state_getter, "Ray's local actor state is not read")
_ActorTableData: Any = _try("actor table message", _actor_table, "the public state API is asked instead")
_read_table: Any = _try("actor table", _table_reader, "the public state API is asked instead")
_helpers: Any = _try("handle pickling", _handle_helpers, "a handle given as a whole argument arrives as a plain one")
_refs: Any = _try("refs", _ref_parts, "calls in flight fail when Ray says so, seconds later")
_put: _Put | None = _try("failed refs", _put_object, "a refusal by ref costs a whole ray.put")
_stored: str | None = _try("outcomes", _stored_reader, "an error object that a method returns counts as its failure")
_direct: _Direct | None = _try("submission", _direct_submission, "calls go through Ray's own Python layers")
_validate: Any = _try("signature check", _validate_args, "wrong arguments of a refused call are not noticed")


def report() -> dict[str, str]:
    """What the installed Ray lacks, and what is done instead; empty on a Ray that is fully known."""
    return dict(_missing)


@functools.lru_cache(maxsize=1)
def warn_once() -> None:
    if _missing:
        listed = "; ".join(f"{name}: {instead}" for name, instead in _missing.items())
        logger.warning("actorsub does not fully know Ray %s and uses slower public ways: %s", ray.__version__, listed)


# ---------------------------------------------------------------------------------------------------------------------
# The connection.


def local_state_binding() -> tuple[Any, str, str, str, dict[int, str]] | None:
    """Where the core reads Ray's local state: see `_core.bind_ray`; None when this Ray does not offer it."""
    if global_worker is None or _local_state is None or _ActorTableData is None:
        return None
    names = {value.number: value.name for value in _ActorTableData.ActorState.DESCRIPTOR.values}
    return global_worker, "_is_connected", "core_worker", "get_local_actor_state", names


def is_client_connected() -> bool:
    """True when this process uses Ray through `ray://`."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def is_client_handle(thing: Any) -> bool:
    # Not imported here: it needs grpcio, which only the extra "ray[client]" brings; a holder of one has it.
    module = sys.modules.get("ray.util.client.common")
    return module is not None and isinstance(thing, module.ClientActorHandle)


def session_token() -> Any:
    """One and the same object during one connection to Ray, another one after `ray.init()` anew; None without one."""
    if global_worker is not None:
        return getattr(global_worker, "core_worker", None) if global_worker._is_connected else None
    return sys.intern(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else None


# Ray's core ends the process when it is called after `ray.shutdown()` has taken it down, so our own threads must not be
# inside it then. They, and no thread of the user, hold this lock around each call that may release the GIL, and
# `disconnect`, the first step of a shutdown, waits for it. Reentrant for code that the garbage collector runs
# meanwhile. Dropping a ref also calls the core, and no lock can guard that: see `_EndingCore`.
_core_lock = threading.RLock()

#: How long the threads that are counting a ref are given to leave Ray's core before it ends.
LEAVE_CORE_S = 0.01


def _nothing() -> None:
    pass


_before_disconnect: Callable[[], object] = _nothing
_after_disconnect: Callable[[], object] = _nothing


def bind_disconnect(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Hands in the functions to call before a connection ends, and when it has ended. Neither may raise: a failure of
    ours must not prevent Ray's own disconnect, and the end of its core."""
    global _before_disconnect, _after_disconnect
    _before_disconnect, _after_disconnect = before, after


class _EndingCore:
    """Stands for the core of a driver from the end of its connection until `ray.shutdown()` takes it out of the worker.

    Making and dropping a ref calls the core, on any thread, also where the garbage collector does it. Once the core has
    ended, such a call would end the process with exit code 1. A core that is about to end need not count refs any more,
    and once it was taken out Ray does not call it for that either. All else is passed on, since Ray's callbacks, which
    end calls under way, need it.
    """

    _COUNTS = frozenset(
        (
            "add_object_ref_reference",
            "remove_object_ref_reference",
            "remove_actor_handle_reference",
            "async_delete_object_ref_stream",
        )
    )

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return _count_nothing if name in self._COUNTS else getattr(self._core, name)


def _count_nothing(*_: Any) -> None:
    pass


def _hook_disconnect() -> bool | None:
    worker: Any = importlib.import_module("ray._private.worker")
    original = worker.disconnect
    source = inspect.getsource(worker.shutdown)
    if "disconnect(" not in source:
        return None
    ends_core = "global_worker.core_worker.shutdown_driver()" in source and "del global_worker.core_worker" in source
    if not ends_core:
        _missing["end of the core"] = (
            "a ref that is let go of during ray.shutdown() ends the process, as it does without"
        )

    @functools.wraps(original)
    def disconnect(*args: Any, **kwargs: Any) -> Any:
        _before_disconnect()
        with _core_lock:
            result = original(*args, **kwargs)
        if ends_core and is_ending() and global_worker.mode == worker.SCRIPT_MODE:
            global_worker.core_worker = _EndingCore(global_worker.core_worker)
            # Threads may have entered the core before, and nothing tells when the last has left it. They need a
            # microsecond, and on a busy machine a turn on a processor.
            time.sleep(LEAVE_CORE_S)
        _after_disconnect()
        return result

    worker.disconnect = disconnect
    return True


_disconnect_waits: Any = _try("shutdown", _hook_disconnect, "failed refs are not made ahead")


def is_ending() -> bool:
    """True between the end of a connection and the end of Ray's core: whoever calls the core now ends the process."""
    return global_worker is not None and not global_worker._is_connected and hasattr(global_worker, "core_worker")


@contextlib.contextmanager
def core_in_use(session: Any) -> Iterator[bool]:
    """For our own threads: True while the block runs when the connection is still `session` and stays until its end."""
    with _core_lock:
        yield bool(_disconnect_waits) and session is not None and session_token() is session


# The parent's connection in a forked child, kept so that its identity is not used anew. Anything asked over it would
# also harm the parent, whose replies the child would take.
_inherited_session: Any = None


def after_fork_in_child() -> None:
    global _inherited_session, _core_lock
    _inherited_session = session_token()
    # One of the parent's threads may have held it.
    _core_lock = threading.RLock()


def is_inherited_session() -> bool:
    """True in a forked child that still has its parent's connection to Ray."""
    return _inherited_session is not None and session_token() is _inherited_session


# ---------------------------------------------------------------------------------------------------------------------
# The actor table.


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One row of the control store's actor table."""

    state: str  #: "pending", "alive", "restarting" or "dead"
    incarnation: int  #: Ray's restart count
    death: ray.exceptions.RayError | None  #: Ray's error with the cause; None unless dead
    address: tuple[str, int]  #: of its RPC server; port 0 when unknown
    node: str  #: Ray's id of its node, in hex; "" when unknown
    pid: int  #: in the pid namespace of its node; 0 when unknown
    restarts_left: bool  #: False when Ray will not restart it again
    may_restart: bool = True  #: False when Ray never restarts it, whatever happens
    preempted: bool = False  #: its node is being taken away, or was
    unborn: bool = False  #: dead, and was never up: no call can have run


_STATES = {
    "DEPENDENCIES_UNREADY": "pending",
    "PENDING_CREATION": "pending",
    "ALIVE": "alive",
    "RESTARTING": "restarting",
    "DEAD": "dead",
}


def read_actor_table(actor_id: Any) -> TableRow | None:
    """The actor's row now; None when the control store has none, or cannot be asked by any means.

    One RPC, about 0.5 ms; blocks for as long as the control store does not answer. Source: Ray's ActorTableData.
    """
    if _read_table is None or _ActorTableData is None:
        return _read_state_api(actor_id)
    raw = _read_table(actor_id)
    if raw is None:
        return None
    row = _ActorTableData.FromString(raw)
    state = _STATES.get(_ActorTableData.ActorState.Name(row.state))
    if state is None:
        return None
    return TableRow(
        state=state,
        incarnation=row.num_restarts,
        death=_death(row) if state == "dead" else None,
        address=(row.address.ip_address, row.address.port),
        # Before 2.50 it has the other name.
        node=(row.address.node_id if hasattr(row.address, "node_id") else row.address.raylet_id).hex(),
        pid=row.pid,
        restarts_left=_has_restarts_left(row),
        may_restart=row.max_restarts != 0,
        preempted=getattr(row, "preempted", False),
        unborn=state == "dead" and row.num_restarts == 0 and _failed_at_creation(row.death_cause),
    )


def _has_restarts_left(row: Any) -> bool:
    # As Ray's GcsActorManager counts: what a preempted node costs is free, the restart that it is about to cost too.
    spent = row.num_restarts - getattr(row, "num_restarts_due_to_node_preemption", 0)
    is_free = row.max_restarts > 0 and getattr(row, "preempted", False)
    return bool(row.max_restarts == -1 or spent < row.max_restarts or is_free)


def _creation_failure(context: Any) -> ray.exceptions.RayError:
    error = ray.exceptions.RayError.from_ray_exception(context)
    if isinstance(error, ray.exceptions.RayTaskError):
        return ray.exceptions.ActorDiedError(error)
    if not isinstance(error, ray.exceptions.ActorDiedError):
        died = ray.exceptions.ActorDiedError()
        died.error_msg = f"{died.error_msg}\n{error}"
        died._actor_init_failed = True
        return died
    return error


# What a death cause says -> Ray's error for the calls of such an actor (GetErrorTypeFromActorDeathCause in Ray's
# pb_util). A cause that is not listed here is read as far as it has a message.
_DEATHS: dict[str, Callable[[Any], ray.exceptions.RayError]] = {
    "creation_task_failure_context": _creation_failure,
    "runtime_env_failed_context": lambda context: ray.exceptions.RuntimeEnvSetupError(context.error_message),
    "actor_unschedulable_context": lambda context: ray.exceptions.ActorUnschedulableError(context.error_message),
    "actor_died_error_context": ray.exceptions.ActorDiedError,
    "oom_context": lambda context: ray.exceptions.OutOfMemoryError(context.error_message),
}
_AT_CREATION = ("creation_task_failure_context", "runtime_env_failed_context", "actor_unschedulable_context")


def _death(row: Any) -> ray.exceptions.RayError:
    named = row.death_cause.WhichOneof("context")
    if named is None:
        return ray.exceptions.ActorDiedError()
    context = getattr(row.death_cause, named)
    if named in _DEATHS:
        return _DEATHS[named](context)
    error = ray.exceptions.ActorDiedError()
    error.error_msg = f"{error.error_msg}\n{getattr(context, 'error_message', named)}"
    return error


def _failed_at_creation(cause: Any) -> bool:
    named = cause.WhichOneof("context")
    if named == "actor_died_error_context":
        return bool(getattr(cause.actor_died_error_context, "never_started", False))
    return named in _AT_CREATION


def _read_state_api(actor_id: Any) -> TableRow | None:
    """The public way: Ray's state API, which needs the dashboard and takes tens of milliseconds."""
    from ray.util.state import get_actor
    from ray.util.state.exception import RayStateApiException

    try:
        found = get_actor(actor_id.hex(), timeout=5)
    except RayStateApiException:
        return None
    if found is None or found.state not in _STATES:
        return None
    return TableRow(
        state=_STATES[found.state],
        incarnation=getattr(found, "num_restarts", None) or 0,
        death=ray.exceptions.ActorDiedError() if found.state == "DEAD" else None,
        address=("", 0),
        node=found.node_id or "",
        pid=found.pid or 0,
        restarts_left=True,
    )


def own_node(session: Any) -> str:
    """Ray's id of the node that this process is part of, in hex; "" when it cannot be told. For our own threads."""
    with core_in_use(session) as usable:
        return str(ray.get_runtime_context().get_node_id()) if usable else ""


def uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


# ---------------------------------------------------------------------------------------------------------------------
# Handles and methods.


def actor_id_of(handle: ray.actor.ActorHandle) -> Any:
    """Ray's ActorID of a handle."""
    return handle._actor_id


def is_original(handle: ray.actor.ActorHandle) -> bool:
    """True for the handle that creating the actor returned."""
    return bool(getattr(handle, "_ray_original_handle", False))


def default_num_returns(method: Any) -> Any:
    """`num_returns` of Ray's ActorMethod: an int, "streaming" or "dynamic"."""
    return getattr(method, "_num_returns", 1)


def call_with_options(method: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """`method.options(**options).remote`, after Ray has checked the options.

    Not Ray's own object for that: before 2.60 it is in a cycle with the handle, which keeps a dropped actor alive until
    the garbage collector runs (ray-project/ray 61922).
    """
    if "tensor_transport" in options or not hasattr(method, "_remote"):
        # Ray translates that value on the way.
        return method.options(**options).remote
    if hasattr(ray.actor, "_ActorMethodOptionsWrapper"):
        # 2.60 checks values here; before, `options` itself makes the cycle and checks nothing.
        _check_option_values(method, options)
    return _WithOptions(method, options).remote


def _check_option_values(method: Any, options: dict[str, Any]) -> None:
    """Checks values as Ray's `options` does. Ray's warning must name the line that called this package, as it would
    without it: Python hides a deprecation whose line is in a library."""
    validate = getattr(getattr(ray.actor, "ray_option_utils", None), "validate_num_returns", None)
    if options.get("num_returns") == "dynamic" and validate is not None:
        validate(method._is_generator, "dynamic", stacklevel=_level_of_caller())
        options = {name: value for name, value in options.items() if name != "num_returns"}
    method.options(**options)


def _level_of_caller() -> int:
    """`stacklevel` of the first frame outside of this package, in a function that our own caller calls."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    return level


def call_without_retries(method: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """The same for calls that Ray must not resend."""
    return call_with_options(method, {**options, "max_task_retries": 0, "retry_exceptions": False})


def resends(method: Any, options: dict[str, Any] | None) -> bool:
    """Whether Ray would resend a call: by the call's own `max_task_retries`, else the method's, else the actor's. Ray's
    ActorMethod holds the latter two as one number. In doubt: True."""
    retries = (options or {}).get("max_task_retries")
    return bool(getattr(method, "_max_task_retries", True) if retries is None else retries)


def runs_in_any_order(handle: ray.actor.ActorHandle) -> bool:
    """True for an actor that does not wait for each call of a caller's sequence: an async or threaded one."""
    return getattr(handle, "_ray_allow_out_of_order_execution", None) is True


def concurrency_groups(actor_class: Any) -> dict[str, str]:
    """Method name -> concurrency group, where the class names one. Known only in the process that creates the actor."""
    metadata = getattr(getattr(actor_class, "__ray_metadata__", None), "method_meta", None)
    return dict(getattr(metadata, "concurrency_group_for_methods", None) or {})


class _WithOptions:
    def __init__(self, method: Any, options: dict[str, Any]) -> None:
        self._submit = method._remote
        self._options = options

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit(args=args, kwargs=kwargs, **self._options)


def _fits_by_position(parameters: list[inspect.Parameter], count: int) -> bool:
    if count > sum(1 for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD):
        return False
    return all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters[count:]
    )


def check_arguments(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises Ray's own TypeError when the arguments do not fit the method."""
    parameters = getattr(method, "_signature", None)
    if _validate is None or parameters is None:
        return
    if not kwargs and _fits_by_position(parameters, len(args)):
        # Ray's own check is the same question asked through `inspect`, at ten times the cost.
        return
    _validate(parameters, args, kwargs)


#: What `submission_of` hands out: the arguments of `_core.Submission`.
SubmissionParts = tuple[tuple[Any, ...], int, int, list[tuple[str, Any, bool]]]


def direct_binding() -> tuple[type, str, bytes, dict[str, Any], str] | None:
    """What `_core.bind_direct` takes; None where every call goes through Ray's Python layers."""
    if _direct is None or global_worker is None:
        return None
    return ray.ObjectRef, "submit_actor_task", _direct.positional, _direct.tracing, "_global_is_tracing_enabled"


def submission_of(method: Any, options: dict[str, Any] | None, *, retries: bool = True) -> SubmissionParts | None:
    """How the calls of Ray's ActorMethod `method` are given to Ray's core; None when Ray's own `.remote()` has to.

    That is so for streams, for another language, for tensor transports, for decorated methods, for values that Ray
    would complain about, and in local mode. `retries=False`: Ray never resends.

    Source: what `ActorMethod._remote` and `ActorHandle._actor_method_call` of Ray 2.49 to 2.60 do with their values.
    """
    if _direct is None:
        return None
    try:
        return _submission_of(_direct, method, options or {}, retries)
    except (AttributeError, KeyError) as error:
        _missing.setdefault("submission", f"calls go through Ray's own Python layers ({error!r})")
        return None


def _submission_of(direct: _Direct, method: Any, given: dict[str, Any], retries: bool) -> SubmissionParts | None:
    if not set(given) <= _DIRECT_OPTIONS:
        return None
    handle = method._actor
    if (
        handle is None
        or handle._ray_is_cross_language
        or method._decorator is not None
        or not uses_object_store(method)
    ):
        return None
    if getattr(global_worker, "mode", None) == getattr(ray, "LOCAL_MODE", object()):
        return None
    name = method._method_name
    # Ray adds one to every method, and fills it while tracing is on; then Ray's own way is taken anyway.
    parameters = [one for one in handle._ray_method_signatures[name] if one.name != "_ray_trace_ctx"]
    num_returns = given.get("num_returns")
    num_returns = method._num_returns if num_returns is None else num_returns
    if type(num_returns) is not int or num_returns < 0:
        return None
    max_retries = given.get("max_task_retries")
    max_retries = method._max_task_retries if max_retries is None else max_retries
    on_exceptions = given.get("retry_exceptions")
    on_exceptions = method._retry_exceptions if on_exceptions is None else on_exceptions
    if not isinstance(on_exceptions, (bool, list, tuple, type(None))):
        return None
    allowed = tuple(on_exceptions) if isinstance(on_exceptions, (list, tuple)) else None
    per_yield = getattr(method, "_num_objects_per_yield", 1)
    backpressure = method._generator_backpressure_num_objects
    transport = method._tensor_transport
    values = {
        "language": handle._ray_actor_language,
        "actor_id": handle._ray_actor_id,
        "function_descriptor": handle._ray_function_descriptor[name],
        # Its place is for the call's own.
        "args": None,
        "name": given.get("name", ""),
        "num_returns": num_returns,
        "max_retries": (max_retries or 0) if retries else 0,
        "retry_exceptions": (bool(on_exceptions) or allowed is not None) if retries else False,
        "retry_exception_allowlist": allowed if retries else None,
        "num_method_cpus": handle._ray_actor_method_cpus,
        "concurrency_group_name": b"" if given.get("concurrency_group") is None else given["concurrency_group"],
        "generator_backpressure_num_objects": -1 if backpressure is None else backpressure,
        "num_objects_per_yield": 1 if per_yield is None else per_yield,
        "enable_task_events": method._enable_task_events,
        "tensor_transport": transport,
        "py_tensor_transport": getattr(transport, "value", transport),
        "labels": None,
    }
    shape = [
        (one.name, one.kind, one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
        for one in parameters
    ]
    arguments = tuple(values[one] for one in direct.parameters)
    return arguments, direct.parameters.index("args"), num_returns, shape


# ---------------------------------------------------------------------------------------------------------------------
# Pickling of handles. A handle inside another value is pickled through __reduce__. A handle that is itself the
# argument, the return value or the value of a `put` goes another way: Ray writes `_serialization_helper()[0] + b"1"`
# (or b"0") as plain bytes, and a plain handle arrives. There the wrapper gives a `_core.Traveller`, an object whose sum
# is no bytes. So Ray's serializer falls back to pickling it, and what is unpickled is the wrapper.


def serialize_handle(handle: ray.actor.ActorHandle) -> tuple[bytes, Any, bool]:
    """(bytes, the ObjectRef that stands for the handle in reference counting, weak)."""
    serialized, handle_ref, weak_ref = handle._serialization_helper()
    return serialized, handle_ref, weak_ref


def note_contained(handle_ref: Any, weak_ref: bool) -> None:
    """Tells Ray that the value being pickled contains the handle, so that the actor lives as long as the value."""
    if not weak_ref:
        context = global_worker.get_serialization_context()
        context.add_contained_object_ref(handle_ref, allow_out_of_band_serialization=True)


def register_reducer(cls: type[Any], reducer: Callable[[Any], tuple[Any, ...]]) -> None:
    """Makes Ray's own pickler (not pickle, nor copy) use `reducer`, as Ray does for its own handle class."""
    import ray.cloudpickle

    ray.cloudpickle.CloudPickler.dispatch[cls] = reducer


def deserialize_handle(serialized: bytes, weak_ref: bool) -> ray.actor.ActorHandle:
    outer = global_worker.get_serialization_context().get_outer_object_ref()
    return ray.actor.ActorHandle._deserialization_helper(serialized, weak_ref, outer)


def can_travel() -> bool:
    return _helpers is not None and global_worker is not None


# ---------------------------------------------------------------------------------------------------------------------
# Failed refs.


def failed_ref_maker(error: ray.exceptions.RayError) -> Callable[[], ray.ObjectRef]:
    """Makes ObjectRefs that have already failed: `get`, `await` and passing them on raise `error`.

    The error is pickled once. Making a ref writes one small object to the local object store, a round trip to the
    raylet: 0.1 to 1 ms, most of it without the GIL.
    """
    if _put is None:
        # By Ray's own rule that an error read from the store is raised.
        return lambda: ray.put(error)
    body = _put.pack(error.to_bytes(), None)
    metadata = str(_put.task_execution_exception).encode()
    core_worker, name, arguments = global_worker.core_worker, _put.name, _put.arguments

    def make() -> ray.ObjectRef:
        made = getattr(core_worker, name)(_put.serialized(metadata, body, [], None), **arguments)
        # Ray 2.49 gives the id, with the reference counted already.
        return ray.ObjectRef(made, skip_adding_local_ref=True) if isinstance(made, bytes) else made

    return make


def failed_ref(error: ray.exceptions.RayError) -> ray.ObjectRef:
    """One of them."""
    return failed_ref_maker(error)()


def can_make_refs() -> bool:
    return _refs is not None and can_travel()


def arrived(session: Any, refs: list[ray.ObjectRef]) -> set[ray.ObjectRef] | None:
    """Those of `refs` whose outcome Ray has; None when the connection has ended. For our own threads, does not wait."""
    with core_in_use(session) as usable:
        if not usable:
            return None if _disconnect_waits else set()
        return set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])


def is_failure(ref: ray.ObjectRef, value: Any) -> bool:
    """Whether the outcome `value` of a call, which is there, is a failure. Else it is what the method returned, which
    may be an error object, too: Ray tells the two apart by the metadata of the stored object.

    A RayTaskError is stored as a failure however it came. In doubt an error is one.
    """
    if not isinstance(value, ray.exceptions.RayError):
        return False
    if isinstance(value, ray.exceptions.RayTaskError) or getattr(value, "traceback_str", None):
        # The second: a value that could not be unpickled here.
        return True
    metadata = _stored_metadata(ref)
    return metadata is None or metadata.partition(b",")[0].isdigit()


def _stored_metadata(ref: ray.ObjectRef) -> bytes | None:
    if _stored is None or global_worker is None:
        return None
    try:
        metadata: bytes | None = getattr(global_worker.core_worker, _stored)([ref], 0)[0][1]
    except (AttributeError, IndexError, TypeError, ray.exceptions.RayError):
        # The connection has ended, the object is gone again, or this Ray gives something else.
        logger.debug("the metadata of an outcome could not be read", exc_info=True)
        return None
    return metadata


def on_completed(ref: ray.ObjectRef, callback: Callable[[Any], None]) -> None:
    """Calls `callback(value)` once, soon when the value is there already, on a thread of Ray's. Errors are values."""
    ref._on_completed(callback)


# Since Ray 2.60.
_on_ready: Any = getattr(ray.ObjectRef, "_on_ready", None)


def can_tell_ready() -> bool:
    """Whether `on_ready` is there; `on_completed` serves without."""
    return _on_ready is not None


def on_ready(ref: ray.ObjectRef, callback: Callable[[Any], None]) -> Callable[[], object]:
    """Calls `callback(None)` once, perhaps in here, when the value is there, which is not fetched or unpickled. Returns
    a function that takes the callback back."""
    return _on_ready(ref, callback)


def holds_up_outcomes() -> bool:
    """True on a thread that is inside Ray's deserialization: in a signal handler that has interrupted `ray.get`, say,
    or in a `__setstate__`. Ray's callbacks then wait for this thread's lock, so waiting for one here would not end."""
    lock = getattr(getattr(global_worker, "function_actor_manager", None), "lock", None)
    is_owned = getattr(lock, "_is_owned", None)
    return is_owned is not None and bool(is_owned())


def plain_ref(ref: ray.ObjectRef) -> ray.ObjectRef:
    """Ray's own class for the same object."""
    return ray.ObjectRef(ref.binary(), ref.owner_address(), ref.call_site())


def reduce_ref(ref: ray.ObjectRef) -> tuple[Any, ...]:
    """What Ray's pickler does with an ObjectRef; looked up each time, because each connection registers it anew."""
    import ray.cloudpickle

    return ray.cloudpickle.CloudPickler.dispatch[ray.ObjectRef](ref)


def peek_stream(generator: ray.ObjectRefGenerator) -> tuple[ray.ObjectRef, bool]:
    """The next item's ref, and whether the item is there."""
    return generator.worker.core_worker.peek_object_ref_stream(generator._generator_ref)


def fails_early(method: Any, options: dict[str, Any] | None) -> bool:
    """Whether a call's outcome may be failed when its actor is lost: not where Ray would resend the call."""
    transport = (options or {}).get("tensor_transport")
    return not resends(method, options) and not transport and uses_object_store(method)


def uses_object_store(method: Any) -> bool:
    """True unless a method's tensors travel past the object store."""
    transport = getattr(method, "_tensor_transport", None)
    # An enum before 2.54, whose default is the object store.
    return transport is None or getattr(transport, "name", "") == "OBJECT_STORE"


def is_task_thread() -> bool:
    """True on the thread that runs a task (not an actor): it holds CPUs that Ray lends out while it blocks."""
    if global_worker is None or threading.current_thread() is not threading.main_thread():
        return False
    return global_worker.mode == ray.WORKER_MODE and global_worker.actor_id.is_nil()


class FailedGenerator(ray.ObjectRefGenerator):
    """What a refused streaming call returns: yields one failed ref and ends, as Ray's does when its actor dies."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        # Not Ray's constructor: it would register a stream that no task feeds.
        self._generator_ref = ref
        self._refs = [ref]

    def __del__(self) -> None:
        # Nor Ray's: there is no stream to delete.
        pass

    def __next__(self) -> ray.ObjectRef:
        if not self._refs:
            raise StopIteration
        return self._refs.pop()

    async def __anext__(self) -> ray.ObjectRef:
        if not self._refs:
            raise StopAsyncIteration
        return self._refs.pop()

    def _next_sync(self, timeout_s: float | None = None) -> ray.ObjectRef:
        return next(self)

    async def _next_async(self, timeout_s: float | None = None) -> ray.ObjectRef:
        return await self.__anext__()

    def completed(self) -> ray.ObjectRef:
        return self._generator_ref

    def next_ready(self) -> bool:
        return bool(self._refs)

    def is_finished(self) -> bool:
        return not self._refs

    # What `ray.wait` looks at, in newer versions and in older ones.

    def _get_next_object_id_binary(self) -> bytes:
        return bytes(self._generator_ref.binary())

    def _get_next_ref(self) -> ray.ObjectRef:
        return self._generator_ref
