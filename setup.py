"""Builds the native core with CMake; everything else is in pyproject.toml."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def tool(name: str) -> str:
    """A build tool: of this environment if it has one, else of the PATH."""
    # In an isolated build only what can be imported is of its own environment: the
    # interpreter is that of the one around it, and on the PATH are the system's, too.
    own = importlib.import_module(name) if importlib.util.find_spec(name) else None
    folders = [getattr(own, key, "") for key in ("CMAKE_BIN_DIR", "BIN_DIR")]
    # An unactivated venv has its scripts beside its interpreter, not on the PATH.
    folders += [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    path = os.pathsep.join(filter(None, folders))
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"{name} not found; run: pip install {name}")
    return found


def run(*command: str | Path) -> None:
    """Run a step of the build, which says itself what it fails of."""
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            "the native core was not built, for the reason above; it takes a compiler "
            "for C++17 (Debian, Ubuntu: apt install g++)"
        )


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        include = sysconfig.get_path("include")
        if not (Path(include) / "Python.h").is_file():
            raise SystemExit(
                f"no Python.h in {include}; install the headers of this Python "
                "(Debian, Ubuntu: apt install python3-dev)"
            )
        build = ROOT / "build" / "native"
        # From scratch, it is one file: a cache left by another checkout or another
        # cmake would only be in the way.
        shutil.rmtree(build, ignore_errors=True)
        run(
            *(tool("cmake"), "-S", ROOT, "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPYTHON_INCLUDE={include}",
        )
        run(tool("cmake"), "--build", build)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a process may have the old file mapped.
        partial = target.with_suffix(".partial")
        shutil.copyfile(build / "_C.abi3.so", partial)
        os.replace(partial, target)


setup(
    ext_modules=[Extension("vllm.inflight._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
