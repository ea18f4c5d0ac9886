"""What leaves the repository: the sdist installs, the wheel loads on older systems, and both say what they are.

Compiling takes minutes, so the installs here get a compiler that hands out the objects which the checkout has already,
where the source is the same; everything else (the backend, setup.py, the linking, pip) is as a user has it.
"""

from __future__ import annotations

import email
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".ci/", ".gitignore", ".pre-commit-config.yaml")  # a checkout's own

COMPILER = """#!{python}
import os, shutil, sys
from pathlib import Path
arguments = sys.argv[1:]
if "-c" in arguments and "-MF" in arguments:
    source, target = Path(arguments[arguments.index("-c") + 1]), Path(arguments[arguments.index("-o") + 1])
    name = str(source).rpartition("/csrc/")[2]
    there, made = Path({root!r}, "csrc", name), Path({objects!r}, name.replace("/", "_") + ".o")
    if made.exists() and there.read_bytes() == source.read_bytes():
        shutil.copy(made, target)
        Path(arguments[arguments.index("-MF") + 1]).write_text(f"{{target}}: {{source}}")
        sys.exit(0)
os.execvp("g++", ["g++", *arguments])
"""

USE = """
import sys, torch
import fastpar as fp
from fastpar import _ext
import fastpar.kernels
assert sys.argv[1] in str(_ext.library_path()), _ext.library_path()
x = torch.randn(5, 33)
loss = fp.ops.vocab_parallel_cross_entropy(x, torch.arange(5))
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, torch.arange(5)))
with fp.storage.TensorStore(sys.argv[1]) as store:
    store.write("x", x)
    assert store.read("x").wait().equal(x)
print("works")
"""


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return programs.load("_build/native.py")


def tracked() -> list[str]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    output = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in output.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy: setuptools leaves its notes in the folder, and reads those that are there."""
    copy = tmp_path_factory.mktemp("sdist") / "copy"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    code = "import backend; backend.build_sdist('dist')"
    run([sys.executable, "-c", code], cwd=copy, PYTHONPATH=str(copy / "_build"))
    (made,) = (copy / "dist").glob("*.tar.gz")
    return made


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    full = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    full.pop("FASTPAR_LIBRARY", None)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=full, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build_wheel(source: Path, folder: Path, **environment: str) -> Path:
    folder.mkdir()
    flags = ["--no-build-isolation", "--no-deps", "-w", folder]
    run([sys.executable, "-m", "pip", "wheel", *flags, source], cwd=folder, FASTPAR_CUDA="0", **environment)
    (made,) = folder.glob("*.whl")
    return made


def use(wheel: Path, folder: Path) -> str:
    """Installed beside this torch, without a compiler, and used from a folder that knows nothing of the checkout."""
    target, empty = folder / "installed", folder / "empty"
    empty.mkdir()
    run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel], cwd=empty)
    # -S and -E would lose torch; a checkout that is installed editable comes after PYTHONPATH.
    return run([sys.executable, "-c", USE, target], cwd=empty, PYTHONPATH=str(target), CXX="/bin/false")


@pytest.fixture
def compiler(native: ModuleType, tmp_path: Path) -> str:
    objects = native.object_of(ROOT / "csrc" / "registration.cpp", native.options_from_environment()).parent
    if not objects.exists():
        pytest.skip("the checkout has no objects: `make build` compiles them")
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(python=sys.executable, root=str(ROOT), objects=str(objects)))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_the_sdist_holds_what_git_tracks(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {name for name in tracked() if not name.startswith(LEFT_OUT)}
    assert sorted(wanted - held) == []
    assert sorted(name for name in held - wanted if "egg-info" not in name) == ["PKG-INFO", "setup.cfg"]


@pytest.mark.expensive
@pytest.mark.parametrize("policy", ["", "2_28"])
def test_the_sdist_installs_and_works(
    sdist: Path, compiler: str, native: ModuleType, policy: str, tmp_path: Path
) -> None:
    wheel = build_wheel(sdist, tmp_path / "wheels", CXX=compiler, FASTPAR_MANYLINUX=policy)
    assert use(wheel, tmp_path).strip() == "works"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("/METADATA"))))
        archive.extract("fastpar/_C.so", tmp_path)
    assert not any(name.startswith(("csrc", "tests", "_build", "bench")) for name in names)
    assert any(name.startswith("fastpar/kernels/") for name in names)
    assert metadata["Author"]
    assert "tensor parallelism" in metadata["Keywords"]
    assert {"3.10", "3.13"} <= {line.rpartition(" ")[2] for line in metadata.get_all("Classifier", [])}
    assert metadata.get_all("Requires-Dist", [])[0] == "torch>=2.11"
    newest = newest_versions(tmp_path / "fastpar" / "_C.so", native)
    if policy:
        assert f"-py3-none-manylinux_2_28_{platform.machine()}.whl" in wheel.name
        limits = native.portable.POLICIES[policy]
        assert {family: version for family, version in newest.items() if version > parsed(limits[family])} == {}
    else:
        assert "manylinux" not in wheel.name


def newest_versions(library: Path, native: ModuleType) -> dict[str, tuple[int, ...]]:
    """Of each family of symbol versions that a library expects, as auditwheel would see them."""
    output = subprocess.run(["readelf", "-W", "--dyn-syms", str(library)], capture_output=True, text=True, check=True)
    newest: dict[str, tuple[int, ...]] = {}
    for line in output.stdout.splitlines():
        version = line.split(" (")[0].partition("@")[2]
        family, _, number = version.lstrip("@").partition("_")
        if " UND " in line and family in native.portable.POLICIES["2_28"]:
            newest[family] = max(newest.get(family, ()), parsed(number))
    assert newest["GLIBC"] > (2,), "this is not what readelf printed once"
    return newest


def parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sdist_installs_with_a_compiler_alone(sdist: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sdist, tmp_path / "wheels", MAX_JOBS=str(os.cpu_count() or 1))
    assert use(wheel, tmp_path).strip() == "works"


def interpreters() -> list[str]:
    """Other Pythons on PATH that the project says it runs under."""
    found = [shutil.which(f"python3.{minor}") for minor in range(10, 16)]
    # A version manager's shim is on PATH, and refuses, for versions that are not the chosen one.
    return [path for path in found if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]


@pytest.mark.expensive
def test_the_sources_are_python_of_every_version_that_is_promised(tmp_path: Path) -> None:
    """Where other interpreters are on PATH: they compile every module, and run what needs no torch."""
    others = [path for path in interpreters() if Path(path).resolve() != Path(sys.executable).resolve()]
    if not others:
        pytest.skip("no other Python on PATH")
    for python in others:
        run([python, "-m", "compileall", "-q", "-f", ROOT / "fastpar"], cwd=tmp_path, PYTHONPYCACHEPREFIX=str(tmp_path))
        said = run([python, "-B", "-m", "fastpar", "simulate", "-s", "1f1b", "-p", "2", "-m", "2"], cwd=ROOT)
        assert "1f1b" in said, python


# ---- which sources, and why


@pytest.mark.parametrize(
    ("variable", "has_nvcc", "cuda_torch", "is_checkout", "compiles"),
    [
        (None, True, False, False, False),  # a CPU torch would never call them
        (None, True, True, False, True),
        (None, True, False, True, True),  # who works on the sources wants them checked
        (None, False, True, True, False),
        ("1", True, False, False, True),
        ("0", True, True, True, False),
    ],
)
def test_cuda_sources_are_compiled_where_they_can_be_used_or_are_asked_for(
    native: ModuleType,
    variable: str | None,
    has_nvcc: bool,
    cuda_torch: bool,
    is_checkout: bool,
    compiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FASTPAR_CUDA", raising=False)
    monkeypatch.delenv("FASTPAR_CUDA_ARCHS", raising=False)
    if variable is not None:
        monkeypatch.setenv("FASTPAR_CUDA", variable)
    monkeypatch.setattr(native.shutil, "which", lambda name: "/cuda/bin/nvcc" if has_nvcc else None)
    monkeypatch.setattr(native, "is_cuda_torch", lambda torch_dir: cuda_torch)
    options = native.options_from_environment(is_checkout=is_checkout)
    assert options.cuda_archs == (("90a",) if compiles else ())


@pytest.mark.parametrize(
    ("text", "is_cuda"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\n", True),
        ("cuda = '12.8'\n", True),
        ("", True),
    ],
)
def test_what_torch_was_built_for_is_read_and_not_imported(
    native: ModuleType, text: str, is_cuda: bool, tmp_path: Path
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{text}hip: Optional[str] = None\n")
    assert native.is_cuda_torch(tmp_path) is is_cuda


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FASTPAR_CUDA", "yes", "FASTPAR_CUDA must be 0, 1 or unset, got 'yes'"),
        ("FASTPAR_CUDA", "1", "FASTPAR_CUDA=1, but there is no nvcc on PATH"),
        ("FASTPAR_MANYLINUX", "2014", "FASTPAR_MANYLINUX must be one of 2_28, got '2014'"),
    ],
)
def test_build_variables_that_make_no_sense_end_the_build(
    native: ModuleType, name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=message):
        native.options_from_environment()


def test_a_log_gets_a_line_per_ten_files(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr("builtins.open", refuse)
    with native.Progress(12) as progress:
        for _ in range(12):
            progress.after(lambda: None)
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "fastpar: compiled 10 of 12 files",
        "fastpar: compiled 12 of 12 files",
    ]


def test_a_wheel_that_promises_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = programs.load("tools/check_wheel.py")
    report = '{"sym_tag": "%s", "external_libs": {%s}, "versioned_symbols": {}, '
    report += '"pyfpe": false, "ucs2": false, "unsupported_isa": false}'
    good = Path("fastpar-0.1.0-py3-none-manylinux_2_28_x86_64.whl")
    for tag, external, wheel, count in (
        ("manylinux_2_26_x86_64", '"libtorch.so": null', good, 0),
        ("manylinux_2_34_x86_64", '"libtorch.so": null', good, 1),
        ("linux_x86_64", "", good, 1),
        ("manylinux_2_26_x86_64", '"libcudart.so.13": null', good, 1),
        ("manylinux_2_26_x86_64", "", Path("fastpar-0.1.0-py3-none-linux_x86_64.whl"), 1),
    ):
        done = subprocess.CompletedProcess([], 0, stdout=report % (tag, external))
        monkeypatch.setattr(check.subprocess, "run", lambda *_, done=done, **__: done)
        assert len(check.problems("manylinux_2_28", wheel)) == count, (tag, external, wheel)
