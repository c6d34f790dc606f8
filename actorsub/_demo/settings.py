"""What the demo can be asked to do: its options, their limits, and the three ways that are compared."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = (
    "Starts a local Ray, kills worker actors on a schedule while a proxy sends them requests, and shows what "
    "the requests pay: on stock Ray, on tuned Ray, and on actorsub. Takes a little over a minute."
)

# The sleeps stand for a model: the time it takes to load into a fresh process, and the time of one inference.
MODEL_LOAD_S = 3.0
# How often a local Ray may be started until it is up.
START_ATTEMPTS = 3
INFER_S = 0.004


# Each request may try every worker this often, with a pause in between because all of them were away.
ROUNDS = 2
PAUSE_BETWEEN_ROUNDS_S = 0.1


# Requests still open this long after the last arrival are cut off and count as failed.
DRAIN_S = 15.0
# A mode that needs longer than its load plus this is stuck.
START_AND_STOP_S = 120.0

LIMITS = {"seconds": (3.0, 3600.0), "rate": (0.0, 1000.0), "workers": (2, 32)}
PICTURE_SUFFIXES = (".png", ".svg")
DEFAULT_PICTURE = Path("demo-latency.png")

TUNING_VARIABLE = "RAY_timeout_ms_task_wait_for_death_info"


@dataclass(frozen=True)
class Mode:
    """One of the three runs; `color` is from the Okabe-Ito palette, made for colour-blind readers too."""

    name: str
    label: str
    color: str
    note: str


MODES = (
    Mode("stock", "stock Ray", "#D55E00", "plain handles, Ray's defaults"),
    Mode("tuned", "tuned Ray", "#0072B2", f"plain handles, {TUNING_VARIABLE}=0"),
    Mode("actorsub", "actorsub", "#009E73", 'actorsub.ReplicaGroup(workers, retry="always")'),
)


@dataclass(frozen=True)
class Settings:
    """What one run of the demo was asked to do."""

    seconds: float
    rate: float
    workers: int
    seed: int
    modes: tuple[Mode, ...]
    picture: Path
    json_file: Path | None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Settings:
        return cls(
            seconds=arguments.seconds,
            rate=arguments.rate,
            workers=arguments.workers,
            seed=arguments.seed,
            modes=tuple(mode for mode in MODES if arguments.mode in ("all", mode.name)),
            picture=arguments.picture,
            json_file=arguments.json,
        )


def _number(text: str, name: str, accepted: str, *, above: bool = False) -> float:
    low, high = LIMITS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Written so that NaN fails too.
    if not (low < value <= high if above else low <= value <= high):
        raise argparse.ArgumentTypeError(f"takes {accepted}, got {text!r}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "seconds", "a number of seconds from 3 to 3600")


def _rate(text: str) -> float:
    return _number(text, "rate", "requests per second: a number above 0, at most 1000", above=True)


def _workers(text: str) -> int:
    accepted = "a whole number of worker actors from 2 to 32"
    value = _number(text, "workers", accepted)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"takes {accepted}, got {text!r}")
    return int(value)


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, got {text!r}") from None


def _output_file(text: str) -> Path:
    # Found out now and not after a minute and a half of measuring.
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"takes a file to write, but {text!r} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"takes a file to write, but {str(path.parent)!r} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"takes a file to write, but {text!r} cannot be written")
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"takes a file name ending in .png or .svg, got {text!r}")
    return _output_file(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`; their values go to `Settings.from_arguments`."""
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=16.0,
        help="length of the load in each mode (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=_rate, default=100.0, help="requests per second, on average (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=_workers, default=3, help="worker actors behind the proxy (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_seed, default=1, help="decides the times of requests and kills (default: %(default)s)"
    )
    parser.add_argument(
        "--mode",
        choices=["all", *(mode.name for mode in MODES)],
        default="all",
        help="what to measure (default: %(default)s)",
    )
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="write every figure to this file")
    parser.add_argument(
        "--picture",
        type=_picture,
        default=DEFAULT_PICTURE,
        metavar="FILE.png|.svg",
        help="where to save the picture of latency over time (default: %(default)s)",
    )
