"""Compiles the core. All metadata is in pyproject.toml.

Switches, by environment variable (each a build of its own: they change flags, not files):

ACTORSUB_SANITIZE   "thread" or "address,undefined": instrument the extension with those sanitizers.
ACTORSUB_DEBUG      "1": asserts on, debug information, no optimisation.
ACTORSUB_WERROR     "1": warnings are errors; what development and CI build with.
"""

import glob
import os

from Cython.Build import cythonize
from setuptools import Extension, setup

sanitize = os.environ.get("ACTORSUB_SANITIZE", "")
debug = os.environ.get("ACTORSUB_DEBUG") == "1"

compile_args = ["-std=c++17", "-fvisibility=hidden", "-Wall", "-g1"]
# Cython's own output leaves helpers unused, compares signed with unsigned, and reads fields that CPython deprecated.
# csrc/ alone is held to far stricter warnings by csrc/CMakeLists.txt.
compile_args += ["-Wno-unused-function", "-Wno-sign-compare", "-Wno-deprecated-declarations"]
link_args = []
if os.environ.get("ACTORSUB_WERROR") == "1":
    compile_args.append("-Werror")
if sanitize:
    compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    link_args.append(f"-fsanitize={sanitize}")
# CPython's own flags carry -DNDEBUG, so asserts are off unless asked for.
compile_args += ["-O0", "-UNDEBUG", "-g"] if debug else ["-O2"]

core = Extension(
    "actorsub._core",
    sources=["actorsub/_core.pyx", *sorted(glob.glob("csrc/*.cc"))],
    include_dirs=["csrc", "actorsub/_pyx"],
    depends=[*glob.glob("csrc/*.h"), *glob.glob("actorsub/_cpp/*.pxd"), *glob.glob("actorsub/_pyx/*")],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    language="c++",
)

setup(ext_modules=cythonize([core], build_dir="build/cython", compiler_directives={"language_level": 3}))
