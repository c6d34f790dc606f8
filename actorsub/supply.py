"""Failed ObjectRefs made ahead, so that a refusal by ref does not wait for the object store.

A ref that has failed is an object in the store, and writing one takes a round trip of 0.1 to 1 ms. The first refusal of
an outage pays that, and more refs are then made in the background. The stock grows when it runs out. It is dropped when
the actor's state changes, because the error inside names the state.
"""

from __future__ import annotations

from typing import Any

import ray

from actorsub import _core, _ray_compat, watcher

#: Refs made ahead after the first refusal of an outage, and at most.
FIRST_STOCK = 16
MAX_STOCK = 256


def take(actor: _core.Actor, error: Any) -> ray.ObjectRef:
    """A ref that has failed with `error`: from the stock in a microsecond, else made now. The core takes from a stock
    that is at least half full by itself, without coming here."""
    supply = actor.supply
    version = actor.version
    if supply is None or supply.version != version:
        supply = actor.supply = _core.Supply(version, _ray_compat.failed_ref_maker(error), FIRST_STOCK)
    try:
        # Atomic: two threads never get the same ref.
        ref = supply.refs.pop()
    except IndexError:
        ref = supply.make()
        supply.wanted = min(MAX_STOCK, supply.wanted * 2)
    if not supply.filling and len(supply.refs) <= supply.wanted // 2:
        supply.filling = True
        running = watcher.ensure_if_possible()
        if running is None or not running.in_background(fill, actor, supply):
            supply.filling = False
    return ref


def fill(actor: _core.Actor, supply: _core.Supply) -> None:
    """Makes refs ahead until there are enough, or the actor's state is another one."""
    try:
        while len(supply.refs) < supply.wanted and drop_if_over(actor) is supply:
            with _ray_compat.core_in_use(actor.session) as usable:
                if not usable:
                    return
                supply.refs.append(supply.make())
    finally:
        supply.filling = False


def drop_if_over(actor: _core.Actor) -> Any:
    """Lets go of a stock that no call will take from. Returns the stock that is left."""
    supply = actor.supply
    if supply is not None and supply.version != actor.version:
        actor.supply = None
    return actor.supply
