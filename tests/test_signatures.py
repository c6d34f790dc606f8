"""Direct submission takes arguments as Ray takes them, or not at all: generated signatures and argument lists.

`Submission.flatten` is what stands in for Ray's `flatten_args`, which binds the arguments with `inspect`. Where it
answers, the answer has to be Ray's; where it does not, Ray's own code is asked, so it must answer wherever they
are fine and ordinary.
"""

from __future__ import annotations

import inspect
import keyword
from typing import Any

import pytest
import ray
from helpers import wait_for_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import actorsub
from actorsub import _core, _ray_compat

Kind = inspect._ParameterKind

try:
    from ray._common.signature import flatten_args
except ImportError:
    from ray._private.signature import flatten_args

NAMES = ("a", "b", "c", "d", "e", "args", "kwargs", "self", "_x", "name")


@st.composite
def signatures(draw: Any) -> list[inspect.Parameter]:
    """Any list of parameters that a Python function can have, by names from a small set."""
    count = draw(st.integers(0, 6))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=count, max_size=count, unique=True))
    kinds = sorted(draw(st.lists(st.sampled_from(list(Kind)), min_size=count, max_size=count)))
    parameters: list[inspect.Parameter] = []
    has_default = False
    for name, kind in zip(names, kinds, strict=True):
        if kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) and any(one.kind is kind for one in parameters):
            continue
        default = inspect.Parameter.empty
        if kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD):
            optional = draw(st.booleans())
            if kind is not Kind.KEYWORD_ONLY:
                # Python allows no required parameter after an optional one.
                optional = has_default = has_default or optional
            if optional:
                default = None
        parameters.append(inspect.Parameter(name, kind, default=default))
    return parameters


values = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=2))
arguments = st.tuples(
    st.lists(values, max_size=7).map(tuple), st.dictionaries(st.sampled_from((*NAMES, "unknown")), values, max_size=5)
)


def submission_for(parameters: list[inspect.Parameter]) -> Any:
    shape = [(one.name, one.kind, one.default is one.empty and one.kind not in (2, 4)) for one in parameters]
    return _core.Submission((None,), 0, 1, shape)


def by_ray(parameters: list[inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ray's list; None where it raises TypeError, as its `.remote()` does for a keyword named `self`."""
    try:
        return None if "self" in kwargs else flatten_args(parameters, args, kwargs)
    except TypeError:
        return None


@settings(max_examples=3000, deadline=None, derandomize=True)
@given(signatures(), arguments)
def test_flattens_as_ray_does(parameters: list[inspect.Parameter], given_: tuple[Any, Any]) -> None:
    args, kwargs = given_
    flat = submission_for(parameters).flatten(args, kwargs)
    if any(one.kind is Kind.POSITIONAL_ONLY and one.name in kwargs for one in parameters):
        # Whether **kwargs takes it depends on Python's version.
        assert flat is None
    else:
        assert flat == by_ray(parameters, args, kwargs)


def test_many_parameters_are_left_to_ray() -> None:
    parameters = [(f"p{number}", Kind.POSITIONAL_OR_KEYWORD, False) for number in range(64)]
    with pytest.raises(ValueError, match="at most 63 parameters"):
        _core.Submission((None,), 0, 1, parameters)


def test_refs_are_left_to_ray(ray_local: None) -> None:
    takes_all = submission_for([inspect.Parameter("args", Kind.VAR_POSITIONAL)])
    assert takes_all.flatten((1,), {}) is not None
    assert takes_all.flatten((ray.put(1),), {}) is None


# ---------------------------------------------------------------------------------------------------------------------
# The same for real, on an actor whose methods have many signatures.


SHAPES = {
    "none": "",
    "one": "a",
    "two": "a, b=2",
    "only": "*, a, b=2",
    "positional": "a, /, b=2",
    "anything": "*args, **kwargs",
    "mixed": "a, *args, b, c=3, **kwargs",
    "positional_and_keywords": "a, /, **kwargs",
}


def make_class() -> type:
    """A class with a method for each shape; each returns what it was given."""
    namespace: dict[str, Any] = {}
    lines = ["class Shapes:"]
    for name, shape in SHAPES.items():
        given_names = [part.split("=")[0].strip(" *") for part in shape.split(",")]
        returned = ", ".join(one for one in given_names if one.isidentifier() and not keyword.iskeyword(one))
        lines.append(f"    def {name}(self{', ' if shape else ''}{shape}): return [{returned}]")
    exec("\n".join(lines), namespace)
    cls: type = namespace["Shapes"]
    return cls


@pytest.fixture
def shapes(ray_local: None) -> Any:
    plain = ray.remote(num_cpus=0)(make_class()).remote()
    wrapped = actorsub.wrap(plain)
    # Up and known to be: from here on calls go directly.
    ray.get(wrapped.none.remote())
    wait_for_state(wrapped, actorsub.ActorState.ALIVE)
    return plain, wrapped


def outcome(handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return ray.get(getattr(handle, method).remote(*args, **kwargs), timeout=30)
    except TypeError as error:
        return str(error)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(method=st.sampled_from(sorted(SHAPES)), given_=arguments)
def test_same_outcome_as_plain(shapes: Any, method: str, given_: tuple[Any, Any]) -> None:
    plain, wrapped = shapes
    assert outcome(wrapped, method, *given_) == outcome(plain, method, *given_)


def test_the_direct_way_is_taken(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above compare Ray with itself."""
    _, wrapped = shapes
    if _ray_compat.direct_binding() is None:
        pytest.skip(f"Ray {ray.__version__} is not known: {_ray_compat.report()}")
    through_ray: list[str] = []
    original = ray.actor.ActorHandle._actor_method_call

    def note(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        through_ray.append(method_name)
        return original(self, method_name, *args, **kwargs)

    monkeypatch.setattr(ray.actor.ActorHandle, "_actor_method_call", note)
    assert ray.get(wrapped.two.remote(1, b=3)) == [1, 3]
    assert through_ray == []
    # A ref among the arguments is not ordinary.
    assert ray.get(wrapped.two.remote(ray.put(1))) == [1, 2]
    assert through_ray == ["two"]


def test_tracing_goes_through_ray(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wrapped = shapes
    from ray.util.tracing import tracing_helper

    through_ray: list[Any] = []
    original = ray.actor.ActorMethod._remote

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        through_ray.append(self)
        # As without tracing, which would need OpenTelemetry.
        monkeypatch.setattr(tracing_helper, "_global_is_tracing_enabled", False)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ray.actor.ActorMethod, "_remote", note)
    monkeypatch.setattr(tracing_helper, "_global_is_tracing_enabled", True)
    method = actorsub.wrap(wrapped, on_unavailable="raise").two
    assert ray.get(method.remote(1)) == [1, 2]
    assert len(through_ray) == 1


@pytest.mark.parametrize(
    "docstring",
    [
        "CoreWorker.submit_actor_task(self, Language language, args, something_new)",
        "CoreWorker.submit_actor_task(self, *args)",
        "no signature at all",
        "",
    ],
)
def test_an_unknown_submit_is_not_used(docstring: str) -> None:
    class CoreWorker:
        def submit_actor_task(self) -> None: ...

    CoreWorker.submit_actor_task.__doc__ = docstring
    assert _ray_compat._submit_parameters(CoreWorker) is None


def test_on_an_unknown_ray_calls_go_through_ray(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = shapes
    monkeypatch.setattr(_ray_compat, "_direct", None)
    method = actorsub.wrap(plain).two
    assert _ray_compat.submission_of(plain.two, None) is None
    assert ray.get(method.remote(1, b=5)) == [1, 5]
