"""What a handle does when its actor cannot take a call: the options, their values and their defaults."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

OnUnavailable = Literal["auto", "ref", "raise", "wait"]
OnPending = Literal["submit", "fail", "wait"]
Detect = Literal["auto", "ray"]

# A limit, so that a mistaken unit (nanoseconds, say) shows at once instead of as a wait of years.
MAX_TIMEOUT_S = 366 * 86400.0


#: Longer ones are cut off in messages.
MAX_SHOWN = 100

#: What the core counts with.
MAX_COUNT = 2**31 - 1

#: Below this a busy machine looks like a silent peer.
MIN_SILENCE_S = 0.2


def shown(value: Any) -> str:
    """A wrong value as a message shows it, whatever it is: its `repr` may be long, or may itself raise."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    listed = ", ".join(repr(one) for one in accepted)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {listed}, got {shown(value)} of type {type(value).__name__}")
    if value not in accepted:
        raise ValueError(f"{name} must be one of {listed}, got {shown(value)}")


def _seconds(name: str, value: Any, at_least_s: float | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number of seconds or None, got {shown(value)} of type {kind}")
    # Compared only, also with nan: an int may be too large for a float.
    if at_least_s is not None and not at_least_s <= value <= MAX_TIMEOUT_S:
        raise ValueError(f"{name} must be from {at_least_s} to {MAX_TIMEOUT_S:.0f} seconds, got {shown(value)}")
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError(f"{name} must be over 0 and at most {MAX_TIMEOUT_S:.0f} seconds, or None, got {shown(value)}")


def _count(name: str, value: Any, at_least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number{otherwise}, got {shown(value)} of type {type(value).__name__}")
    if not at_least <= value <= MAX_COUNT:
        raise ValueError(f"{name} must be from {at_least} to {MAX_COUNT}{otherwise}, got {shown(value)}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The options of actorsub. Immutable; `replace` makes a changed copy.

    They are set at creation (`@actorsub.remote`, `Class.options`), at `wrap` and `get_actor`, or for one call
    (`handle.method.options`). Each option is taken from the nearest place where it is set.

        >>> worker = actorsub.wrap(plain, on_unavailable="raise", silence_timeout_s=1.0)
        >>> worker.infer.options(timeout_s=0.5).call(x).result()

    Args:
        on_unavailable: what a call does while the actor is restarting or unreachable, and when it is dead.
            "ref": `.remote()` returns an ObjectRef that has already failed, since Ray users expect errors from `get`; a
            call to a dead actor is left to Ray. `.call()` returns a failed Call.
            "raise": both raise at once.
            "wait": `.remote()` blocks the calling thread until the actor is up or `timeout_s` has passed. `.call()`
            holds the Call in line and blocks nobody. If the actor is dead, `.remote()` raises, and the Call fails.
            "auto": as "ref", but a `.remote()` that Ray would resend (`max_task_retries` of the call, the method or the
            actor) goes to Ray whatever the actor's state is, as through a plain handle. The other three are for all
            calls.
        timeout_s: the deadline of a `.call()` in seconds, waiting and execution together; for `.remote()` the limit of
            a "wait". Over 0. None: no deadline.
        max_in_flight: how many `.call()`s of this process may be at the actor at one time, from 1; the others wait in
            line. None: any number.
        max_queued: how many `.call()`s may wait in line; one more is refused with QueueFullError. 0: none.
        on_pending: what a call does while the actor was never up yet. "submit": Ray queues the call, as Ray does.
            "fail": the call is refused. `on_unavailable` decides how; under "wait" `.remote()` raises, and `.call()`
            returns a failed Call. "wait": as "wait" above.
        detect: "auto" watches the actor's process and its RPC port. "ray" opens no sockets and trusts Ray's own state
            alone. If handles of one actor differ, "auto" counts.
        silence_timeout_s: how many seconds a peer may be silent before new calls are refused; from 0.2. A refusal is
            cheap and ends when the peer answers, so the default is short.
        silence_in_flight_s: how many seconds a peer may be silent before the calls that run there fail; at least
            `silence_timeout_s`. None: for ever. The failure of a call is final, so the default is longer. If handles
            of one actor differ, the shortest counts, here and for `silence_timeout_s`.

    Raises TypeError or ValueError for a value that an option does not take, naming the option and what it takes.
    """

    on_unavailable: OnUnavailable = "auto"
    timeout_s: float | None = None
    max_in_flight: int | None = None
    max_queued: int = 1000
    on_pending: OnPending = "submit"
    detect: Detect = "auto"
    silence_timeout_s: float = 3.0
    silence_in_flight_s: float | None = 10.0

    def __post_init__(self) -> None:
        _choice("on_unavailable", self.on_unavailable, ("auto", "ref", "raise", "wait"))
        _choice("on_pending", self.on_pending, ("submit", "fail", "wait"))
        _choice("detect", self.detect, ("auto", "ray"))
        _seconds("timeout_s", self.timeout_s)
        if self.max_in_flight is not None:
            _count("max_in_flight", self.max_in_flight, 1, " or None")
        _count("max_queued", self.max_queued, 0)
        if self.silence_timeout_s is None:
            raise TypeError("silence_timeout_s must be a number of seconds, got None; detect='ray' turns it off")
        _seconds("silence_timeout_s", self.silence_timeout_s, MIN_SILENCE_S)
        _seconds("silence_in_flight_s", self.silence_in_flight_s)
        if self.silence_in_flight_s is not None and self.silence_in_flight_s < self.silence_timeout_s:
            raise ValueError(
                f"silence_in_flight_s must be at least silence_timeout_s ({self.silence_timeout_s!r}) or None, "
                f"got {self.silence_in_flight_s!r}"
            )

    def replace(self, **options: Any) -> Policy:
        """A copy with these options changed.

        Raises TypeError for a name that is not an option; TypeError or ValueError for a value that one does not take.
        """
        if not options:
            return self
        check_names(options)
        return dataclasses.replace(self, **options)

    @functools.cached_property
    def changes(self) -> dict[str, Any]:
        """What differs from the defaults: `Policy().replace(**policy.changes) == policy`. Not to be written to.

        A handle is pickled with this dict, because pickling an object of a class takes several times as long."""
        return {name: getattr(self, name) for name in OPTION_NAMES if getattr(self, name) != _DEFAULTS[name]}


if TYPE_CHECKING:

    class PolicyOptions(TypedDict, total=False):
        """The options of Policy as keyword arguments, so that a type checker knows them where they are written."""

        on_unavailable: OnUnavailable
        timeout_s: float | None
        max_in_flight: int | None
        max_queued: int
        on_pending: OnPending
        detect: Detect
        silence_timeout_s: float
        silence_in_flight_s: float | None


OPTION_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Policy))

DEFAULT_POLICY = Policy()
_DEFAULTS: dict[str, Any] = {name: getattr(DEFAULT_POLICY, name) for name in OPTION_NAMES}


def check_names(options: Iterable[str]) -> None:
    for name in options:
        if name not in OPTION_NAMES:
            raise TypeError(f"unknown option {name!r}; actorsub takes {', '.join(OPTION_NAMES)}")


@functools.lru_cache(maxsize=256)
def _nearest(name: str) -> str | None:
    """The option of ours that the name is likely to mean."""
    return next(iter(difflib.get_close_matches(name, OPTION_NAMES, 1, 0.85)), None)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, Ray's). A name that only looks like ours is refused here, where the user wrote it; values are for
    `Policy.replace` to refuse."""
    ours: dict[str, Any] = {}
    rays: dict[str, Any] = {}
    for name, value in options.items():
        if name in OPTION_NAMES:
            ours[name] = value
        else:
            near = _nearest(name)
            if near is not None:
                raise TypeError(f"unknown option {name!r}; did you mean {near!r}?")
            rays[name] = value
    return ours, rays
