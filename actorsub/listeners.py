"""Functions that are told the changes of an actor's state: `on_state_change`.

Threads: changes are noted on any thread, in `Actor.changes`; they are told on the watcher's thread alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from actorsub import _core
from actorsub.errors import ActorState
from actorsub.fence import fenced

#: (actor id in hex, state before, state now, evidence)
Listener = Callable[[str, ActorState, ActorState, "str | None"], object]


class Registration:
    """One function of on_state_change."""

    def __init__(self, actor: _core.Actor, fn: Listener) -> None:
        # Weak: the actor holds the registration, and nothing in the background may keep an actor's record alive.
        self._actor = weakref.ref(actor)
        self._fn = fn
        self.greeted = False

    def cancel(self) -> None:
        actor = self._actor()
        if actor is not None and self in actor.listeners:
            actor.listeners.remove(self)

    def tell(self, actor: _core.Actor, old: Any, new: Any, evidence: str | None) -> None:
        fenced("a function given to on_state_change", self._fn, actor.key.hex(), old, new, evidence)


def tell(actor: _core.Actor) -> None:
    """Tells the listeners of an actor its changes, in order and without a gap. On the watcher's thread."""
    changes, actor.changes = actor.changes, []
    told = actor.told_version
    # Several threads note changes; the version says in which order they happened. It has 16 bits and wraps around.
    changes.sort(key=lambda change: (change[0] - told) & 0xFFFF)
    for version, old, new, evidence in changes:
        if (version - actor.told_version) & 0xFFFF > 0x7FFF:
            # The listeners were told later changes already.
            continue
        actor.told_version = version
        # Changes in between may have been dropped (with a watch that was replaced, or with the sentinel). They are
        # summed up in the next step. If they led back to the state that the listeners know, they are told the way there
        # and back: code that asked for the state meanwhile has to hear of the return.
        before = old if actor.told_state is None else actor.told_state
        steps = [(before, new, evidence)] if before is not new else [(before, old, None), (old, new, evidence)]
        actor.told_state = new
        for step in steps:
            for registration in list(actor.listeners):
                if registration.greeted and step[0] is not step[1]:
                    registration.tell(actor, *step)
    for registration in list(actor.listeners):
        if not registration.greeted:
            registration.greeted = True
            # The first change that it is told sums up what happened before it was registered.
            if actor.told_state is None:
                actor.told_state = actor.state
            if actor.told_state is not ActorState.UNKNOWN:
                registration.tell(actor, ActorState.UNKNOWN, actor.told_state, actor.belief()[1])
