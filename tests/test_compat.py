"""A Ray that we do not know: everything still works through public ways, and one warning says so.

The installed Ray is made unknown by taking away one private name after the other in a process of its own.
"""

from __future__ import annotations

import pathlib
import textwrap

import pytest
from subprocesses import output_of, run_python, with_our_path

import actorsub
from actorsub import _ray_compat

PRELUDE = """
import logging, sys
HIDE
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
import ray, ray.actor
from helpers import RAY_ARGS, wait_until
"""

USE = """
import actorsub
ray.init(**{**RAY_ARGS, "include_dashboard": DASHBOARD})

@actorsub.remote(max_restarts=-1, num_cpus=0, on_unavailable="raise")
class Counter:
    def add(self, a, b=1):
        return a + b

handle = Counter.remote()
assert isinstance(handle, ray.actor.ActorHandle)
assert ray.get(handle.add.remote(1, b=2), timeout=60) == 3

@ray.remote(num_cpus=0)
def use(one, nested):
    return ray.get(one.add.remote(1)), ray.get(nested[0].add.remote(2))

assert ray.get(use.remote(handle, [handle]), timeout=60) == (2, 3)
assert ray.get([actorsub.wrap(handle, on_unavailable="ref").add.remote(n) for n in range(20)], timeout=60)[-1] == 20
print("WORKS", sorted(actorsub._ray_compat.report()))
"""


def run(script: str, dashboard: bool = False) -> str:
    code = PRELUDE.replace("HIDE", textwrap.dedent(script)) + USE.replace("DASHBOARD", str(dashboard))
    # Not the folder that the tests were started in: it may hold the sources of a package that is installed.
    here = pathlib.Path(__file__).parent
    return output_of(run_python("-c", code, timeout_s=100, env=with_our_path(), cwd=here))


def test_nothing_is_missing_on_the_installed_ray() -> None:
    assert _ray_compat.report() == {}
    assert actorsub.__version__


# Ray itself needs most of these names, so it is actorsub's look for them that fails.
HIDE = """
import importlib.machinery

class Hide(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        source = super().get_data(path)
        if path.endswith(".py"):
            assert b"def {name}(" in source
            source = source.replace(b"def {name}(", b"def {name}():\\n    raise AttributeError('hidden')\\ndef hidden(")
        return source

    def path_stats(self, path):
        raise OSError("never from the cache")

class Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "actorsub._ray_compat":
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            spec.loader = Hide(fullname, spec.origin)
            return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("_global_worker", "worker"),
        ("_local_state_getter", "local state"),
        ("_actor_table", "actor table message"),
        ("_table_reader", "actor table"),
        ("_handle_helpers", "handle pickling"),
        ("_validate_args", "signature check"),
    ],
)
def test_a_ray_without(name: str, missing: str) -> None:
    out = run(HIDE.replace("{name}", name))
    assert "WORKS" in out
    assert f"'{missing}'" in out.splitlines()[-1]
    assert out.count("does not fully know Ray") == 1
