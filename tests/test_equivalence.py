"""A wrapped handle does what a plain one does: each case of `equivalence/`, on plain and on wrapped handles.

And what has no plain form to compare with: plain and wrapped handles together, and our options beside Ray's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import inspect
import pathlib
import uuid
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.actor
import ray.exceptions
from equivalence.actors import Groups, Methods, OddNames
from equivalence.world import CASES, World, outcome
from helpers import get, wait_until

import actorsub
from actorsub import _ray_compat
from actorsub.handle import MAX_VARIANTS

#: In the order in which the documentation lists their cases.
TOPICS = (
    "calling",
    "results",
    "options",
    "kinds",
    "errors",
    "cancelling",
    "bookkeeping",
    "libraries",
    "handles",
    "classes",
)
for _topic in TOPICS:
    importlib.import_module(f"equivalence.{_topic}")


@pytest.fixture(scope="module")
def worlds(ray_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    directory = tmp_path_factory.mktemp("worlds")
    made = {kind: World(kind, directory) for kind in ("plain", "created", "wrapped")}
    yield made
    for world in made.values():
        world._shared.clear()


@pytest.mark.parametrize("identifier", CASES)
def test_same_as_plain(identifier: str, worlds: dict[str, World]) -> None:
    one = CASES[identifier]
    # All at the same time: most cases wait for processes or for Ray's pause between two tries.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {kind: pool.submit(outcome, one, worlds[kind]) for kind in ("plain", *one.kinds)}
    plain = futures["plain"].result()
    if one.raises is not None:
        assert plain[0] == "raises", f"Ray itself did not raise: {plain}"
    for kind in one.kinds:
        assert futures[kind].result() == plain, kind


def test_mixed_with_plain(worlds: dict[str, World]) -> None:
    """A plain and a wrapped handle of one actor are one key, both ways round."""
    plain = worlds["plain"].methods
    wrapped = actorsub.wrap(plain)
    other = worlds["created"].methods
    assert plain == wrapped
    assert wrapped == plain
    assert not plain != wrapped  # noqa: SIM202
    assert hash(plain) == hash(wrapped)
    assert len({plain, wrapped, other}) == 2
    assert {plain: "value"}[wrapped] == {wrapped: "value"}[plain] == "value"
    assert wrapped in [plain]
    assert [other, wrapped].index(plain) == 1
    assert actorsub.wrap(plain, on_unavailable="raise") == wrapped
    assert plain != other


def test_two_handles_of_one_actor_keep_their_own_policy(worlds: dict[str, World]) -> None:
    plain = worlds["plain"].methods
    first, second = actorsub.wrap(plain, on_unavailable="raise"), actorsub.wrap(plain, timeout_s=3)
    assert actorsub.policy(first) == actorsub.Policy(on_unavailable="raise")
    assert actorsub.policy(second) == actorsub.Policy(timeout_s=3)
    assert get([first.echo.remote(1), second.echo.remote(2), plain.echo.remote(3)]) == [1, 2, 3]


def test_plain_and_wrapped_handles_share_the_pending_calls(ray_local: None, tmp_path: pathlib.Path) -> None:
    """The limit is of the actor in this process, whoever of its handles submits."""
    plain = ray.remote(num_cpus=0, max_pending_calls=2)(Methods).remote()
    wrapped = actorsub.wrap(plain)
    get(plain.nothing.remote())
    gate = tmp_path / "gate"
    refs = [wait_until(lambda handle=handle: held_or_none(handle, gate)) for handle in (plain, wrapped)]
    for handle in (plain, wrapped):
        with pytest.raises(ray.exceptions.PendingCallsLimitExceeded):
            handle.echo.remote(1)
    gate.touch()
    assert get(refs) == ["held", "held"]


def held_or_none(handle: Any, gate: pathlib.Path) -> Any:
    try:
        return handle.hold.remote(str(gate))
    except ray.exceptions.PendingCallsLimitExceeded:
        return None


def test_a_warning_of_rays_names_the_line_of_the_caller(worlds: dict[str, World]) -> None:
    """Python shows a deprecation where the line that is to blame is the user's own, and hides it elsewhere."""

    def warned(world: World) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.methods.items.options(num_returns="dynamic")
        return [(one.category, str(one.message), one.filename, one.lineno) for one in caught]

    plain = warned(worlds["plain"])
    assert warned(worlds["created"]) == warned(worlds["wrapped"]) == plain


def test_a_half_built_handle_answers_getattr() -> None:
    """As copy, pickle and debuggers make them: no recursion, AttributeError only."""
    for kind in (actorsub.ActorHandle, type(actorsub.ActorHandle.__new__(actorsub.ActorHandle))):
        with pytest.raises(AttributeError):
            kind.__new__(kind).anything  # noqa: B018


def test_generic_annotation_of_the_handle_class() -> None:
    """`ActorHandle[Worker]` is how Ray's own class is written in annotations, where Ray's is generic."""
    if not hasattr(ray.actor.ActorHandle, "__class_getitem__"):
        pytest.skip("Ray's handle class is not generic in this version")
    assert ray.actor.ActorHandle[Methods]
    assert actorsub.ActorHandle[Methods]


# ---------------------------------------------------------------------------------------------------------------------
# Our options beside Ray's: there is no plain form to compare with.


def test_ours_and_rays_options_together(ray_local: None) -> None:
    """Nearest wins, option by option: decorator, then options(), then wrap, then the call."""

    @actorsub.remote(num_cpus=0, max_restarts=2, on_unavailable="raise", timeout_s=5)
    class Worker:
        def echo(self, x: int) -> int:
            return x

    assert Worker.__ray_metadata__.max_restarts == 2
    plain_options = Worker.remote()
    assert actorsub.policy(plain_options) == actorsub.Policy(on_unavailable="raise", timeout_s=5)
    name = uuid.uuid4().hex
    mixed = Worker.options(name=name, max_task_retries=1, on_pending="wait").remote()
    assert actorsub.policy(mixed) == actorsub.Policy(on_unavailable="raise", timeout_s=5, on_pending="wait")
    assert mixed._ray_max_task_retries == 1
    assert ray.get_actor(name) == mixed
    ours_only = Worker.options(on_unavailable="auto", timeout_s=None).remote()
    assert actorsub.policy(ours_only) == actorsub.Policy()
    again = actorsub.wrap(mixed, on_unavailable="wait")
    assert actorsub.policy(again) == actorsub.Policy(on_unavailable="wait", timeout_s=5, on_pending="wait")
    assert actorsub.wrap(again) is again
    assert get([h.echo.remote(i) for i, h in enumerate([plain_options, mixed, ours_only, again])]) == [0, 1, 2, 3]
    call = again.echo.options(timeout_s=7, name="n").options(on_unavailable="raise")
    assert call._actorsub_policy == actorsub.Policy(on_unavailable="raise", timeout_s=7, on_pending="wait")
    assert get(call.remote(4)) == 4
    found = actorsub.get_actor(name, on_unavailable="raise")
    assert found == mixed
    assert actorsub.policy(found) == actorsub.Policy(on_unavailable="raise")


def test_ours_through_remote_of_the_class(ray_local: None) -> None:
    """`_remote` is what libraries call, with any option; get_if_exists comes back through it."""
    cls = actorsub.remote(num_cpus=0)(OddNames)
    name = uuid.uuid4().hex
    first = cls._remote(name=name, get_if_exists=True, on_unavailable="raise")
    get(first.call.remote())
    again = cls._remote(name=name, get_if_exists=True, timeout_s=2)
    assert first == again
    assert actorsub.policy(first) == actorsub.Policy(on_unavailable="raise")
    assert actorsub.policy(again) == actorsub.Policy(timeout_s=2)


def test_concurrency_groups_survive_our_options(ray_local: None) -> None:
    """Ray drops the groups from the options of a class when `.options()` is called; ours alone must not hide them."""
    cls = actorsub.remote(num_cpus=0, concurrency_groups={"io": 1})(Groups)
    plain = ray.remote(num_cpus=0, concurrency_groups={"io": 1})(Groups)
    expected = get(plain.options(max_restarts=1).remote().in_io.remote())
    assert get(cls.options(on_unavailable="raise").remote().in_io.remote()) == expected
    assert get(cls.options(max_restarts=1, on_unavailable="raise").remote().in_io.remote()) == expected


def test_a_method_keeps_what_its_options_made(worlds: dict[str, World]) -> None:
    method = worlds["created"].methods.echo
    kept = method.options(timeout_s=1, name="same")
    assert method.options(timeout_s=1, name="same") is kept
    assert kept is not method.options(timeout_s=2, name="same")
    assert kept.options(timeout_s=2) is not method.options(timeout_s=2)
    # Equal, but not the same thing.
    assert method.options(max_queued=1) is not None
    with pytest.raises(TypeError, match="max_queued"):
        method.options(max_queued=True)
    with pytest.raises(TypeError, match="max_queued"):
        method.options(max_queued=1.0)
    # A value that may change is read when it is given.
    labels = {"kind": "one"}
    if "_labels" in (_ray_compat.method_option_names() or ()):
        assert method.options(_labels=labels) is not method.options(_labels=labels)
    for number in range(3 * MAX_VARIANTS):
        method.options(timeout_s=number + 1.5)
    assert len(method._actorsub_variants) <= MAX_VARIANTS
    assert method.options(timeout_s=30).call(7).result(60) == 7


def test_kept_options_keep_no_actor_alive(ray_local: None) -> None:
    handle = actorsub.remote(num_cpus=0)(Methods).remote()
    assert handle.echo.options(timeout_s=60, name="kept").call(1).result(60) == 1
    variant = weakref.ref(handle.echo.options(timeout_s=60, name="kept"))
    gc.collect()
    gc.disable()
    try:
        del handle
        assert variant() is None, "only the garbage collector would end it"
    finally:
        gc.enable()


def test_options_over_options_of_a_method(worlds: dict[str, World]) -> None:
    """Ray's own result of `.options()` has no `.options()`; ours has, and adds up."""
    method = worlds["created"].methods.triple
    refs = method.options(num_returns=3).options(name="n").options(timeout_s=1).remote()
    assert get(refs) == [1, 2, 3]
    with pytest.raises(TypeError, match="unexpected keyword"):
        method.options(name="n").options(timeout_s=1).remote(no_such=1)


WRONG_VALUES = [
    ("on_unavailable", "Raise", ValueError),
    ("on_unavailable", True, TypeError),
    ("on_unavailable", None, TypeError),
    ("on_pending", "never", ValueError),
    ("on_pending", 1, TypeError),
    ("timeout_s", 0, ValueError),
    ("timeout_s", -1, ValueError),
    ("timeout_s", float("nan"), ValueError),
    ("timeout_s", float("inf"), ValueError),
    ("timeout_s", "1", TypeError),
    ("timeout_s", True, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG_VALUES, ids=[f"{n}={v!r}" for n, v, _ in WRONG_VALUES])
def test_wrong_value_of_our_option_is_named_where_it_is_written(
    worlds: dict[str, World], name: str, value: Any, error: type[Exception]
) -> None:
    handle = worlds["created"].methods
    cls = worlds["created"].actor_class(Methods)
    places = [
        actorsub.remote,
        cls.options,
        lambda **options: cls.options(max_restarts=1, **options),
        cls._remote,
        lambda **options: actorsub.wrap(handle, **options),
        lambda **options: actorsub.wrap(worlds["plain"].methods, **options),
        lambda **options: actorsub.get_actor("nobody", **options),
        handle.echo.options,
        lambda **options: handle.echo._remote([1], {}, **options),
        actorsub.Policy,
    ]
    for place in places:
        with pytest.raises(error, match=name):
            place(**{name: value})


def test_unknown_option_is_named_where_it_is_written(worlds: dict[str, World]) -> None:
    handle = worlds["created"].methods
    for place in (actorsub.wrap, functools.partial(actorsub.get_actor, "nobody"), None):
        with pytest.raises(TypeError, match="no_such_option"):
            if place is actorsub.wrap:
                actorsub.wrap(handle, no_such_option=1)
            elif place is None:
                handle.echo.options(no_such_option=1)
            else:
                place(no_such_option=1)


NO_HANDLES = {
    "number": 1,
    "None": None,
    "name": "name",
    "object": object(),
    "plain class": Methods,
    "function": lambda: None,
}


@pytest.mark.parametrize("thing", NO_HANDLES.values(), ids=NO_HANDLES)
def test_what_wrap_and_remote_do_not_take(ray_local: None, thing: Any) -> None:
    with pytest.raises(TypeError, match="handle"):
        actorsub.wrap(thing)
    if not inspect.isclass(thing):
        with pytest.raises(TypeError, match="class"):
            actorsub.remote(thing)
    for function in (actorsub.state, actorsub.stats, actorsub.policy):
        with pytest.raises(TypeError, match="handle"):
            function(thing)


def test_remote_over_ray_remote_says_what_to_do(ray_local: None) -> None:
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote(ray.remote(Methods))
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote()
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote(Methods, on_unavailable="raise")
