"""Reads what Ray's actor table says about an actor, and takes it in.

Threads: a row is read on the background thread, because the control store may not answer. A caller that knows nothing
else about the actor waits for that read (`submit.read_table_once`).
"""

from __future__ import annotations

from typing import Any

from actorsub import _core, _ray_compat, errors, processes

#: States in which an actor runs, as far as anybody here knows.
UP = ("alive", "unreachable")


def read_table(actor: _core.Actor) -> None:
    """Asks the control store about the actor, takes in what it says, and has its incarnation watched when it is up."""
    if actor.session is None or actor.session is not _ray_compat.session_token():
        return
    version, planned_s = actor.version, actor.next_read_s
    actor.unhurried = False
    row = _ray_compat.read_actor_table(actor.ray_id)
    if row is None:
        return
    actor.row = row
    if row.preempted:
        actor.preempted = row.incarnation
    if row.death is not None:
        note_cause(actor, row.death)
    # Set before the actor is watched. A row that is not ALIVE says nothing about the process that is watched.
    actor.set_last(row.incarnation if row.state == "alive" and not row.restarts_left else None)
    actor.apply("table", row.state, row.incarnation, version)
    if row.state == "alive" and actor.detects and not actor.armed and actor.state_name in UP:
        # With the row's incarnation, not the believed one: address and process are the row's, too.
        ip, port = row.address
        _core.watch(actor, row.incarnation, ip, port, *_process(actor, row), not _ray_compat.uses_tls())
    heard = (actor.watched or actor.is_subscribed) and not actor.in_doubt
    heard = heard and _core.now_s() >= actor.suspected_until_s
    if row.state == "alive" and heard and actor.next_read_s == planned_s and actor.state_name in UP:
        # This was the read that was planned, unless evidence that came meanwhile has planned another.
        actor.next_read_s = 0.0


def _process(actor: _core.Actor, row: _ray_compat.TableRow) -> tuple[int, int]:
    """Number and start of the actor's process where it can be watched from here, else zeros: see `processes`.

    The same address does not make it the same node: containers share the host's, and are nodes of their own.
    """
    if not row.pid or not row.node or row.node != _ray_compat.own_node(actor.session):
        return 0, 0
    start = processes.proven_start(row.pid, *row.address)
    return (row.pid, start) if start else (0, 0)


def note_cause(actor: _core.Actor, cause: Any) -> None:
    # If it was raised, it holds the frames of the code that waited.
    cause.__traceback__ = cause.__context__ = None
    actor.death = cause
    # Failed refs that were made ahead do not name it.
    actor.supply = None


def may_know_it_was_never_up(actor: _core.Actor, error: Any) -> bool:
    """True where a read of the table may say that the actor was never up, which this process did not see.

    If the constructor failed, that may be so although the actor was seen up: for a moment the table says ALIVE of an
    actor whose constructor has just ended, even by an error.
    """
    if errors.kind_of(error) is not errors.Kind.DIED:
        return False
    if actor.was_up and not getattr(error, "actor_init_failed", False):
        return False
    return actor.row is None or actor.row.state != "dead"
