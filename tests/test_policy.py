"""Options: what they take, what they say when it is something else, and which one wins."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import actorsub
from actorsub.policy import MAX_TIMEOUT_S, split_options


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"on_unavailable": "fail"}, ValueError, "must be one of 'auto', 'ref', 'raise', 'wait', got 'fail'"),
        ({"on_unavailable": None}, TypeError, "on_unavailable must be one of .*NoneType"),
        ({"on_unavailable": ["raise"]}, TypeError, "on_unavailable"),
        ({"on_pending": "raise"}, ValueError, "on_pending must be one of 'submit', 'fail', 'wait', got 'raise'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be over 0"),
        ({"timeout_s": -1.5}, ValueError, r"timeout_s must be over 0 .*got -1\.5"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s .*nan"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s .*inf"),
        ({"timeout_s": MAX_TIMEOUT_S * 2}, ValueError, "at most 31622400 seconds"),
        ({"timeout_s": "3"}, TypeError, "timeout_s must be a number of seconds or None, got '3' of type str"),
        ({"timeout_s": True}, TypeError, "timeout_s"),
        ({"on_unavaliable": "raise"}, TypeError, "unknown option 'on_unavaliable'; actorsub takes on_unavailable"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        actorsub.Policy().replace(**options)


def test_values_at_the_edges_are_taken() -> None:
    for timeout_s in (None, 1e-9, 1, MAX_TIMEOUT_S):
        assert actorsub.Policy(timeout_s=timeout_s).timeout_s == timeout_s


def test_replace_changes_only_what_is_named() -> None:
    policy = actorsub.Policy(on_unavailable="wait", timeout_s=3)
    assert policy.replace(on_unavailable="raise") == actorsub.Policy(on_unavailable="raise", timeout_s=3)
    assert policy.replace() is policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(AttributeError):
        policy.timeout_s = 5  # type: ignore[misc]


def test_changes_are_what_differs_from_the_defaults() -> None:
    assert actorsub.Policy().changes == {}
    policy = actorsub.Policy(on_unavailable="wait", timeout_s=3, max_queued=1000, silence_in_flight_s=None)
    assert policy.changes == {"on_unavailable": "wait", "timeout_s": 3, "silence_in_flight_s": None}
    assert actorsub.Policy().replace(**policy.changes) == policy


def test_options_are_split_between_ray_and_us() -> None:
    assert split_options({"num_cpus": 1, "on_unavailable": "raise", "timeout_s": 2}) == (
        {"on_unavailable": "raise", "timeout_s": 2},
        {"num_cpus": 1},
    )


def test_a_slip_in_one_of_our_options_is_not_left_to_ray() -> None:
    with pytest.raises(TypeError, match="unknown option 'on_unavailible'; did you mean 'on_unavailable'"):
        actorsub.remote(max_restarts=-1, on_unavailible="raise")


def test_mistakes_at_the_decorator_show_at_the_decorator() -> None:
    with pytest.raises(ValueError, match="on_unavailable must be one of"):
        actorsub.remote(max_restarts=-1, on_unavailable="never")
    with pytest.raises(TypeError, match="takes a class"):
        actorsub.remote(lambda: None)
    with pytest.raises(TypeError, match="bare on a class, or with keyword options"):
        actorsub.remote(1, 2)
    with pytest.raises(TypeError, match="bare on a class, or with keyword options"):
        actorsub.remote()


@pytest.mark.parametrize("thing", [None, 3, "actor", object()])
def test_only_handles_are_wrapped(thing: object) -> None:
    with pytest.raises(TypeError, match="takes a Ray actor handle"):
        actorsub.wrap(thing)
    for function in (actorsub.state, actorsub.stats, actorsub.policy):
        with pytest.raises(TypeError, match="expected a handle made by actorsub"):
            function(thing)  # type: ignore[operator]


def test_the_public_names_are_these() -> None:
    assert sorted(name for name in vars(actorsub) if not name.startswith("_") and name in actorsub.__all__) == sorted(
        name for name in actorsub.__all__ if name != "__version__"
    )
