"""``fastpar doctor``: what is installed here, whether it fits together, and whether every op computes the right thing.

Each check is a function that returns findings and never raises: what it cannot find out is a finding, too. Nothing here
needs the compiled extension to be there or to load. Every problem comes with a remedy.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastpar import _ext
from fastpar._version import __version__

BUILD_REMEDY = "build it: `pip install -e .` in the source checkout (or `make build`), or reinstall the package"
SYMBOLS = {"ok": "ok", "info": "--", "warning": "!!", "problem": "XX"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    status  "ok", "info" (a fact, neither good nor bad), "warning" (works, but you may want to know), or "problem"
    remedy  what to do about it; every problem has one
    """

    topic: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "problem" and not self.remedy:
            raise ValueError(f"the problem {self.topic!r} needs a remedy")


def examine() -> list[Finding]:
    """All findings, in the order in which they are printed."""
    binary = binary_path()
    return [
        *check_versions(),
        *check_binary(binary),
        *check_abi(binary),
        *check_extension(),
        *check_cpu(),
        *check_cuda(),
        *check_backends(),
        *check_shared_memory(),
        *check_ops(),
    ]


def binary_path() -> Path:
    """Where `fastpar._ext.load` looks for the library, whether it is there or not."""
    return Path(os.environ.get("FASTPAR_LIBRARY") or Path(_ext.__file__).with_name("_C.so")).resolve()


def healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.status != "problem" for finding in findings)


# ------------------------------------------------------------------------------------------------ versions and binary


def check_versions() -> list[Finding]:
    """fastpar, Python, torch (new enough?) and triton (optional)."""
    found = [Finding("fastpar", "info", f"{__version__} at {Path(__file__).resolve().parent}")]
    found.append(Finding("python", "info", f"{platform.python_version()} at {sys.executable}"))
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release >= _ext.MIN_TORCH:
        found.append(Finding("torch", "ok", torch.__version__))
    else:
        needed = ".".join(map(str, _ext.MIN_TORCH))
        remedy = f"install torch {needed} or newer: `pip install 'torch>={needed}'`"
        found.append(Finding("torch", "problem", f"{torch.__version__} is older than {needed}", remedy))
    found.append(Finding("triton", "info", _version("triton") or "not installed (optional; the GPU kernels need it)"))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_binary(binary: Path) -> list[Finding]:
    """Is the shared library there?"""
    if not binary.is_file():
        return [Finding("binary", "problem", f"{binary} does not exist", BUILD_REMEDY)]
    return [Finding("binary", "ok", f"{binary} ({binary.stat().st_size / 1e6:.1f} MB)")]


def check_abi(binary: Path) -> list[Finding]:
    """Does the library use LibTorch's stable ABI only? By torch-abi-audit if installed, else from its symbol table."""
    if not binary.is_file():
        return [Finding("abi", "info", "not checked: there is no binary")]
    audited = _audit(binary)
    if audited is not None:
        return [audited]
    symbols = undefined_symbols(binary)
    if symbols is None:
        text = "not checked: the library cannot be read, or neither torch-abi-audit nor nm is there"
        return [Finding("abi", "warning", text, "`pip install torch-abi-audit`")]
    unstable = [name for name in symbols if is_unstable(name)]
    if unstable:
        return [_unstable(unstable)]
    shims = sum(name.startswith(("aoti_torch_", "torch_")) for name in symbols)
    return [Finding("abi", "ok", f"LibTorch stable ABI (nm: {shims} stable symbols, none unstable)")]


def _unstable(names: Sequence[str]) -> Finding:
    text = f"{len(names)} symbols outside LibTorch's stable ABI, such as {names[0]}: it fits one torch version only"
    return Finding("abi", "problem", text, f"{BUILD_REMEDY}, from sources that use torch/csrc/stable only")


def _audit(binary: Path) -> Finding | None:
    if importlib.util.find_spec("torch_abi_audit") is None:
        return None
    program = "import sys; from torch_abi_audit.cli import main; sys.exit(main(['--json', sys.argv[1]]))"
    output = _output(sys.executable, "-c", program, str(binary))
    try:
        verdict = json.loads(output or "")["bundled_libs"][0]["torch"]
        unstable, minimum = verdict["unstable_symbols"], verdict["min_torch_version"]
        stable, shims = verdict["stable"], verdict["stable_shim_count"]
    except (ValueError, LookupError, TypeError):
        return None  # another version of the tool: read the symbol table instead
    if unstable:
        return _unstable(unstable)
    if not stable:
        return None  # it could not read the file, or found nothing of torch in it
    text = f"LibTorch stable ABI, needs torch >= {minimum} (torch-abi-audit: {shims} stable symbols, none unstable)"
    return Finding("abi", "ok", text)


def undefined_symbols(binary: Path) -> list[str] | None:
    """Names that the library expects from others, without their versions; None where `nm` is missing or fails."""
    output = _output("nm", "-D", "--undefined-only", str(binary)) if shutil.which("nm") else None
    return None if output is None else [line.split()[-1].split("@")[0] for line in output.splitlines() if line.strip()]


def is_unstable(symbol: str) -> bool:
    """Whether a mangled name is a C++ symbol of torch or a symbol of CPython, both of which change between versions."""
    return bool(re.match(r"_ZN?[A-Z]*\d*(2at|3c10|5torch)", symbol)) or symbol.startswith(("Py", "_Py"))


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def check_extension() -> list[Finding]:
    """Does the library load, and how was it built?"""
    try:
        facts = _ext.build_info()
    except Exception as error:  # whatever goes wrong while loading is what is to be reported
        return [Finding("extension", "problem", f"does not load: {_one_line(error)}", BUILD_REMEDY)]
    built = f"compiler {facts['compiler']}, CUDA {facts['cuda_archs'] or 'no'}"
    return [Finding("extension", "ok", f"loads ({built}); CPU kernels: {facts['cpu_capabilities']}")]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ------------------------------------------------------------------------------------------------------------ devices


def check_cpu() -> list[Finding]:
    """Vector instructions, and the kernels that fastpar chose."""
    text = f"torch uses {torch.backends.cpu.get_cpu_capability().lower()} and {torch.get_num_threads()} threads"
    try:
        text += f", fastpar {_ext.cpu_capability()}"
    except ImportError:
        text += "; fastpar's kernels are not loaded"
    return [Finding("cpu", "info", text)]


def check_cuda() -> list[Finding]:
    """Devices and driver; a CUDA build of torch that sees no device on a machine that has one is a problem."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    if torch.version.cuda is None:
        if driver:
            remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
            return [Finding("cuda", "warning", "this machine has a GPU, but torch is a CPU build", remedy)]
        return [Finding("cuda", "info", "torch is a CPU build; no NVIDIA driver found")]
    if not torch.cuda.is_available():
        if driver:
            remedy = f"torch is built for CUDA {torch.version.cuda}; install a driver that supports it"
            return [Finding("cuda", "problem", f"driver {driver.split()[0]} is there, but torch cannot use it", remedy)]
        return [Finding("cuda", "info", f"torch is built for CUDA {torch.version.cuda}; this machine has no GPU")]
    for index in range(torch.cuda.device_count()):
        try:
            problem = _use_device(torch.device("cuda", index))
        except Exception as error:  # whatever goes wrong on the device is what is to be reported
            problem = _one_line(error)
        if problem:
            remedy = (
                "run nvidia-smi, and a small torch program on this device; with CUDA_LAUNCH_BLOCKING=1 errors name it"
            )
            return [Finding("cuda", "problem", f"cuda:{index} does not compute: {problem}", remedy)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    version = driver.split()[0] if driver else "unknown"
    return [Finding("cuda", "ok", f"{', '.join(names)}; driver {version}, torch built for CUDA {torch.version.cuda}")]


def _use_device(device: torch.device) -> str:
    """What is wrong with the results of torch and of a kernel of ours on a device; empty: nothing."""
    from fastpar.ops.rms_norm import rms_norm

    x = torch.arange(1.0, 65.0).view(4, 16)
    there = x.to(device)
    total = float(there.sum())
    if total != 2080.0:
        return f"the sum of 1 to 64 is {total:g} there"
    difference = float((rms_norm(there, None).cpu() - rms_norm(x, None)).abs().max())
    return "" if difference < 1e-5 else f"fastpar.ops.rms_norm is off by {difference:g} there"


def check_backends() -> list[Finding]:
    """torch.distributed and its transports."""
    if not torch.distributed.is_available():
        remedy = "install a torch build with USE_DISTRIBUTED (the official wheels have it)"
        return [Finding("distributed", "problem", "this torch was built without torch.distributed", remedy)]
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    text = f"gloo {'yes' if gloo else 'no'}, NCCL {'yes' if nccl else 'no'}"
    if not gloo and not nccl:
        remedy = "install an official torch wheel, which has gloo"
        return [Finding("distributed", "problem", text, remedy)]
    return [Finding("distributed", "ok", text)]


def check_shared_memory() -> list[Finding]:
    """What ranks on this host need to exchange CPU tensors through memory: see fastpar/comm/shared_memory/world.py."""
    try:
        descriptor = os.memfd_create("fastpar-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 1)
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
            os.close(os.pidfd_open(os.getpid()))
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        remedy = "allow memfd_create and pidfd_open in the container's seccomp profile, and mount /proc"
        return [Finding("shared memory", "warning", f"CPU collectives take gloo: {_one_line(error)}", remedy)]
    return [Finding("shared memory", "ok", "CPU ranks of one host exchange through memory (memfd, pidfd)")]


# ---------------------------------------------------------------------------------------------------------- self-tests


def check_ops() -> list[Finding]:
    """Run every op in one process on a small odd shape and compare it with a float64 computation in plain torch."""
    try:
        _ext.load()
    except Exception:  # check_extension has reported it
        return [Finding("ops", "info", "not tested: the extension does not load")]
    return [_self_test(name, test, tolerance) for name, test, tolerance in SELF_TESTS]


def _self_test(name: str, test: Callable[[], float], tolerance: float) -> Finding:
    topic = f"op {name}"
    try:
        error = test()
    except Exception as failure:  # a self-test must report, not crash
        return Finding(topic, "problem", f"fails: {_one_line(failure)}", BUILD_REMEDY)
    if not error <= tolerance:  # also for NaN
        text = f"WRONG: largest error {error:.2e} against float64, allowed {tolerance:.0e}"
        return Finding(topic, "problem", text, f"do not train with this build; {BUILD_REMEDY}, and report it")
    return Finding(topic, "ok", f"largest error {error:.2e} against float64 (allowed {tolerance:.0e})")


def _cross_entropy_error() -> float:
    """Loss per token and gradient, fresh and in place, 37 x 1021 fp32 logits, some tokens ignored."""
    from fastpar.ops import vocab_parallel_cross_entropy

    generator = torch.Generator().manual_seed(0)
    values = 3.0 * torch.randn(37, 1021, generator=generator)
    target = torch.randint(1021, (37,), generator=generator)
    target[::5] = -100
    upstream = torch.rand(37, generator=generator)
    exact = values.double().requires_grad_()
    exact_loss = F.cross_entropy(exact, target, reduction="none")
    (exact_grad,) = torch.autograd.grad(exact_loss, exact, upstream.double())
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for in_place in (False, True):
        logits = values.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, target, reduction="none", inplace_backward=in_place)
        (grad,) = torch.autograd.grad(loss, logits, upstream)
        assert isinstance(loss, torch.Tensor)  # return_lse was not asked for
        pairs += [(loss, exact_loss), (grad, exact_grad)]
    return _largest(pairs + _cross_entropy_with_options(values, target, upstream))


def _cross_entropy_with_options(
    values: torch.Tensor, target: torch.Tensor, upstream: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same with every option, against the float64 reference, which autograd differentiates."""
    from fastpar import ops, reference

    weight = torch.linspace(0.5, 1.5, values.shape[1])
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "logit_scale": 1.3}
    outputs: list[torch.Tensor] = []
    for function, x in (
        (ops.vocab_parallel_cross_entropy, values.clone()),
        (reference.vocab_parallel_cross_entropy, values.double()),
    ):
        x.requires_grad_()
        loss = function(x, target, reduction="none", weight=weight.to(x.dtype), **options)
        outputs += [loss, *torch.autograd.grad(loss, x, upstream.to(loss.dtype))]
    return [(outputs[0], outputs[2]), (outputs[1], outputs[3])]


def _dropout_error() -> float:
    """Values and gradient of a 17 x 19 block of a 40 x 50 tensor, by the mask of `fastpar.reference`."""
    from fastpar.ops import sharded_dropout
    from fastpar.reference.dropout import keep_mask

    offset, shape = [3, 11], [40, 50]
    x = torch.randn(17, 19, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = sharded_dropout(x, 0.3, seed=5, offset=offset, global_shape=shape)
    (grad,) = torch.autograd.grad(out.sum(), x)
    factor = keep_mask(x.shape, 0.3, 5, offset, shape).double() / 0.7
    return _largest([(out, x.double() * factor), (grad, factor)])


def _rms_norm_error() -> float:
    """Output, sum and all gradients, 37 x 1021 fp32 with a residual and a weight offset."""
    from fastpar.ops import rms_norm

    generator = torch.Generator().manual_seed(0)
    x, residual, grad_out, grad_h = (torch.randn(37, 1021, generator=generator) for _ in range(4))
    weight = torch.rand(1021, generator=generator).requires_grad_()
    x.requires_grad_()
    out, h = rms_norm(x, weight, residual=residual, eps=1e-5, weight_offset=1.0)
    found = torch.autograd.grad((out, h), (x, weight), (grad_out, grad_h))
    exact_h, exact_weight = (t.detach().double().requires_grad_() for t in (h, weight))
    exact = F.rms_norm(exact_h, (1021,), exact_weight + 1.0, 1e-5)
    exact_x, exact_w = torch.autograd.grad(exact, (exact_h, exact_weight), grad_out.double())
    pairs = [(out, exact), (h, x.double() + residual.double())]
    return _largest([*pairs, (found[0], exact_x + grad_h.double()), (found[1], exact_w)])


def _all_reduce_rms_norm_error() -> float:
    """Output, sum and all gradients, 37 x 1021 fp32 with a residual, one rank."""
    from fastpar.ops import all_reduce_rms_norm

    x, residual, grad_out, grad_h = _normal(4, 37, 1021)
    weight = torch.linspace(0.5, 1.5, 1021)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    outputs = all_reduce_rms_norm(leaves[0], leaves[1], group=None, residual=residual, eps=1e-5)
    found = torch.autograd.grad(outputs, leaves, (grad_out, grad_h))
    exact = [t.double().requires_grad_() for t in (x, weight)]
    h = exact[0] + residual.double()
    out = F.rms_norm(h, (1021,), exact[1], 1e-5)
    wanted = torch.autograd.grad((out, h), exact, (grad_out.double(), grad_h.double()))
    return _largest([(outputs[0], out), (outputs[1], h), *zip(found, wanted, strict=True)])


def _reduce_scatter_rms_norm_error() -> float:
    """Output and gradients of 37 rows on one rank, which keeps them all."""
    from fastpar.ops import reduce_scatter_rms_norm

    x, residual, upstream = (_normal(37, 1021) for _ in range(3))
    weight = _normal(1021)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out, h = reduce_scatter_rms_norm(leaves[0], leaves[1], group=None, residual=residual, eps=1e-5)
    found = torch.autograd.grad(out, leaves, upstream)
    exact = [(x + residual).double().requires_grad_(), weight.double().requires_grad_()]
    exact_out = F.rms_norm(exact[0], (1021,), exact[1], 1e-5)
    wanted = torch.autograd.grad(exact_out, exact, upstream.double())
    return _largest([(out, exact_out), (h, exact[0]), *zip(found, wanted, strict=True)])


def _rotary_error() -> float:
    """Heads of 37 tokens turned both ways of pairing, and the gradient, against float64."""
    from fastpar.ops import rotary_embedding, rotary_tables

    x, upstream, positions = _normal(37, 3, 34), _normal(37, 3, 34), torch.arange(1000, 1037, device="cpu")
    cos, sin = rotary_tables(positions, 34, dtype=torch.float64)
    whole = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos))[:, None]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for interleaved in (False, True):

        def turned(y: torch.Tensor, angles: torch.Tensor, interleaved: bool = interleaved) -> torch.Tensor:
            y = y.double()
            a, b = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
            z = torch.view_as_real(torch.complex(a, b) * angles)
            return z.flatten(-2) if interleaved else z.transpose(-1, -2).flatten(-2)

        leaf = x.clone().requires_grad_()
        out = rotary_embedding(leaf, positions=positions, interleaved=interleaved)
        pairs += [
            (out, turned(x, whole)),
            (torch.autograd.grad(out, leaf, upstream)[0], turned(upstream, whole.conj())),
        ]
    return _largest(pairs)


def _swiglu_error() -> float:
    """Output and gradient of a packed 37 x 2042 fp32 tensor, and of its halves."""
    from fastpar.ops import swiglu

    generator = torch.Generator().manual_seed(0)
    values, upstream = torch.randn(37, 2042, generator=generator), torch.randn(37, 1021, generator=generator)
    exact_x = values.double().requires_grad_()
    gate, up = exact_x.chunk(2, -1)
    exact = F.silu(gate) * up
    (exact_grad,) = torch.autograd.grad(exact, exact_x, upstream.double())
    x = values.requires_grad_()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for out in (swiglu(x), swiglu(*x.chunk(2, -1))):
        pairs += [(out, exact), (torch.autograd.grad(out, x, upstream)[0], exact_grad)]
    return _largest(pairs)


def _quantize_error() -> float:
    """How much more than its bound a value of 37 x 300 is off in its worst format, relative to its block's largest."""
    from fastpar.ops import dequantize_blocks, quantize_blocks

    x = _normal(37, 300)
    largest = F.pad(x.abs(), (0, 84)).view(37, 3, 128).amax(-1).repeat_interleave(128, -1)[:, :300]
    worst = 0.0
    for name, bound in (
        ("int8", largest / 254),
        ("float8_e4m3fn", torch.maximum(x.abs() / 16, largest / 448 * 2.0**-10)),
        ("float8_e5m2", torch.maximum(x.abs() / 8, largest / 57344 * 2.0**-17)),
    ):
        off = (dequantize_blocks(*quantize_blocks(x, format=name)) - x).abs()
        worst = max(worst, float(((off - bound) / largest).max()))
    return worst


def _newton_schulz_error() -> float:
    """A 37 x 65 fp32 matrix orthogonalized in five steps."""
    from fastpar import reference
    from fastpar.ops import newton_schulz

    x = _normal(37, 65)
    wanted = reference.newton_schulz(x.double(), dtype=torch.float64)
    return _largest([(newton_schulz(x, dtype=torch.float32), wanted)])


def _linear_cross_entropy_error(way: str) -> float:
    """Loss and gradients of a 300 x 24 by 24 x 211 projection in two chunks, against float64 in plain PyTorch."""
    from fastpar import ops, reference

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(*shape, generator=generator) for shape in ((300, 24), (211, 24), (211,))]
    target = torch.randint(211, (300,), generator=generator)
    target[::5] = -100
    exact = [value.double().requires_grad_() for value in values]
    exact_loss, exact_lse = reference.linear_cross_entropy(
        exact[0], exact[1], target, bias=exact[2], reduction="sum", return_lse=True
    )
    wanted = torch.autograd.grad(exact_loss, exact)
    hidden, weight, bias = (value.clone().requires_grad_() for value in values)
    options: dict[str, Any] = {"bias": bias, "chunk_bytes": 1}
    if way == "apart":
        rows = (exact_lse.detach(), torch.ones(300))
        found = [ops.linear_cross_entropy_dgrad(hidden, weight, target, *rows, **options)]
        found += [g for g in ops.linear_cross_entropy_wgrad(hidden, weight, target, *rows, **options) if g is not None]
        return _largest(list(zip(found, wanted, strict=True)))
    store = ops.WeightGradStore()
    options["wgrad_store"] = store if way == "deferred" else None
    loss = ops.linear_cross_entropy(hidden, weight, target, reduction="sum", **options)
    loss.backward()
    store.run()
    grads = [tensor.grad for tensor in (hidden, weight, bias) if tensor.grad is not None]
    return _largest([(loss / 240.0, exact_loss / 240.0), *zip(grads, wanted, strict=True)])


def _linear_error(kind: str) -> float:
    """Output and gradients of a 17 x 24 by 24 x 31 linear with bias, against float64."""
    from fastpar import ops

    x, weight, bias, upstream = _normal(17, 24), _normal(31, 24), _normal(31), _normal(17, 31)
    exact = [value.double().requires_grad_() for value in (x, weight, bias)]
    exact_out = F.linear(*exact)
    wanted = [exact_out, *torch.autograd.grad(exact_out, exact, upstream.double())]
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    out = getattr(ops, kind)(*leaves, group=None)
    pairs = list(zip([out, *torch.autograd.grad(out, leaves, upstream)], wanted, strict=True))
    return _largest([(a / b.abs().max(), b / b.abs().max()) for a, b in pairs])


def _overlap_error() -> float:
    """Without a group there is nothing to overlap: an empty table."""
    from fastpar import ops

    shape = ops.OverlapShape("linear_all_reduce", 8, 8, 8)
    return float(len(ops.measure_overlap(None, [shape]).table) + len(ops.Overlap.load(None).table))


def _softmax_error(log: bool) -> float:
    """Values and gradient of 7 x 1021 fp32 logits."""
    from fastpar.ops import vocab_parallel_log_softmax, vocab_parallel_softmax

    function, exact_function = vocab_parallel_softmax, torch.softmax
    if log:
        function, exact_function = vocab_parallel_log_softmax, torch.log_softmax
    logits, upstream = _normal(7, 1021).requires_grad_(), _normal(7, 1021)
    exact = logits.detach().double().requires_grad_()
    out, exact_out = function(logits), exact_function(exact, -1)
    (grad,) = torch.autograd.grad(out, logits, upstream)
    (exact_grad,) = torch.autograd.grad(exact_out, exact, upstream.double())
    scale = exact_grad.abs().max().clamp(min=1.0)
    return _largest([(out, exact_out), (grad / scale, exact_grad / scale)])


def _entropy_error(with_ids: bool) -> float:
    """Log-probabilities of two ids a row, entropy, and the gradient of both; 7 x 1021 fp32 logits."""
    from fastpar.ops import vocab_parallel_entropy, vocab_parallel_log_prob

    logits, ids = _normal(7, 1021).requires_grad_(), torch.arange(14).view(7, 2) * 70
    exact = logits.detach().double().requires_grad_()
    log_p = exact.log_softmax(-1)
    exact_outputs = [-(log_p.exp() * log_p).sum(-1)]
    outputs = [vocab_parallel_entropy(logits)]
    if with_ids:
        exact_outputs.append(log_p.gather(1, ids))
        log_prob, entropy = vocab_parallel_log_prob(logits, ids, return_entropy=True)
        outputs = [entropy, log_prob]
    (grad,) = torch.autograd.grad([out.sum() for out in outputs], logits)
    (exact_grad,) = torch.autograd.grad([out.sum() for out in exact_outputs], exact)
    return _largest([*zip(outputs, exact_outputs, strict=True), (grad, exact_grad)])


def _topk_error() -> float:
    """The 20 largest of 7 x 1021 fp32 logits with many ties: values and ids."""
    from fastpar.ops import vocab_parallel_topk

    logits = _normal(7, 1021).round()
    values, ids = vocab_parallel_topk(logits, 20)
    wanted, wanted_ids = logits.sort(dim=-1, descending=True, stable=True)
    return _largest([(values, wanted[:, :20].double()), (ids, wanted_ids[:, :20].double())])


def _argmax_error() -> float:
    from fastpar.ops import vocab_parallel_argmax

    logits = _normal(7, 1021)
    return _largest([(vocab_parallel_argmax(logits), logits.argmax(-1).double())])


def _top_k_top_p_error() -> float:
    """What top-p of 0.9 and top-k of 50 leave of 7 x 1021 fp32 logits."""
    from fastpar import reference
    from fastpar.ops import vocab_parallel_top_k_top_p

    logits = _normal(7, 1021)
    found = [vocab_parallel_top_k_top_p(logits, top_p=0.9, filter_value=0.0, top_k=k) for k in (None, 50)]
    wanted = [reference.vocab_parallel_top_k_top_p(logits, top_p=0.9, filter_value=0.0, top_k=k) for k in (None, 50)]
    return _largest([(a, b.double()) for a, b in zip(found, wanted, strict=True)])


def _sample_error() -> float:
    from fastpar import reference
    from fastpar.ops import vocab_parallel_sample

    logits = _normal(7, 1021)
    wanted = reference.vocab_parallel_sample(logits, seed=1)
    return _largest([(vocab_parallel_sample(logits, seed=1), wanted.double())])


def _embedding_error() -> float:
    """Rows and weight gradient of 100 ids in a table of 37 x 65 fp32."""
    from fastpar.ops import vocab_parallel_embedding

    weight, ids = _normal(37, 65).requires_grad_(), torch.arange(100) % 37
    exact = weight.detach().double().requires_grad_()
    out, exact_out = vocab_parallel_embedding(ids, weight), F.embedding(ids, exact)
    upstream = _normal(100, 65)
    (grad,) = torch.autograd.grad(out, weight, upstream)
    (exact_grad,) = torch.autograd.grad(exact_out, exact, upstream.double())
    return _largest([(out, exact_out), (grad, exact_grad)])


def _square_sum_error() -> float:
    """Of the integer itself, and of the root relative to float64's: 7 x 1021 fp32 numbers and as many in bf16."""
    from fastpar import reference
    from fastpar.ops import exact_square_sum, square_sum_norm

    x = _normal(7, 1021)
    sums, wanted = exact_square_sum([x, x.bfloat16()]), reference.exact_square_sum([x, x.bfloat16()])
    exact = torch.linalg.vector_norm(torch.cat([x.double(), x.bfloat16().double()]))
    return _largest([(sums, wanted.double()), (square_sum_norm(sums, torch.float64) / exact, torch.ones(()).double())])


def _moe_rows_error(is_planned: bool = False) -> float:
    """37 tokens to two of five experts that double their rows, and back with weights: results and gradients. Half of
    the experts have padding rows. `is_planned`: the plan first."""
    from fastpar import ops
    from fastpar.ops import moe_combine, moe_dispatch, moe_plan, moe_send

    x, indices, weights = _normal(37, 24).requires_grad_(), _choices(37, 5), _normal(37, 2).requires_grad_()
    padded = ops.Dispatch(padding=ops.Padding(align=4))
    if is_planned:
        handle = moe_plan(indices, weights, num_experts=5, dispatch=padded)
        rows, row_weights = moe_send(x, handle, weights)
    else:
        rows, row_weights, handle = moe_dispatch(x, indices, weights, num_experts=5, dispatch=padded)
    out = moe_combine(2.0 * rows, handle, row_weights)
    upstream = _normal(37, 24)
    grads = torch.autograd.grad(out, (x, weights), upstream)
    wide, scale = x.detach().double(), 2.0 * weights.detach().double()
    wanted = scale.sum(1, keepdim=True) * wide
    by_weights = 2.0 * (upstream.double() * wide).sum(1, keepdim=True).expand(-1, 2)
    off_grid = torch.tensor(handle.splits) % 4
    return _largest(
        [
            (out / 100.0, wanted / 100.0),
            (grads[0] / 100.0, scale.sum(1, keepdim=True) * upstream.double() / 100.0),
            (grads[1] / 1000.0, by_weights / 1000.0),
            (off_grid, torch.zeros_like(off_grid).double()),
        ]
    )


def _moe_mlp_error() -> float:
    """Output and gradients of five SwiGLU experts 24 -> 16 -> 24 on 37 tokens, against float64 in plain PyTorch."""
    from fastpar import reference
    from fastpar.ops import ExpertWeights, moe_mlp

    indices = _choices(37, 5)
    values = [_normal(37, 24), _normal(37, 2) / 3.0, _normal(5, 32, 24) / 12.0, _normal(5, 24, 16) / 12.0]
    exact = [value.double().requires_grad_() for value in values]
    values = [value.requires_grad_() for value in values]
    out = moe_mlp(values[0], indices, values[1], ExpertWeights(*values[2:]))
    exact_out = reference.moe_mlp(exact[0], indices, exact[1], ExpertWeights(*exact[2:]))
    upstream = _normal(37, 24)
    grads = torch.autograd.grad(out, values, upstream)
    exact_grads = torch.autograd.grad(exact_out, exact, upstream.double())
    pairs = [(out, exact_out), *zip(grads, exact_grads, strict=True)]
    return _largest([(found / wanted.abs().max(), wanted / wanted.abs().max()) for found, wanted in pairs])


def _grouped_linear_error(way: str) -> float:
    """Output and gradients of three experts, one of them without rows, on 37 rows."""
    from fastpar import ops, reference

    splits, upstream = (0, 20, 20, 37), _normal(37, 31)
    x, weight = _normal(37, 24).requires_grad_(), _normal(3, 31, 24).requires_grad_()
    exact = [value.detach().double().requires_grad_() for value in (x, weight)]
    exact_out = reference.grouped_linear(exact[0], exact[1], splits)
    wanted = [exact_out, *torch.autograd.grad(exact_out, exact, upstream.double())]
    if way == "apart":
        by_x = ops.grouped_linear_dgrad(upstream, weight, splits)
        found, wanted = [by_x, ops.grouped_linear_wgrad(upstream, x, weight, splits)], wanted[1:]
    else:
        out = ops.grouped_linear(x, weight, splits)
        found = [out, *torch.autograd.grad(out, (x, weight), upstream)]
    return _largest([(a / b.abs().max(), b / b.abs().max()) for a, b in zip(found, wanted, strict=True)])


def _capacity_error() -> float:
    """Four tokens, of which an expert with room for 2 gets the best."""
    from fastpar.ops import expert_capacity, moe_capacity

    indices, weights = torch.tensor([[0], [0], [1], [0]]), torch.tensor([[0.5], [0.9], [0.8], [0.7]])
    capacity = expert_capacity(4, 1, 2, factor=1.0)
    found = moe_capacity(indices, weights, num_experts=2, tokens=capacity)
    return _largest([(found, torch.tensor([[-1.0], [0.0], [1.0], [0.0]], dtype=torch.float64))])


def _choices(tokens: int, num_experts: int) -> torch.Tensor:
    """Two different experts for each token."""
    first = torch.arange(tokens) % num_experts
    return torch.stack([first, (first + 1 + torch.arange(tokens) % (num_experts - 1)) % num_experts], 1)


def _normal(*shape: int) -> torch.Tensor:
    return 3.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _largest(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest absolute deviation of (found, exact) pairs; NaN if there is one anywhere."""
    return torch.stack([(found.double() - exact).abs().max() for found, exact in pairs]).max().item()


def _torch_optimizer_error(name: str) -> float:
    """Five steps of AdamW or of SGD with momentum on two tensors, against torch.optim in float64."""
    from fastpar.ops import adamw_step, sgd_step

    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in ((37, 19), (5,))]
    exact = [p.double().requires_grad_() for p in params]
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    theirs: torch.optim.Optimizer = torch.optim.AdamW(exact, lr=0.1)
    if name == "sgd":
        theirs = torch.optim.SGD(exact, lr=0.1, momentum=0.9)
    for step in range(1, 6):
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        for e, g in zip(exact, grads, strict=True):
            e.grad = g.double()
        theirs.step()
        if name == "sgd":
            sgd_step(params, grads, states[0], lr=0.1, momentum=0.9, first=step == 1)
        else:
            adamw_step(params, grads, *states, step=step, lr=0.1)
    return _largest([(p, e) for p, e in zip(params, exact, strict=True)])


def _lion_error() -> float:
    """One step of Lion on 703 values, against its formula in float64."""
    from fastpar.ops import lion_step

    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(703, generator=generator) for _ in range(3))
    direction = (0.9 * m.double() + 0.1 * g.double()).sign()
    exact = [p.double() * 0.99 - 0.1 * direction, 0.99 * m.double() + 0.01 * g.double()]
    lion_step([p], [g], [m], lr=0.1, weight_decay=0.1)
    return _largest(list(zip((p, m), exact, strict=True)))


def _stochastic_rounding_error() -> float:
    """703 values rounded to bfloat16 by a step from 0, against `fastpar.reference`, whose bits they have to be."""
    from fastpar.contracts.optimizer_formats import random_bits, round_stochastically
    from fastpar.ops import StochasticRounding, sgd_step

    values = torch.randn(703, generator=torch.Generator().manual_seed(0))
    param = torch.zeros(703, dtype=torch.bfloat16)
    sgd_step([param], [-values], lr=1.0, stochastic=StochasticRounding(1, [2], [3]))
    return _largest([(param, round_stochastically(values, random_bits(1, 2, 3, 703)[0]))])


# Absolute errors in fp32; values are of the order of 10 (loss, swiglu, gradient of a weight) and 1 (others).
def _route_error() -> float:
    """Weights, choices and gradient of 4 of 24 experts, sigmoid with a bias, groups and ties, against the reference."""
    from fastpar import ops, reference

    logits, bias = _normal(37, 24).round(decimals=1), _normal(24)
    rule = ops.RouteRule(4, "sigmoid", normalize=True, scale=2.5, num_groups=6, top_groups=3)
    upstream = _normal(37, 4)
    outputs: list[torch.Tensor] = []
    for function, x in ((ops.moe_route, logits.clone()), (reference.moe_route, logits.double())):
        routing = function(x.requires_grad_(), rule, bias=bias)
        outputs += [routing.weights, routing.indices, *torch.autograd.grad(routing.weights, x, upstream.to(x.dtype))]
    return _largest([(found, exact.double()) for found, exact in zip(outputs[:3], outputs[3:], strict=True)])


def _expert_choice_error() -> float:
    """Weights and choices of 8 experts that take 5 of 37 tokens each, against the reference."""
    from fastpar import ops, reference

    logits = _normal(37, 8)
    found, exact = ops.expert_choice_route(logits, 5), reference.expert_choice_route(logits.double(), 5)
    return _largest([(found.weights, exact.weights), (found.indices, exact.indices.double())])


def _router_logits_error() -> float:
    """Logits of 16-bit operands, and the gradient of their sum by x; of integers, so that no rounding is allowed."""
    from fastpar.ops import router_logits

    x, weight = _normal(37, 64).round().bfloat16().requires_grad_(), _normal(5, 64).round().bfloat16()
    logits = router_logits(x, weight)
    (grad,) = torch.autograd.grad(logits.sum(), x)
    exact = weight.double().sum(0).expand(37, 64)
    return _largest([(logits, F.linear(x.double(), weight.double())), (grad, exact)])


SELF_TESTS: list[tuple[str, Callable[[], float], float]] = [
    ("vocab_parallel_cross_entropy", _cross_entropy_error, 1e-5),
    ("sharded_dropout", _dropout_error, 1e-5),
    ("rms_norm", _rms_norm_error, 3e-5),
    ("all_reduce_rms_norm", _all_reduce_rms_norm_error, 3e-5),
    ("reduce_scatter_rms_norm", _reduce_scatter_rms_norm_error, 3e-5),
    ("rotary_embedding", _rotary_error, 1e-5),
    ("rotary_tables", _rotary_error, 1e-5),
    ("swiglu", _swiglu_error, 3e-5),
    ("quantize_blocks", _quantize_error, 1e-6),
    ("dequantize_blocks", _quantize_error, 1e-6),
    ("exact_square_sum", _square_sum_error, 1e-15),
    ("square_sum_norm", _square_sum_error, 1e-15),
    ("newton_schulz", _newton_schulz_error, 3e-5),
    ("linear_cross_entropy", lambda: _linear_cross_entropy_error("whole"), 1e-4),
    ("linear_cross_entropy_dgrad", lambda: _linear_cross_entropy_error("apart"), 1e-4),
    ("linear_cross_entropy_wgrad", lambda: _linear_cross_entropy_error("apart"), 1e-4),
    ("WeightGradStore", lambda: _linear_cross_entropy_error("deferred"), 1e-4),
    ("vocab_parallel_softmax", lambda: _softmax_error(log=False), 1e-5),
    ("vocab_parallel_log_softmax", lambda: _softmax_error(log=True), 1e-5),
    ("vocab_parallel_log_prob", lambda: _entropy_error(with_ids=True), 1e-5),
    ("vocab_parallel_entropy", lambda: _entropy_error(with_ids=False), 1e-5),
    ("vocab_parallel_topk", _topk_error, 0.0),
    ("vocab_parallel_argmax", _argmax_error, 0.0),
    ("vocab_parallel_top_k_top_p", _top_k_top_p_error, 0.0),
    ("vocab_parallel_sample", _sample_error, 0.0),
    ("vocab_parallel_embedding", _embedding_error, 1e-5),
    *(
        (kind, functools.partial(_linear_error, kind), 1e-5)
        for kind in ("all_gather_linear", "copy_to_linear", "linear_reduce_scatter", "linear_all_reduce")
    ),
    ("RouteRule", _route_error, 1e-5),
    ("Routing", _route_error, 1e-5),
    ("moe_route", _route_error, 1e-5),
    ("expert_choice_route", _expert_choice_error, 1e-5),
    ("router_logits", _router_logits_error, 0.0),
    ("Overlap", _overlap_error, 0.0),
    ("OverlapShape", _overlap_error, 0.0),
    ("measure_overlap", _overlap_error, 0.0),
    ("moe_dispatch", _moe_rows_error, 1e-5),
    ("moe_combine", _moe_rows_error, 1e-5),
    ("moe_plan", lambda: _moe_rows_error(is_planned=True), 1e-5),
    ("moe_send", lambda: _moe_rows_error(is_planned=True), 1e-5),
    ("Dispatch", _moe_rows_error, 1e-5),
    ("DispatchHandle", _moe_rows_error, 1e-5),
    ("Padding", _moe_rows_error, 1e-5),
    ("moe_mlp", _moe_mlp_error, 1e-5),
    ("ExpertRule", _moe_mlp_error, 1e-5),
    ("ExpertWeights", _moe_mlp_error, 1e-5),
    ("grouped_linear", lambda: _grouped_linear_error("whole"), 1e-5),
    ("grouped_linear_dgrad", lambda: _grouped_linear_error("apart"), 1e-5),
    ("grouped_linear_wgrad", lambda: _grouped_linear_error("apart"), 1e-5),
    ("moe_capacity", _capacity_error, 0.0),
    ("expert_capacity", _capacity_error, 0.0),
    ("adamw_step", lambda: _torch_optimizer_error("adamw"), 1e-5),
    ("sgd_step", lambda: _torch_optimizer_error("sgd"), 1e-5),
    ("lion_step", _lion_error, 1e-5),
    ("StochasticRounding", _stochastic_rounding_error, 0.0),
]


# -------------------------------------------------------------------------------------------------------------- report


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, a verdict last."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{SYMBOLS[finding.status]}  {finding.topic.ljust(width)}  {finding.text}")
        if finding.remedy:
            lines.append(f"    {'':{width}}  -> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    lines.append("healthy" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
    return "\n".join(lines)


def main(*, as_json: bool = False) -> int:
    """Print the report; 0 when there is no problem, else 1."""
    findings = examine()
    if as_json:
        print(json.dumps({"healthy": healthy(findings), "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print(report(findings))
    return 0 if healthy(findings) else 1
