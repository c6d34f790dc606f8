"""Starts the cluster and the process that calls, sees both end, and compares what was told with what ran."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

import ray

import actorsub
from campaign import book, disturbances, network

#: How late a deadline may be.
MARGIN_S = 2.0
#: What the process that calls may take beside its calling: to start Ray and the actors, and to look afterwards.
BESIDE_S = 240.0


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to disturb (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", default="", help=f"leave out, comma between them: {', '.join(disturbances.NAMES)}")
    parser.add_argument("--directory", help="where to leave ledgers and report; else only where something was found")
    arguments = parser.parse_args(words)
    unknown = set(filter(None, arguments.without.split(","))) - set(disturbances.NAMES)
    if unknown:
        parser.error(f"--without takes {', '.join(disturbances.NAMES)}, not {', '.join(sorted(unknown))}")
    return arguments


def run(arguments: argparse.Namespace, directory: pathlib.Path) -> int:
    without = set(filter(None, arguments.without.split(",")))
    left_out = sorted(without)
    with contextlib.ExitStack() as stack:
        cluster = None
        if not without >= set(disturbances.NETWORK):
            try:
                cluster = stack.enter_context(network.Cluster())
            except network.NotPermittedError as error:
                print(f"Without {' and '.join(disturbances.NETWORK)}: {error}.")
                without |= set(disturbances.NETWORK)
        if "cut" not in without and not network.cut_is_permitted():
            print("Without cut: ending a connection from outside needs root, iproute2 and a kernel that allows it.")
            without.add("cut")
        code = _run_driver(arguments, directory, without, cluster)
    again = f"make campaign SECONDS={arguments.seconds:g} SEED={arguments.seed}"
    if left_out:
        again += f" CAMPAIGN_ARGS='--without {','.join(left_out)}'"
    return _report(directory, code, again)


def _run_driver(
    arguments: argparse.Namespace, directory: pathlib.Path, without: set[str], cluster: network.Cluster | None
) -> int:
    command = [sys.executable, "-X", "faulthandler", "-m", "campaign.driver"]
    command += ["--seconds", str(arguments.seconds), "--seed", str(arguments.seed)]
    command += ["--directory", str(directory), "--without", ",".join(sorted(without))]
    if cluster is not None:
        command += ["--network", cluster.network.to_json(), "--address", cluster.address]
    # Ray tells a driver about workers that were killed, on both.
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(arguments.seconds + BESIDE_S)
        except subprocess.TimeoutExpired:
            # Where each thread is, into the output.
            process.send_signal(signal.SIGUSR1)
            time.sleep(2)
            return -1
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _report(directory: pathlib.Path, code: int, again: str) -> int:
    told = book.read_told(directory / "told.jsonl") if (directory / "told.jsonl").exists() else []
    runs, violations = book.read_ledgers(directory)
    report_path = directory / "report.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    violations += [book.Violation(*one) for one in report.get("violations", [])]
    if not report or code:
        what = "is still there after its time" if code == -1 else f"ended with code {code}"
        violations.append(book.Violation("nothing hangs, nothing crashes", f"the process that calls {what}"))
    violations += book.check(told, runs, report.get("last_s", float("inf")), MARGIN_S)
    print(f"actorsub {actorsub.__version__}, Ray {ray.__version__}, CPython {platform.python_version()}, "
          f"{os.cpu_count()} processors. Two numbers: cannot have run / may have run.\n")  # fmt: skip
    print(book.table(told, runs))
    done = report.get("disturbances", {})
    print(f"\nDisturbances: {', '.join(f'{count} {kind}' for kind, count in sorted(done.items())) or 'none'}. "
          f"{report.get('healthy', 0)} healthy actors at the end. "
          f"Deadlines were up to {1000 * book.latest_s(told):.0f} ms late.")  # fmt: skip
    print(f"Descriptors at the beginning and at the end: {report.get('descriptors')}.")
    if not violations:
        print("\nHOLDS")
        return 0
    by_promise: dict[str, list[str]] = {}
    for one in violations:
        by_promise.setdefault(one.promise, []).append(one.what)
    for promise, found in by_promise.items():
        print(f"\nVIOLATED, {len(found)} times: {promise}")
        for what in found[:10]:
            print(f"  {what}")
    (directory / "violations").write_text("".join(f"{one.promise}: {one.what}\n" for one in violations))
    print(f"\nAgain: {again}\nLedgers, what was told, the report and the output: {directory}")
    return 1


def main() -> int:
    arguments = parse()
    # Worker processes import the actors by name.
    here = str(pathlib.Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if arguments.directory:
        directory = pathlib.Path(arguments.directory).resolve()
        directory.mkdir(parents=True)
        return run(arguments, directory)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="actorsub-campaign-"))
    code = run(arguments, directory)
    if code == 0:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    return code


if __name__ == "__main__":
    sys.exit(main())
