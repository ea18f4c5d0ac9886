"""What `import fastpar` promises: the names, their documentation, a cheap import, and a torch that stays as it was."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import statistics
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpar
from tests.dist import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_MODULES = [
    "fastpar",
    "fastpar.comm",
    "fastpar.layouts",
    "fastpar.mesh",
    "fastpar.ops",
    "fastpar.parallel.plan",
    "fastpar.planner",
    "fastpar.reference",
]
PUBLIC_MODULES += ["fastpar.optim", "fastpar.recompute", "fastpar.storage", "fastpar.parallel.api", "fastpar.tensor"]
PUBLIC_MODULES += [
    "fastpar.clip",
    "fastpar.context",
    "fastpar.context.layout",
    "fastpar.expert",
    "fastpar.precision",
    "fastpar.verification",
    "fastpar.zero",
]
IMPORT_BUDGET_SECONDS = 0.3
SHARD_HEADING = "Shard the rest over data-parallel ranks"


def run_python(code: str) -> str:
    """Standard output of the code in a fresh interpreter with warnings as errors and no GPU in sight."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def public_objects(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        value = getattr(module, name)
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("fastpar"):
            yield f"{module.__name__}.{name}", value


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The function itself, or the public methods and the constructor that a class defines itself."""
    if inspect.isfunction(value):
        yield name, value
        return
    for attribute, member in vars(value).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if isinstance(member, property):
            function = member.fget
        if inspect.isfunction(function) and (attribute == "__init__" or not attribute.startswith("_")):
            yield f"{name}.{attribute}", function


def missing_annotations(function: Any) -> list[str]:
    signature = inspect.signature(function)
    names = list(signature.parameters)
    missing = [
        n for n in names if signature.parameters[n].annotation is inspect.Parameter.empty and n not in ("self", "cls")
    ]
    if signature.return_annotation is inspect.Signature.empty and function.__name__ != "__init__":
        missing.append("return")
    return missing


def api_gaps(module: types.ModuleType) -> list[str]:
    gaps = []
    for name, value in public_objects(module):
        if not inspect.getdoc(value):
            gaps.append(f"{name} has no docstring")
        for function_name, function in functions_of(name, value):
            # by dataclass, or by typing for a Protocol
            generated = function.__code__.co_filename == "<string>" or function.__module__ == "typing"
            if not generated and (missing := missing_annotations(function)):
                gaps.append(f"{function_name} lacks annotations: {', '.join(missing)}")
    return gaps


def test_every_public_name_resolves() -> None:
    for name in fastpar.__all__:
        assert getattr(fastpar, name) is not None, name
        assert name in dir(fastpar)
    assert callable(fastpar.parallelize)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fastpar.__version__)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_public_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'paralelize'.*parallelize"):
        _ = fastpar.paralelize


def test_no_public_function_is_named_like_a_module() -> None:
    # Importing a submodule binds its name in the package, so such a function would turn into the module.
    modules = {module.name for module in pkgutil.iter_modules(fastpar.__path__)}
    functions = {name for name in fastpar.__all__ if not isinstance(getattr(fastpar, name), types.ModuleType)}
    assert functions & modules == set()


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_functions_have_docstrings_and_annotations(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert list(public_objects(module)), f"{name} has no public function or class"
    assert api_gaps(module) == []


def test_missing_docstrings_and_annotations_are_found() -> None:
    module = types.ModuleType("fastpar.example")
    exec(compile("def f(x: int, y): ...", "example.py", "exec"), vars(module))
    assert api_gaps(module) == [
        "fastpar.example.f has no docstring",
        "fastpar.example.f lacks annotations: y, return",
    ]


@pytest.mark.expensive
@pytest.mark.clock
def test_importing_fastpar_costs_little_beyond_torch() -> None:
    # Measured inside the process, after torch: the difference of two processes would be noise of the same size.
    code = "import time, torch\nt = time.perf_counter()\nimport fastpar\nprint(time.perf_counter() - t)"
    seconds = statistics.median(float(run_python(code)) for _ in range(3))
    assert seconds < IMPORT_BUDGET_SECONDS


SNAPSHOT = """
import json, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed.tensor  # which brings sympy, which sets a warning filter

def snapshot():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic],
        "matmul precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "seed": torch.initial_seed(),
        "torch rng": torch.get_rng_state().sum().item(),
        "numpy rng": str(numpy.random.get_state()[1].sum()),
        "python rng": hash(random.getstate()),
        "distributed": torch.distributed.is_initialized(),
        "tensor methods": len(vars(torch.Tensor)),
        "linear": [torch.nn.functional.linear is LINEAR, torch.nn.Linear.forward is FORWARD],
        "cuda started": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "warning filters": len(warnings.filters),
        "threads running": threading.active_count(),
        "handlers": str(signal.getsignal(signal.SIGTERM)),
        "excepthook": sys.excepthook is sys.__excepthook__,
    }

LINEAR, FORWARD = torch.nn.functional.linear, torch.nn.Linear.forward
before = snapshot()
loaded = set(sys.modules)
"""
REPORT = """
after = snapshot()
print(json.dumps([key for key in before if before[key] != after[key]]))
print(json.dumps(sorted({"triton", "transformers", "rich", "matplotlib"} & (set(sys.modules) - loaded))))
"""


def effects_of(code: str) -> tuple[list[str], list[str]]:
    """(settings that the code changes, optional packages that it loads) in a fresh process that has torch already."""
    changed, loaded = run_python(f"{SNAPSHOT}{code}{REPORT}").splitlines()
    return json.loads(changed), json.loads(loaded)


@pytest.mark.expensive
def test_importing_fastpar_changes_nothing_in_torch() -> None:
    assert effects_of("import fastpar") == ([], [])


@pytest.mark.expensive
def test_importing_every_public_module_changes_nothing_in_torch() -> None:
    assert effects_of("\n".join(f"import {name}" for name in PUBLIC_MODULES)) == ([], [])


@pytest.mark.expensive
def test_a_changed_setting_and_a_loaded_package_would_be_noticed() -> None:
    code = "torch.set_default_dtype(torch.float64)\nos.environ['FASTPAR_EXAMPLE'] = '1'\nimport rich"
    assert effects_of(code) == (["default dtype", "environment"], ["rich"])


@pytest.mark.expensive
def test_everything_imports_and_an_op_runs_without_triton_and_transformers() -> None:
    imports = "".join(f"import {name}\n" for name in PUBLIC_MODULES)
    code = f"""
import sys
sys.modules["triton"] = None
sys.modules["transformers"] = None
{imports}
import torch
logits = torch.randn(4, 10, requires_grad=True)
fastpar.ops.vocab_parallel_cross_entropy(logits, torch.arange(4)).backward()
print(torch.isfinite(logits.grad).all().item())
"""
    assert run_python(code).strip() == "True"


def readme_examples() -> dict[str, str]:
    """The Python blocks of the README by the heading that they stand under; blocks under one heading are joined."""
    examples: dict[str, str] = {}
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        examples[section.splitlines()[0]] = "\n".join(blocks)
    return examples


def run_swap_example(code: str) -> float:
    swap, plan = code.split("plan = {")
    names: dict[str, Any] = {}
    exec(swap, names)
    first = names["loss"].item()
    names["model"] = names["fp"].unparallelize(names["model"]).model  # whose modules are named as in the second example
    names["model"].lm_head = names["torch"].nn.Linear(64, 1000)
    exec(f"plan = {{{plan}", names)
    return first


def test_readme_swap_examples_run_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    losses = run_ranks(2, run_swap_example, readme_examples()["Swap parallel layers in"])
    assert losses[0] == losses[1]
    assert 6.0 < losses[0] < 8.0  # log(1000) = 6.9 for a model that knows nothing


def run_layout_example(code: str) -> float:
    names: dict[str, Any] = {}
    exec(code, names)
    result = names["trained"].step({"input_ids": names["ids"], "labels": names["ids"]})
    names["trained"].close()
    return float(result.loss)


def test_readme_layout_example_runs_on_four_ranks_and_is_short() -> None:
    pytest.importorskip("transformers")
    code = readme_examples()["One layout, one call"]
    lines = [line for line in code.splitlines() if line and not line.startswith(("#", "import", "from"))]
    assert len(lines) <= 12
    losses = run_ranks(4, run_layout_example, code)
    assert len(set(losses)) == 1
    assert 5.0 < losses[0] < 8.0


def run_pipeline_example(code: str) -> float:
    names: dict[str, Any] = {}
    exec(code, names)
    names["pipe"].close()
    return float(names["loss"])


def run_zero_example(code: str) -> tuple[float, int]:
    names: dict[str, Any] = {}
    exec(code, names)
    names["mesh"].close()
    return names["loss"].item(), names["zero"].skipped


def test_readme_data_parallel_example_runs_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    (first, skipped), (second, _) = run_ranks(2, run_zero_example, readme_examples()[SHARD_HEADING])
    assert 6.0 < first < 8.0
    assert first != second  # each reads a batch of its own
    assert skipped == 0


def run_context_example(code: str) -> tuple[float, float]:
    names: dict[str, Any] = {}
    exec(code, names)
    total = names["fp"].context.total(names["model"], names["loss"])
    names["mesh"].close()
    return names["loss"].item(), total.item()


def test_readme_context_example_runs_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    (first, total), (second, same) = run_ranks(2, run_context_example, readme_examples()["Split sequences"])
    assert total == same == pytest.approx(first + second)
    assert 6.0 < total < 8.0


def test_readme_pipeline_example_runs_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    losses = run_ranks(2, run_pipeline_example, readme_examples()["Cut it over pipeline ranks"])
    assert losses[0] == losses[1]
    assert 6.0 < losses[0] < 8.0


@pytest.mark.expensive
def test_readme_kernel_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(readme_examples()["Call a kernel"], names)
    assert names["logits"].grad is not None
    assert names["lse"].shape == (2048,)
