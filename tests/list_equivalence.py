"""Writes docs/equivalence.md: what a wrapped handle was compared on with a plain one, from the tests themselves.

python tests/list_equivalence.py > docs/equivalence.md
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys

FILES = ["test_equivalence.py", "test_travel.py", "test_lifetime.py", "test_sessions.py", "test_lineage.py"]
HEAD = """# What a wrapped handle was compared on

A wrapped handle has to do what Ray's plain one does. Each line below is a test: those of `test_equivalence.py` run once
on a plain and once on a wrapped handle of equal actors, and compare the value, the type of the result, and class and
text of the error. Their cases stand in [`tests/equivalence/`](../tests/equivalence/__init__.py), a module for each
topic. This page is made from the tests by `python tests/list_equivalence.py`.
"""


def main() -> None:
    tests = pathlib.Path(__file__).parent
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *(str(tests / name) for name in FILES)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    groups: dict[str, dict[str, list[str]]] = {}
    for line in listing.splitlines():
        found = re.match(r".*?(test_\w+\.py)::test_(\w+?)(?:\[(.*)\])?$", line)
        if found:
            file, name, parameter = found.groups()
            groups.setdefault(file, collections.OrderedDict()).setdefault(name, []).append(parameter)
    print(HEAD)
    for file, found_tests in groups.items():
        print(f"## tests/{file}\n")
        for name, parameters in found_tests.items():
            title = name.replace("_", " ")
            if parameters == [None]:
                print(f"- {title}")
                continue
            # "kind: case" ids go into one line for each kind.
            kinds: dict[str, list[str]] = collections.OrderedDict()
            for parameter in parameters:
                kind, _, case = parameter.partition(": ")
                kinds.setdefault(kind if case else "", []).append(case or kind)
            print(f"- {title}:")
            for kind, cases in kinds.items():
                print(f"  - {kind + ': ' if kind else ''}{'; '.join(cases)}")
        print()


if __name__ == "__main__":
    main()
