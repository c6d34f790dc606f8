"""Ray actor handles that say at once when their actor is away.

    import actorsub

    @actorsub.remote(max_restarts=-1, on_unavailable="raise")
    class Worker:
        def infer(self, x): ...

    worker = Worker.remote()             # a real Ray actor handle
    try:
        ref = worker.infer.remote(x)     # refused in under a microsecond while the actor restarts
    except actorsub.ActorUnavailableError as error:
        assert not error.sent            # it never left this process: try another worker

Attributes of a handle are the actor's own method names, so everything else is a function of this module.
"""

try:
    from actorsub._core import state
except ModuleNotFoundError as error:
    if error.name != "actorsub._core":
        raise
    raise ImportError(
        "actorsub was imported from its source folder, where its compiled core is missing. Start Python from another "
        "folder to use the installed package, or compile the core in place with `make develop`"
    ) from error
from actorsub._version import __version__
from actorsub.calls import Call
from actorsub.errors import (
    ActorDiedError,
    ActorState,
    ActorUnavailableError,
    DeadlineExceededError,
    NoReplicaError,
    QueueFullError,
    may_have_run,
)
from actorsub.group import ReplicaGroup
from actorsub.handle import ActorHandle, get_actor, on_state_change, policy, remote, stats, wrap
from actorsub.lifecycle import shutdown
from actorsub.policy import Policy
from actorsub.refs import get, wait

__all__ = [
    "ActorDiedError",
    "ActorHandle",
    "ActorState",
    "ActorUnavailableError",
    "Call",
    "DeadlineExceededError",
    "NoReplicaError",
    "Policy",
    "QueueFullError",
    "ReplicaGroup",
    "__version__",
    "get",
    "get_actor",
    "may_have_run",
    "on_state_change",
    "policy",
    "remote",
    "shutdown",
    "state",
    "stats",
    "wait",
    "wrap",
]
