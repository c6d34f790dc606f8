"""Bad input: half-built objects, numbers that no option takes, and arguments that cannot be pickled. Each is an
exception that says what is wrong, and none tells what an argument holds."""

from __future__ import annotations

import decimal
import fractions
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import ray
from helpers import Restartable, wait_until
from subprocesses import run_script

import actorsub
from actorsub.policy import MAX_TIMEOUT_S

pytestmark = pytest.mark.usefixtures("ray_of_module")

PATIENCE_S = 60.0


# ---------------------------------------------------------------------------------------------------------------------
# Half-built objects, as copy, pickle and curious users make them.

WALK = """
import importlib, inspect, pkgutil, faulthandler, logging, warnings
warnings.simplefilter("ignore")
# What is raised in __del__, and what is logged of it, is not looked at here.
logging.disable()
sys.unraisablehook = threading.excepthook = lambda _: None
faulthandler.dump_traceback_later(50, exit=True)
if "connected" in sys.argv:
    ray.init(**RAY_ARGS)

modules = [importlib.import_module(f"actorsub.{one.name}") for one in pkgutil.iter_modules(actorsub.__path__)
           if one.name not in ("__main__", "_demo")]
classes = sorted({thing for module in modules for thing in vars(module).values()
                  if isinstance(thing, type) and thing.__module__.startswith("actorsub")},
                 key=lambda cls: (cls.__module__, cls.__name__))
print(len(classes), "classes")
values = [None, 0, "", (), [], {}, object()]
built = {}
for cls in classes:
    try:
        built[cls] = cls.__new__(cls)
    except (TypeError, ValueError, AttributeError) as error:
        print("refused", cls.__qualname__)
for cls, half in built.items():
    print("built", cls.__qualname__)
calls = raised = 0
for cls, half in built.items():
    for name in sorted(set(dir(cls)) | set(dir(type(cls)))):
        # Writing to the class itself would only break this walk.
        if name in ("__class__", "__init_subclass__", "__subclasshook__", "__base__", "__new__"):
            continue
        # Blocks by its nature, until the threads have something to do.
        if (cls.__name__, name) == ("Watcher", "_block"):
            continue
        try:
            found = getattr(half, name)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raised += 1
            continue
        if not callable(found):
            continue
        for arguments in [(), *[(value,) * count for value in values for count in (1, 2, 3, 4)]]:
            # A new one each time: some of them are built by a call.
            fresh = cls.__new__(cls)
            print("calling", cls.__qualname__, name, len(arguments), flush=True) if "loud" in sys.argv else None
            calls += 1
            try:
                result = getattr(fresh, name)(*arguments)
                if inspect.iscoroutine(result):
                    result.close()
            except BaseException as error:
                raised += 1
            del fresh
print("raised", raised, "of", calls)
del half, found, result
built.clear()
gc.collect()

# The functions of the core, as far as they are not there to change or to stop this process.
OTHERS = ("bind_", "after_fork", "stop_", "wait_for", "call_later")
functions = [name for name, thing in vars(actorsub._core).items()
             if inspect.isbuiltin(thing) and not name.startswith(OTHERS)]
for name in functions:
    for arguments in [(value,) * count for value in values for count in range(9)]:
        try:
            getattr(actorsub._core, name)(*arguments)
        except Exception:
            pass
print(len(functions), "functions")
# And the exit is as any other.
sys.unraisablehook = sys.__unraisablehook__
"""


@pytest.mark.parametrize("connected", ["", "connected"])
def test_half_built_objects_raise_and_do_not_crash(connected: str) -> None:
    text = run_script(WALK, connected, timeout_s=120)
    refused = set(re.findall(r"^refused (\S+)", text, re.MULTILINE))
    # What has native parts cannot be had without them.
    assert {"Actor", "Submission", "Supply", "Traveller", "GroupMember", "GroupPicker", "GroupState"} <= refused
    assert {"Call", "GroupCall", "ActorHandle", "ActorMethod", "ReplicaGroup", "ObjectRef", "CallQueue"} <= set(
        re.findall(r"^built (\S+)", text, re.MULTILINE)
    )


def test_a_half_built_object_says_that_it_is_one() -> None:
    call = actorsub.Call.__new__(actorsub.Call)
    for use in (
        call.result,
        lambda: call.result(0.1),
        call.exception,
        call.cancel,
        call.done,
        lambda: call.add_done_callback(print),
        lambda: next(call.__await__()),
    ):
        with pytest.raises(RuntimeError, match="calls are made by methods of handles"):
            use()
    half = actorsub.ActorHandle.__new__(actorsub.ActorHandle)
    for function in (actorsub.state, actorsub.stats, actorsub.policy, actorsub.wrap):
        with pytest.raises(TypeError, match="expected a handle made by actorsub"):
            function(half)
    with pytest.raises(TypeError, match="expected a handle made by actorsub"):
        actorsub.on_state_change(half, print)
    with pytest.raises(TypeError, match="actor_of"):
        actorsub._core.Actor.__new__(actorsub._core.Actor)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers.


class Nasty:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


NO_SECONDS: list[Any] = ["1", b"1", True, [1], 1j, Nasty(), decimal.Decimal(1), fractions.Fraction(1)]
NO_SECONDS += [numpy.float32(1), numpy.int64(1), numpy.bool_(True), numpy.array([1.0])]
BAD_SECONDS: list[Any] = [0, -1, -0.5, float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), 10**5000]
BAD_SECONDS += [MAX_TIMEOUT_S * 1.01, numpy.float64("nan")]
NO_COUNTS: list[Any] = [
    "1",
    True,
    1.0,
    float("nan"),
    [1],
    Nasty(),
    decimal.Decimal(1),
    numpy.int64(1),
    numpy.bool_(True),
]
BAD_COUNTS: list[Any] = [-1, -(10**400), 2**31, 10**400, 10**5000]


def plain_worker() -> Any:
    @ray.remote(num_cpus=0)
    class Plain:
        def answer(self) -> int:
            return 42

    return Plain.remote()


@pytest.fixture(scope="module")
def plain(ray_of_module: None) -> Any:
    return plain_worker()


@pytest.fixture(scope="module")
def ways(plain: Any) -> dict[str, Callable[..., Any]]:
    wrapped = actorsub.wrap(plain)
    group = actorsub.ReplicaGroup([wrapped])

    class Plain:
        pass

    created = actorsub.remote(Plain)
    return {
        "Policy": actorsub.Policy,
        "replace": actorsub.Policy().replace,
        "wrap": lambda **options: actorsub.wrap(plain, **options),
        "wrap again": lambda **options: actorsub.wrap(wrapped, **options),
        "get_actor": lambda **options: actorsub.get_actor("nobody", **options),
        "remote": actorsub.remote,
        "class options": created.options,
        "options": wrapped.answer.options,
        "ReplicaGroup": lambda **options: actorsub.ReplicaGroup([wrapped], **options),
        "group options": group.answer.options,
    }


OF_GROUPS = {"timeout_s", "max_in_flight", "max_queued", "on_unavailable"}
WAYS = (
    "Policy", "replace", "wrap", "wrap again", "get_actor", "remote", "class options", "options", "ReplicaGroup",
    "group options",
)  # fmt: skip


def check_refused(way: Callable[..., Any], option: str, values: list[Any], kinds: Any, takes: str) -> None:
    for value in values:
        with pytest.raises(kinds, match=f"{option} must be .*{takes}") as caught:
            way(**{option: value})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_an_option_does_not_take_is_refused_where_it_is_written(
    ways: dict[str, Callable[..., Any]], way: str
) -> None:
    seconds = {"timeout_s": "or None", "silence_timeout_s": "seconds", "silence_in_flight_s": "or None"}
    counts = {"max_in_flight": "or None", "max_queued": ""}
    of_group = way in ("ReplicaGroup", "group options")
    for option, takes in seconds.items():
        if not of_group or option in OF_GROUPS:
            check_refused(ways[way], option, NO_SECONDS, TypeError, "number of seconds")
            check_refused(ways[way], option, BAD_SECONDS, ValueError, takes)
    for option, takes in counts.items():
        check_refused(ways[way], option, NO_COUNTS, TypeError, f"whole number{takes and ' ' + takes}")
        check_refused(ways[way], option, BAD_COUNTS, ValueError, "from [01] to 2147483647")
    check_refused(ways[way], "on_unavailable", [None, 1, b"raise", Nasty(), ["raise"]], TypeError, "'auto', 'ref'")
    check_refused(ways[way], "on_unavailable", ["", "Raise", "x" * 10**6], ValueError, "'auto', 'ref'")


@pytest.mark.parametrize(
    ("option", "takes"),
    [
        ("max_attempts", "from 1 to 100|a whole number"),
        ("consecutive_failures", "from 1 to 127, or None"),
        ("base_ejection_s", "over 0 and at most 86400 seconds"),
        ("max_ejection_s", "over 0 and at most 86400 seconds"),
        ("max_ejected_share", "from 0 to 1"),
        ("bounded_load", "from 1 to 100"),
        ("retry", "'unsent', 'always', 'never'"),
    ],
)
def test_a_number_that_a_group_does_not_take_is_refused(
    ways: dict[str, Callable[..., Any]], option: str, takes: str
) -> None:
    values = [value for value in NO_COUNTS if value != 1.0 or type(value) is bool]
    values += [-1, -(10**400), 10**400, 10**5000, float("nan"), float("inf"), numpy.array([1.0, 2.0])]
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"{option} must be .*({takes})") as caught:
            ways["ReplicaGroup"](**{option: value})
        assert len(str(caught.value)) < 400


def test_numbers_that_are_taken(ways: dict[str, Callable[..., Any]]) -> None:
    for value in (1, 0.5, numpy.float64(0.5), MAX_TIMEOUT_S, 1e-300):
        assert actorsub.Policy(timeout_s=value).timeout_s == value
    assert ways["options"](timeout_s=numpy.float64(60)).call().result(PATIENCE_S) == 42
    assert actorsub.Policy(max_queued=0, max_in_flight=2**31 - 1).max_queued == 0


def test_keys(plain: Any) -> None:
    group = actorsub.ReplicaGroup([plain], balancer="consistent_hash")
    for key in ("", "\udcff", b"", 0, -1, 10**5000):
        assert group.answer.options(key=key).call().result(PATIENCE_S) == 42
    for wrong in (None, True, 1.5, ["4711 0815"], Nasty()):
        with pytest.raises(TypeError, match="key must be a str, bytes or int") as caught:
            group.answer.options(key=wrong)
        assert "4711" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments that cannot be pickled.


class Secret:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.word = "pass-4711"

    def __repr__(self) -> str:
        return f"Secret({self.word})"


def text_of(error: BaseException | None) -> str:
    """The message and those of its causes, as a traceback shows them."""
    text = ""
    while error is not None:
        text += f"{error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text


@pytest.mark.parametrize("how", ["at once", "waiting", "away", "group", "group, always"])
def test_what_cannot_be_pickled_is_named_and_not_shown(tmp_path: pathlib.Path, how: str) -> None:
    one = Restartable(tmp_path, on_unavailable="wait")
    method: Any = one.handle.__ray_call__
    if how == "waiting":
        one.handle.hold.options(max_in_flight=1).call()
        wait_until((tmp_path / "held").exists)
        method = method.options(max_in_flight=1)
    elif how == "away":
        one.kill()
    elif how == "group":
        method = actorsub.ReplicaGroup([one.handle])["__ray_call__"]
    elif how == "group, always":
        method = actorsub.ReplicaGroup([one.handle], retry="always")["__ray_call__"]

    def run(worker: Any, *args: Any, **kwargs: Any) -> None: ...

    for args, kwargs, place in (
        ((run, "also pass-4711", Secret()), {}, "argument 3"),
        ((run, [Secret()]), {}, "argument 2"),
        ((run,), {"also": "pass-4711", "token": Secret()}, "argument 'token'"),
        ((run, {"pass-4711": Secret()}), {}, "argument 2"),
    ):
        with pytest.raises(TypeError, match=f"{place} of a call, of type (Secret|list|dict): cannot pickle") as caught:
            method.call(*args, **kwargs)
        assert "4711" not in text_of(caught.value)
    assert not list(actorsub.stats(one.handle)["calls"]["failed"])
    ray.kill(one.handle)
