"""The demo: what a service pays while its worker actors are killed and restarted.

Three runs of the same service with the same requests and the same kills: on stock Ray, on Ray with its wait
for a death cause switched off ("tuned"), and on actorsub. The proxy is the same in all three but for one
method: on plain handles it is a loop over the workers, on actorsub one call of a group of them. Each run has
an interpreter and a local Ray of its own, because Ray reads its switches once per process.

Parent: settings -> one child per mode -> table, picture, JSON. It needs no Ray itself.
Child:  local Ray -> workers -> proxy and killer on one asyncio loop -> JSON lines on a pipe to the parent.
"""

from actorsub._demo.parent import run
from actorsub._demo.settings import DESCRIPTION, Settings, add_arguments

__all__ = ["DESCRIPTION", "Settings", "add_arguments", "run"]
