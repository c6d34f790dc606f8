"""Builds and tries the wheels that are published: one for each CPython and machine, for glibc 2.17 like Ray's own.

    python tools/wheels.py build SDIST OUTDIR PYTHON...    # `make wheels`
    python tools/wheels.py test OUTDIR PYTHON...           # `make test-wheels`

The compiler is clang as PyPI's `ziglang` ships it: it brings the stubs of each glibc and links its own C++ library
statically, so a wheel needs neither a container with an old Linux nor the machine that it is for. The interpreter that
builds decides the Python version; its headers serve both machines, whose layouts of Python's types are the same.

Every wheel is checked by auditwheel, which reads the symbols that it really uses, before it gets its tag. `test` makes
an empty environment for each wheel that this machine can run, installs it there as a user would, with the Ray that
comes with it, and runs `SMOKE` from an empty folder. What cannot run here is named with the reason.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")

#: What every wheel has to do: refuse at submit, and fail in flight, on a real Ray, with the process really killed.
SMOKE = """
import os, signal, time
import ray, actorsub

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@actorsub.remote(max_restarts=0, on_unavailable="raise")
class Worker:
    def pid(self): return os.getpid()
    def sleep(self): time.sleep(60)

worker = Worker.remote()
pid = ray.get(worker.pid.remote())
end_s = time.monotonic() + 30
while not actorsub.stats(worker)["watched"]:
    assert time.monotonic() < end_s, "the sentinel does not watch the actor"
    time.sleep(0.01)
sleeping = worker.sleep.remote()
os.kill(pid, signal.SIGKILL)
try:
    actorsub.get(sleeping, timeout=30)
    raise SystemExit("the call in flight did not fail")
except ray.exceptions.RayActorError as error:
    assert error.sent
end_s = time.monotonic() + 30
while True:
    try:
        worker.pid.remote()
    except ray.exceptions.RayActorError as error:
        assert error.sent is False
        break
    assert time.monotonic() < end_s, "the call was not refused"
ray.shutdown()
print("refused at submit, failed in flight")
"""
SAID = "refused at submit, failed in flight"

# What of the environment a stranger has, too.
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "http_proxy", "https_proxy", "no_proxy")


def _ask(python: str, expression: str) -> str:
    command = [python, "-c", f"import sys; print({expression})"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version_of(python: str) -> str:
    """ "311" of CPython 3.11."""
    return _ask(python, "'%d%d' % sys.version_info[:2]")


def _run(command: list[str], log: Path, **kwargs: object) -> None:
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, **kwargs)  # type: ignore[call-overload]
    if done.returncode:
        sys.stderr.write(log.read_text()[-4000:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}; the whole output is in {log}")


def _compiler(folder: Path, language: str, machine: str) -> str:
    """A command that stands for the compiler: distutils wants one word that is a program."""
    script = folder / f"zig-{language}-{machine}"
    # In `cc`, too, since distutils compiles C++ with it.
    script.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {language} -target {machine}-linux-gnu.{GLIBC} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def build(sdist: Path, outdir: Path, pythons: list[str]) -> None:
    outdir.mkdir(parents=True, exist_ok=True)
    tag_of = {machine: f"manylinux_{GLIBC.replace('.', '_')}_{machine}.manylinux2014_{machine}" for machine in MACHINES}
    for python in pythons:
        version = _version_of(python)
        for machine in MACHINES:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                cxx = _compiler(folder, "c++", machine)
                environment = {
                    **os.environ,
                    "CC": _compiler(folder, "cc", machine),
                    "CXX": cxx,
                    # Stripped: symbols of the local functions are two thirds of the file.
                    "LDSHARED": f"{cxx} -shared -s",
                    "LDCXXSHARED": f"{cxx} -shared -s",
                    # CPython's own flags may be the building compiler's alone.
                    "CFLAGS": "-fwrapv -fPIC",
                    "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
                    "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{machine}-linux-gnu.so",
                }
                log = outdir / f"build-cp{version}-{machine}.log"
                pip = [python, "-m", "pip", "--disable-pip-version-check"]
                _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(sdist)], log, env=environment)
                (wheel,) = folder.glob("*.whl")
                tags = [
                    sys.executable,
                    "-m",
                    "wheel",
                    "tags",
                    "--remove",
                    "--platform-tag",
                    tag_of[machine],
                    str(wheel),
                ]
                _run(tags, log)
                (wheel,) = folder.glob("*.whl")
                check(wheel, machine)
                shutil.move(str(wheel), outdir / wheel.name)
                log.unlink()
                print(f"{wheel.name}: {(outdir / wheel.name).stat().st_size / 1e6:.2f} MB", flush=True)


def check(wheel: Path, machine: str) -> None:
    """Raises SystemExit unless auditwheel finds the symbols that the wheel uses in the glibc that its tag names."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    said = " ".join(found.stdout.split())
    wanted = f'constrains the platform tag to "manylinux_{GLIBC.replace(".", "_")}_{machine}"'
    consistent = f'platform tag: "manylinux_{GLIBC.replace(".", "_")}_{machine}"'
    if found.returncode or not (wanted in said or consistent in said):
        raise SystemExit(f"auditwheel does not agree with the tag of {wheel.name}:\n{found.stdout}{found.stderr}")
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith(f"-{machine}-linux-gnu.so") for name in names):
        raise SystemExit(f"{wheel.name} has no core for {machine}: {names}")


def test(outdir: Path, pythons: list[str]) -> None:
    python_of = {f"cp{_version_of(python)}": python for python in pythons}
    wheels = sorted(outdir.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"there is no wheel in {outdir}: make wheels")
    tried = 0
    for wheel in wheels:
        _, _, version, _, platform_tag = wheel.stem.split("-")
        if not platform_tag.endswith(platform.machine()):
            print(f"{wheel.name}: not tried, this machine is {platform.machine()}", flush=True)
            continue
        if version not in python_of:
            print(f"{wheel.name}: not tried, there is no {version} here", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
            environment["RAY_USAGE_STATS_ENABLED"] = "0"
            log = outdir / f"test-{version}.log"
            bin_ = Path(folder) / "venv" / "bin"
            _run([python_of[version], "-m", "venv", str(bin_.parent)], log, env=environment)
            install = [str(bin_ / "python"), "-m", "pip", "install", str(wheel)]
            _run(install, log, env=environment)
            (Path(folder) / "empty").mkdir()
            _run([str(bin_ / "python"), "-c", SMOKE], log, env=environment, cwd=Path(folder) / "empty")
            # Ray writes to stderr, too; what must not be there is a traceback, at the exit above all.
            said = log.read_text().strip().splitlines()
            if "Traceback" in log.read_text() or SAID not in said:
                raise SystemExit(f"{wheel.name}:\n{log.read_text()[-4000:]}")
            log.unlink()
        tried += 1
        print(f"{wheel.name}: {SAID}", flush=True)
    print(f"{tried} of {len(wheels)} wheels were installed and tried")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="build the wheels of all machines for these interpreters")
    one.add_argument("sdist", type=Path)
    two = commands.add_parser("test", help="install each wheel that can run here in an empty environment, and use it")
    for command in (one, two):
        command.add_argument("outdir", type=Path)
        command.add_argument("pythons", nargs="+", metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.sdist, arguments.outdir.resolve(), arguments.pythons)
    else:
        test(arguments.outdir.resolve(), arguments.pythons)


if __name__ == "__main__":
    main()
