"""Rules that the sources keep: who imports whom, who knows Ray's private names, what the C++ core may include, and what
public docstrings have to say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import re
from typing import Any

import pytest

import actorsub
from actorsub import lifecycle

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted((ROOT / "actorsub").glob("*.py"))}
#: The Cython sources, as one text.
BINDING = "".join(path.read_text() for path in [ROOT / "actorsub/_core.pyx", *(ROOT / "actorsub/_pyx").glob("*.pxi")])
CSRC = sorted([*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("*.cc")])


def is_for_types_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(name: str) -> set[str]:
    """The modules of actorsub that a module imports, anywhere in it but for a type checker."""
    found: set[str] = set()
    pending: list[ast.AST] = [MODULES[name]]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module == "actorsub":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("actorsub."):
            found.add((node.module or "").split(".")[1])
        pending += [child for child in ast.iter_child_nodes(node) if not is_for_types_only(child)]  # type: ignore[arg-type]
    return found & set(MODULES) - {"__init__"}


def test_the_imports_have_no_circle() -> None:
    left = {name: imports_of(name) for name in MODULES}
    while left:
        free = {name for name, others in left.items() if not others & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


def test_lifecycle_is_above_all_others() -> None:
    """So that what it lists and hands out are no circles either."""
    assert {name for name in MODULES if "lifecycle" in imports_of(name)} == {"__init__"}
    for name, module in MODULES.items():
        if name == "lifecycle":
            continue
        called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
        hooks = {one for one in called if one.startswith(("atexit.", "_core.bind_")) or "register_at_fork" in one}
        assert not hooks, f"{name} enters {hooks} by itself"


def test_every_step_says_why() -> None:
    steps = [
        *lifecycle.BEFORE_DISCONNECT,
        *lifecycle.AFTER_DISCONNECT,
        *lifecycle.AFTER_FORK_IN_CHILD,
        *lifecycle.AFTER_STOP,
    ]
    assert len(steps) == len({step.do for step in steps}) >= 10
    assert all(len(step.why) > 10 for step in steps)


#: Members of Ray's classes that subclasses outside _ray_compat override or read, by module: its docstring names them.
OVERRIDDEN = {
    "handle": {"_serialization_helper", "_ray_actor_id", "_remote"},
    "refs": {"_next_sync", "_next_async"},
}


def test_only_one_module_looks_up_rays_private_names() -> None:
    for name, module in MODULES.items():
        if name == "_ray_compat":
            continue
        for node in ast.walk(module):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                named = [alias.name for alias in node.names]
                named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(re.match(r"ray(\.\w+)*\._", one) for one in named), f"{name} imports {named}"
            elif isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                assert not re.match(r"ray\.(\w+\.)*_(?!_)\w", text), f"{name} uses {text}"
    said = MODULES["_ray_compat"].body[0]
    assert isinstance(said, ast.Expr)
    for name, members in OVERRIDDEN.items():
        text = ast.unparse(MODULES[name])
        for member in members:
            assert member in text and member in ast.unparse(said), (name, member)


@pytest.mark.parametrize("path", CSRC, ids=lambda path: path.name)
def test_the_core_knows_neither_python_nor_ray(path: pathlib.Path) -> None:
    text = path.read_text()
    included = re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', text)
    assert not [one for one in included if one.startswith(("Python", "ray/", "pybind")) or one.endswith("Python.h")]
    assert not re.search(r"\bPy[A-Z]\w+\s*\(|PyGILState", text)


def test_no_native_code_takes_the_gil() -> None:
    text = BINDING
    assert not re.search(r"\bwith gil\b|PyGILState|\)\s*(nogil|noexcept nogil|with gil)\s*:", text)
    # Where it is released nothing but the core is called.
    released = re.findall(r"with nogil:\n((?: {8,}.*\n)+)", text)
    assert released
    assert all(re.fullmatch(r"\s*(\w+ = )?sentinel\.\w+\(.*\)\s*", block) for block in released), released


PUBLIC = [name for name in actorsub.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_help_of_a_public_name_says_what_it_is_with_an_example(name: str) -> None:
    thing: Any = getattr(actorsub, name)
    text = inspect.getdoc(thing) or ""
    assert re.match(r"[^\n]{20,}[.!:]", text), text[:100]
    assert ">>> " in text, f"help(actorsub.{name}) has no example"
    assert inspect.signature(thing) is not None
    if inspect.isfunction(thing) and name != "shutdown":
        assert "Raises" in text or "errors" in text, f"help(actorsub.{name}) names no errors"


def test_help_tells_every_option_state_and_field() -> None:
    options = inspect.getdoc(actorsub.Policy) or ""
    for field in dataclasses.fields(actorsub.Policy):
        assert f"\n    {field.name}: " in options, field.name
    states = inspect.getdoc(actorsub.ActorState) or ""
    assert all(f"\n{state.name}: " in states for state in actorsub.ActorState)
    fields = inspect.getdoc(actorsub.ActorUnavailableError) or ""
    for name in ("actor_id", "sent", "state", "evidence", "incarnation", "detail"):
        assert f"\n    {name}: " in fields, name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_class_is_longer_than_can_be_read(name: str) -> None:
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno < 400, node.name


def defined_in_python() -> set[str]:
    """`module.function`, `Class.method` and `Class`, of all modules and of the core."""
    found: set[str] = set()
    for name, module in MODULES.items():
        for node in module.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found |= {node.name, f"{name}.{node.name}"}
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    owner = ""
    for line in BINDING.splitlines():
        if named := re.match(r"cdef class (\w+)", line):
            owner = named[1]
        if named := re.match(r"(    )?(?:cp?def|def)\b.*?(\w+)\(", line):
            found.add(f"{owner}.{named[2]}" if named[1] else f"_core.{named[2]}")
    return found


def test_the_ways_in_the_design_name_what_there_is() -> None:
    text = (ROOT / "docs/design.md").read_text()
    ways = text[text.index("## The way of a call") : text.index("## What a handle is")]
    python, native = defined_in_python(), "".join(path.read_text() for path in CSRC)
    names = re.findall(r"`([A-Za-z_.:]+)`", ways)
    assert len(names) > 50
    for name in names:
        if re.fullmatch(r"\w+\.(py|pyx|cc|h)", name):
            assert list(ROOT.glob(f"actorsub/{name}")) + list(ROOT.glob(f"csrc/{name}")), name
        elif "::" in name or name in ("GateFor", "Decide"):
            assert re.search(rf"\b{re.escape(name)}\(", native), name
        elif name not in ("on_state_change", "grep"):
            assert name in python, name
