"""Who may import whom: the layers of docs/architecture.md, enforced by reading every import in the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Layer of every top-level part of the Python package: a part may import parts of lower layers and itself, nothing else.
# The foundations stand on each other in the order of their numbers; the parts of one number never import each other.
LAYERS = {
    "_version": 0,
    "argument_kinds": -1,
    "arguments": 0,
    "_ext": 1,
    "kernels": 1,
    "mesh": 1,
    "comm": 2,
    "storage": 2,
    "contracts": 3,
    "reference": 4,
    "ops": 5,
    "tensor": 6,
    "pipeline": 6,
    "pretrained": 7,
    "zero": 8,
    "expert": 6,
    "context": 6,
    "precision": 6,
    "recompute": 6,
    "clip": 6,
    "optim": 6,
    "ddp": 6,
    "layouts": 10,
    "parallel": 11,
    "checkpoint": 11,
    "planner": 11,
    "assembly": 12,
    "verification": 13,
    "integrations": 13,
    "doctor": 13,
    "cli": 14,
    "__main__": 15,
}
# Within a part: a file (or folder) imports those of lower layers. Parts without a table are not looked into.
INNER_LAYERS = {
    "parallel": {
        "changes": 0,
        "guards": 0,
        "stacked_experts": 0,
        "context_parallel": 2,
        "adapters": 1,
        "model_methods": 1,
        "styles": 1,
        "plan": 2,
        "heads": 2,
        "on_grid": 3,
        "checks": 3,
        "router_groups": 3,
        "token_mixing": 3,
        "trial": 3,
        "declared": 4,
        "guesses": 4,
        "kinds": 5,
        "layer_plan": 5,
        "proving": 6,
        "swap": 4,
        "api": 7,
        "pipeline_api": 8,
        "load": 8,
        "__init__": 9,
    },
}
OPTIONAL_PACKAGES = {"triton", "transformers", "rich", "matplotlib", "safetensors"}
ALLOWED_AT_IMPORT = {"kernels": {"triton"}, "integrations": {"transformers", "safetensors"}}
KERNEL_PACKAGES = {
    "torch",
    "triton",
    "__future__",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "threading",
    "typing",
}

# C++: a folder may include headers of lower layers and its own; the op families never include each other.
CSRC_FOUNDATION = {"common": 0, "runtime": 1, "comm": 2}
CSRC_FAMILY = 3
CSRC_TOP = 4


def python_modules() -> Iterator[tuple[str, str]]:
    """(dotted module name, source) of every module of the package."""
    for folder, package in ((ROOT / "fastpar", "fastpar"), (ROOT / "kernels" / "triton", "fastpar.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text()


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is imported when the module is) of every import, relative ones made absolute.

    `from a import b` gives `a.b`, since b may be a module; imports for type checkers alone are left out.
    """

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.orelse:
                yield from visit(child, at_import)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_import
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package else -1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield f"{base}.{alias.name}", at_import
        inside_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside_function)

    yield from visit(ast.parse(source), True)


def import_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """One line per import in the source of `module` that the layers forbid."""
    parts = module.split(".")
    part = parts[1] if len(parts) > 1 else None  # None: fastpar/__init__.py itself
    if part is not None and part not in LAYERS:
        return [f"{module}: {part!r} has no layer; give it one in {Path(__file__).name} and in docs/architecture.md"]
    found = []
    inner, own = INNER_LAYERS.get(part or "", {}), parts[2] if len(parts) > 2 else "__init__"
    if inner and own not in inner:
        found.append(f"{module}: {own!r} has no layer within {part!r}; give it one in {Path(__file__).name}")
    for name, at_import in imports(source, module, is_package=is_package):
        top, _, rest = name.partition(".")
        if top in OPTIONAL_PACKAGES and at_import and top not in ALLOWED_AT_IMPORT.get(part or "", set()):
            found.append(f"{module} imports {top} at module level: it is optional, import it where it is used")
        if part == "kernels" and top not in KERNEL_PACKAGES and not name.startswith("fastpar.kernels"):
            found.append(f"{module} imports {name}: kernels import torch and triton only")
        if top in {"bench", "examples", "tests"} and (at_import or part != "cli"):
            found.append(f"{module} imports {name}, which is not part of the package")
        if top != "fastpar" or part == "kernels":
            continue
        target = rest.split(".")[0]
        if part is None:
            if at_import and target not in {"_version"}:
                found.append(f"{module} imports {name} at module level: public names are resolved lazily")
        elif target == part:
            used = [*rest.split("."), "__init__"][1]
            used = used if used in inner else "__init__"
            if own in inner and used != own and inner[used] >= inner[own]:
                found.append(f"{module} (layer {inner[own]} of {part}) imports {name} (layer {inner[used]})")
        elif target in LAYERS and LAYERS[target] >= LAYERS[part]:
            found.append(f"{module} (layer {LAYERS[part]}) imports {name} (layer {LAYERS[target]})")
        elif target not in LAYERS and target != "__version__":
            found.append(f"{module} imports {name} through the top of the package; import the module that defines it")
    return found


def statement_violations(module: str, source: str) -> list[str]:
    """Rules that are about statements: no `global`, and no nn.Module among the ops."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            found.append(f"{module}:{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.ClassDef) and module.startswith("fastpar.ops"):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.split(".")[-1] == "Module" for base in bases):
                found.append(
                    f"{module}:{node.lineno}: class {node.name} is an nn.Module; layers live in the strategies"
                )
    return found


def csrc_layer(folder: str) -> int:
    if folder == "":
        return CSRC_TOP  # registration.cpp
    return CSRC_FOUNDATION.get(folder, CSRC_FAMILY)


def include_violations(path: str, source: str) -> list[str]:
    """Includes in csrc/`path` that the C++ layers forbid; torch-free folders are checked for torch headers too."""
    folder = path.split("/")[0] if "/" in path else ""
    found = []
    for quote, header in re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', source, re.MULTILINE):
        if folder == "runtime" and header.startswith(("torch/", "ATen/", "c10/")):
            found.append(f"csrc/{path} includes {header}: runtime/ is free of torch")
        if header == "Python.h" or (header.startswith("pybind11/") and folder != "emulation"):
            found.append(f"csrc/{path} includes {header}: the binary holds no CPython symbol")
        if re.match(r"ATen/|c10/|torch/extension\.h|torch/library\.h|torch/all\.h", header):
            found.append(
                f"csrc/{path} includes {header}: only the stable ABI (torch/csrc/stable, torch/headeronly) is allowed"
            )
        if quote == "<":
            continue
        target = header.split("/")[0] if "/" in header else folder
        if folder == "emulation" or target == folder:
            continue
        if target == "emulation" or csrc_layer(target) >= csrc_layer(folder):
            found.append(f"csrc/{path} (layer {csrc_layer(folder)}) includes {header} (layer {csrc_layer(target)})")
    return found


def package_paths() -> set[str]:
    return {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "fastpar").rglob("__init__.py")} | {
        "fastpar.kernels"
    }


def test_python_imports_follow_the_layers() -> None:
    packages = package_paths()
    modules = list(python_modules())
    assert len(modules) > 10  # an empty walk proves nothing
    found = [line for name, source in modules for line in import_violations(name, source, is_package=name in packages)]
    assert not found, "\n".join(found)


def circular(modules: dict[str, str]) -> list[str]:
    """The modules that import themselves by way of others, imports for type checkers included."""
    found: dict[str, set[str]] = {}
    for name, source in modules.items():
        targets = {
            f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else str(node.module)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        found[name] = (targets & modules.keys()) - {name}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(found[name])
        while waiting:
            target = waiting.pop()
            if target not in seen:
                seen.add(target)
                waiting += found[target]
        return seen

    return [name for name in modules if name in reached(name)]


def test_files_of_comm_and_mesh_do_not_import_each_other_in_circles() -> None:
    parts = ("fastpar.comm", "fastpar.mesh")
    assert circular({name: source for name, source in python_modules() if name.startswith(parts)}) == []
    assert circular(
        {"a": "from b import x", "b": "if TYPE_CHECKING:\n    from a import y", "c": "from a import x"}
    ) == [
        "a",
        "b",
    ]


def test_no_global_statements_and_no_modules_among_ops() -> None:
    found = [line for name, source in python_modules() for line in statement_violations(name, source)]
    assert not found, "\n".join(found)


def test_csrc_includes_follow_the_layers() -> None:
    folder = ROOT / "csrc"
    paths = [p for p in sorted(folder.rglob("*")) if p.suffix in {".cpp", ".h", ".cu", ".cuh"}]
    assert paths
    found = [line for p in paths for line in include_violations(p.relative_to(folder).as_posix(), p.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("fastpar.tensor.linear", "from fastpar.pipeline import Stage", "layer 6"),
        ("fastpar.tensor.linear", "from ..zero import shard", "layer 8"),
        ("fastpar.ops.parallel_linear.api", "def f():\n    import fastpar.tensor", "layer 6"),
        ("fastpar.comm.groups", "from fastpar.ops import cross_entropy", "layer 5"),
        ("fastpar.mesh", "from fastpar import comm", "layer 2"),
        ("fastpar.comm.groups", "from fastpar import init_mesh", "through the top"),
        ("fastpar.ops.parallel_linear.api", "import triton", "triton at module level"),
        (
            "fastpar.ops.parallel_linear.api",
            "try:\n    import triton.language\nexcept ImportError:\n    pass",
            "triton at module level",
        ),
        (
            "fastpar.parallel.swap",
            "class A:\n    from transformers import PreTrainedModel",
            "transformers at module level",
        ),
        ("fastpar.kernels.cross_entropy", "import numpy", "torch and triton only"),
        ("fastpar.kernels.cross_entropy", "from fastpar import comm", "torch and triton only"),
        ("fastpar.doctor", "from bench.harness import run", "not part of the package"),
        ("fastpar.helpers", "import torch", "has no layer"),
        ("fastpar.parallel.plan", "from fastpar.parallel.trial import Trial", "layer 3"),
        ("fastpar.parallel.guards.watch", "from fastpar.parallel import plan", "layer 0"),
        ("fastpar.parallel.plan", "from fastpar.parallel import Style", "layer 9"),
        ("fastpar.parallel.helpers", "import torch", "no layer within 'parallel'"),
        ("fastpar", "from fastpar.ops import cross_entropy", "lazily"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in import_violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "fastpar.tensor.linear",
            "from fastpar.ops import cross_entropy\nfrom .norm import RMSNorm\nfrom fastpar.mesh import Mesh",
        ),
        ("fastpar.ops.parallel_linear.api", "def f():\n    import triton"),
        ("fastpar.ops.parallel_linear.api", "if TYPE_CHECKING:\n    import triton"),
        ("fastpar.kernels.cross_entropy", "import triton.language as tl\nfrom fastpar.kernels import common"),
        ("fastpar.cli", "from fastpar import __version__, doctor"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert import_violations(module, source) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("cross_entropy/cpu.cpp", '#include "linear/gemm.h"', "linear/gemm.h"),
        ("common/checks.h", '#include "comm/world.h"', "comm/world.h"),
        ("cross_entropy/cpu.cpp", "#include <torch/extension.h>", "stable ABI"),
        ("runtime/segment.cpp", "#include <torch/csrc/stable/tensor.h>", "free of torch"),
        ("registration.cpp", "#  include <Python.h>", "CPython"),
    ],
)
def test_a_forbidden_include_is_reported(path: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in include_violations(path, source))


def test_an_allowed_include_is_not_reported() -> None:
    assert include_violations("registration.cpp", '#include "cross_entropy/cross_entropy.h"\n#include <vector>') == []
    assert include_violations("linear/cpu.cpp", '#include "common/checks.h"\n#include "gemm.h"') == []
    assert include_violations("linear/cpu.cpp", "#include <torch/csrc/stable/tensor.h>") == []


def test_forbidden_statements_are_reported() -> None:
    assert statement_violations("fastpar.comm", "def f():\n    global x\n    x = 1")
    assert statement_violations("fastpar.ops.parallel_linear.api", "class A(torch.nn.Module):\n    pass")
    assert not statement_violations("fastpar.tensor.linear", "class A(torch.nn.Module):\n    pass")


def test_a_class_name_stands_for_one_thing_in_the_package() -> None:
    found: dict[str, list[str]] = {}
    for part in ("fastpar", "kernels"):
        for file in sorted((ROOT / part).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in found.items() if len(files) > 1}
