"""How the calls of a `ReplicaGroup` are made: its options that are about calls, and what each accepts."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from typing import Any, Literal

from actorsub import _core, _ray_compat
from actorsub.policy import OPTION_NAMES, Policy, shown

Retry = Literal["unsent", "always", "never"]

# Policy options that mean something for a call of a group; the others belong to the members' handles.
_POLICY_OPTIONS = ("timeout_s", "max_in_flight", "max_queued", "on_unavailable")
_CALL_OPTIONS = ("retry", "max_attempts", "key", *_POLICY_OPTIONS)


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """How one call of a group is made: by the group's options, as `.options()` of a method has changed them."""

    policy: Policy
    retry: Retry
    max_attempts: int
    #: For "consistent_hash" a number of 64 bits, see _key_number; for a function what the user gave.
    key: Any = None

    def deadline_ns(self) -> int:
        """The deadline of a call that is made now."""
        timeout_s = self.policy.timeout_s
        return _core.NEVER_NS if timeout_s is None else _core.now_ns() + int(timeout_s * 1e9)

    def replace(self, balancer: str | None, options: dict[str, Any]) -> tuple[GroupOptions, dict[str, Any]]:
        """(the changed options, those that are Ray's). `balancer`: the group's; None: a function of the user's."""
        ours = {name: options.pop(name) for name in list(options) if name in _POLICY_OPTIONS}
        for name in options:
            if name in OPTION_NAMES:
                raise TypeError(f"option {name!r} belongs to a member's handle: actorsub.wrap(handle, {name}=...)")
            if name not in _CALL_OPTIONS:
                _check_ray_option(name)
        changed: dict[str, Any] = {"policy": self.policy.replace(**ours)}
        if "retry" in options:
            changed["retry"] = check_retry(options.pop("retry"))
        if "max_attempts" in options:
            changed["max_attempts"] = check_max_attempts(options.pop("max_attempts"))
        if "key" in options:
            if balancer not in ("consistent_hash", None):
                raise ValueError(f"option 'key' is for balancer='consistent_hash', this group has {balancer!r}")
            key = options.pop("key")
            changed["key"] = key if balancer is None else _key_number(key)
        return dataclasses.replace(self, **changed), options


def _check_ray_option(name: str) -> None:
    known = _ray_compat.method_option_names()
    if known is None or name in known:
        return
    near = difflib.get_close_matches(name, _CALL_OPTIONS, 1, 0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise TypeError(
        f"unknown option {name!r}{hint} A group takes {', '.join(_CALL_OPTIONS)}; Ray takes {', '.join(sorted(known))}"
    )


def check_retry(value: Any) -> Any:
    if not isinstance(value, str) or value not in ("unsent", "always", "never"):
        raise ValueError(f"retry must be one of 'unsent', 'always', 'never', got {shown(value)}")
    return value


def check_max_attempts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_attempts must be a whole number, got {shown(value)} of type {type(value).__name__}")
    if not 1 <= value <= 100:
        raise ValueError(f"max_attempts must be from 1 to 100, got {shown(value)}")
    return value


def _key_number(key: Any) -> int:
    # Not hash(), whose value differs between processes: a key has to reach the same member from each.
    if isinstance(key, str):
        # Names of files may have surrogates.
        data = b"s" + key.encode(errors="surrogatepass")
    elif isinstance(key, bytes):
        data = b"b" + key
    elif isinstance(key, int) and not isinstance(key, bool):
        data = b"i%x" % key
    else:
        # Names the type, not the value: keys are often about people.
        raise TypeError(f"key must be a str, bytes or int, got one of type {type(key).__name__}")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def check_ejection(consecutive: Any, base_s: Any, max_s: Any, share: Any) -> None:
    if consecutive is not None and (
        isinstance(consecutive, bool) or not isinstance(consecutive, int) or not 1 <= consecutive <= 127
    ):
        raise ValueError(
            f"consecutive_failures must be a whole number from 1 to 127, or None, got {shown(consecutive)}"
        )
    for name, value in (("base_ejection_s", base_s), ("max_ejection_s", max_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
            raise ValueError(f"{name} must be over 0 and at most 86400 seconds, got {shown(value)}")
    if max_s < base_s:
        raise ValueError(f"max_ejection_s must be at least base_ejection_s ({base_s!r}), got {max_s!r}")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"max_ejected_share must be from 0 to 1, got {shown(share)}")
