"""The command line: ``python -m actorsub``, also installed as ``actorsub``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from actorsub import _demo
from actorsub._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad arguments exit with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="actorsub", description="Ray actor handles that say at once when their actor is away."
    )
    parser.add_argument("--version", action="version", version=f"actorsub {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="measure, on a local Ray, what a service pays while workers are killed",
        description=_demo.DESCRIPTION,
    )
    _demo.add_arguments(demo)
    arguments = parser.parse_args(argv)
    return _demo.run(_demo.Settings.from_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
