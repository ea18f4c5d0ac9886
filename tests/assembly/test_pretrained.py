"""Models saved from shards are the files that transformers reads, and loading reads each rank's slices alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.pretrained.tensor_files import TensorEntry, TensorFile, TensorFileWriter
from tests.dist import run_ranks
from tests.models import build_model

pytest.importorskip("transformers")


def _mixtral(**sizes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    options = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(options | sizes)))


def _assert_same(found: nn.Module, wanted: nn.Module) -> None:
    theirs = found.state_dict()
    assert set(theirs) == set(wanted.state_dict())
    for name, value in wanted.state_dict().items():
        assert torch.equal(theirs[name], value), name


# ---- files


def test_files_are_those_of_safetensors_both_ways(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, 7),
        "b": torch.randn(257).bfloat16(),
        "c": torch.tensor(3, dtype=torch.int64),
        "d": torch.randint(0, 2, (5,)).bool(),
        "e": torch.empty(0, 4, dtype=torch.float64),
        "f": torch.randn(3, 3).to(torch.float8_e4m3fn),
    }
    entries = {name: TensorEntry(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    writer = TensorFileWriter(tmp_path / "ours.safetensors", entries, {"format": "pt"})
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    assert not (tmp_path / "ours.safetensors").exists()
    writer.close()
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = load_file(tmp_path / "ours.safetensors")
    with TensorFile(tmp_path / "theirs.safetensors") as file:
        for name, x in tensors.items():
            for found in (theirs[name], file.read(name)):
                assert (found.dtype, found.shape) == (x.dtype, x.shape)
                assert torch.equal(found.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)), name


def test_rows_are_read_and_nothing_else(tmp_path: Path) -> None:
    x = torch.arange(4 * 6 * 5, dtype=torch.int16).view(4, 6, 5)
    writer = TensorFileWriter(tmp_path / "x", {"x": TensorEntry(x.dtype, (4, 6, 5))}, {})
    writer.write("x", x)
    writer.close()
    with TensorFile(tmp_path / "x") as file:
        for dim, ranges in ((0, [(1, 3)]), (1, [(0, 1), (4, 6)]), (2, [(4, 5), (0, 2)]), (0, []), (1, [(2, 2)])):
            before = file.bytes_read
            wanted = torch.cat([x.narrow(dim, lo, hi - lo) for lo, hi in ranges] or [x.narrow(dim, 0, 0)], dim)
            assert torch.equal(file.read("x", dim, ranges), wanted)
            assert file.bytes_read - before == wanted.nbytes
        with pytest.raises(IndexError, match=r"not all in x of \[4, 6, 5\] along dim 0"):
            file.read("x", 0, [(3, 5)])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"x":{"dtype":"F32","shape":[-4],"data_offsets":[0,-16]}}',
        b'{"x":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}    ',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}    ',
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    if content.startswith(b'{"x"'):
        content = len(content).to_bytes(8, "little") + content + b"12345678"
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad (is no safetensors file|has a header that is not)"):
        TensorFile(tmp_path / "bad")


# ---- saving


def _saved(folder: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    def case(plain: Any, mesh: Any, stage: int | None, name: str, **options: Any) -> None:
        is_split = any(mesh.size(dim) > 1 for dim in ("tp", "ep", "etp"))
        model = fp.parallelize(copy.deepcopy(plain), mesh) if is_split else plain
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = None if stage is None else fp.zero.shard(model, optimizer, group=mesh, stage=stage)
        model.save_pretrained(f"{folder}/{name}", **options)
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        _assert_same(loaded, plain)
        if zero is not None:
            zero.detach()
            assert ("save_pretrained" in vars(model)) == is_split

    if kind == "tp2":
        mesh = fp.init_mesh(tp=2, device="cpu")
        case(build_model("qwen3", torch.bfloat16), mesh, None, "tied", max_shard_size="20KB")
        case(_mixtral(), mesh, None, "experts")
    elif kind == "dp2":
        mesh = fp.init_mesh(dp_shard=2, device="cpu")
        case(build_model("llama", torch.float32), mesh, 3, "zero3")
        mesh.close()
        case(_mixtral(), fp.init_mesh(dp_shard=2, ep=2, device="cpu"), 3, "experts")
    else:
        mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
        case(build_model("gpt2", torch.float32), mesh, 3, "packed")
        case(build_model("qwen3", torch.float32), mesh, 1, "zero1")
        mesh.close()
        case(_mixtral(), fp.init_mesh(dp_shard=4, etp=2, device="cpu"), 3, "split experts")


@pytest.mark.parametrize(("kind", "size"), [("tp2", 2), ("dp2", 2), ("tp2 dp2", 4)])
def test_models_saved_from_shards_are_those_that_transformers_loads(tmp_path: Path, kind: str, size: int) -> None:
    run_ranks(size, _saved, str(tmp_path), kind)
    for folder in tmp_path.iterdir():
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "generation_config.json"} <= names
        assert not any(name.endswith(".partial") for name in names)
    if kind == "tp2":
        index = json.loads((tmp_path / "tied" / "model.safetensors.index.json").read_text())["weight_map"]
        assert "lm_head.weight" not in index
        assert len(set(index.values())) > 3
        with TensorFile(tmp_path / "experts" / "model.safetensors") as file:
            assert any(".experts.3." in name for name in file.entries), "in the form that files have"


def _written(folder: str) -> int:
    """Tensors that this rank writes."""
    model = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD)
    names: list[str] = []
    write = TensorFileWriter.write

    def counted(self: TensorFileWriter, name: str, value: Tensor) -> None:
        names.append(name)
        write(self, name, value)

    TensorFileWriter.write = counted  # type: ignore[method-assign]
    try:
        fp.save_pretrained(model, folder)
    finally:
        TensorFileWriter.write = write  # type: ignore[method-assign]
    assert len(names) == len(set(names))
    return len(names)


def test_one_rank_writes_each_tensor_once(tmp_path: Path) -> None:
    plain = build_model("llama", torch.float32)
    assert run_ranks(2, _written, str(tmp_path)) == [len(plain.state_dict()), 0]


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _any_module(folder: str) -> None:
    torch.manual_seed(0)
    plain = Half()
    model = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, {"up": "colwise", "down": "rowwise"})
    fp.save_pretrained(model, folder)
    with TensorFile(Path(folder) / "model.safetensors") as file:
        for name, value in plain.state_dict().items():
            assert torch.equal(file.read(name), value)
    before = sorted(path.name for path in Path(folder).iterdir())
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(RuntimeError, match=r"save_pretrained to .* failed"):
        fp.save_pretrained(model, folder)
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    with pytest.raises(ValueError, match="max_file_bytes must be at least 1"):
        fp.save_pretrained(model, folder, max_file_bytes=0)


def test_any_module_is_saved_and_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    run_ranks(2, _any_module, str(tmp_path))


def _arguments_of_transformers(folder: str) -> None:
    model: Any = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD)
    for options, message in (
        ({"state_dict": {}}, "leave state_dict out"),
        ({"push_to_hub": True}, r"does not know \['push_to_hub'\]"),
        ({"max_shard_size": "5 apples"}, "max_shard_size must be a number of bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(folder, **options)


def test_arguments_without_a_meaning_for_shards_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _arguments_of_transformers, str(tmp_path))


# ---- loading


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _loaded(folder: str, sizes: dict[str, Any], sequence_parallel: bool) -> tuple[float, int]:
    """The largest difference of the logits, and the bytes that this rank has read."""
    from transformers import AutoModelForCausalLM

    from fastpar.pretrained import folder as folders

    counts: list[int] = []
    close = folders.WeightFolder.close

    def counted(self: Any) -> None:
        counts.append(self.bytes_read)
        close(self)

    folders.WeightFolder.close = counted  # type: ignore[method-assign]
    try:
        mesh = fp.init_mesh(**sizes, device="cpu")
        model = fp.load_pretrained(AutoModelForCausalLM, folder, mesh, sequence_parallel=sequence_parallel)
    finally:
        folders.WeightFolder.close = close  # type: ignore[method-assign]
    assert not model.training
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = float((_logits(model, ids) - _logits(plain, ids)).abs().max())
    fp.unparallelize(model)
    _assert_same(model, plain)
    return error, counts[-1]


@pytest.mark.parametrize(
    ("architecture", "sizes", "sequence_parallel"),
    [
        ("qwen3", {"tp": 2}, True),
        ("gpt2", {"tp": 2}, False),
        ("mixtral", {"dp_shard": 2, "ep": 2}, False),
        ("mixtral", {"dp_shard": 2, "etp": 2}, False),
        ("qwen3", {"tp": 2, "tp_grid": (1, 1, 2)}, False),
    ],
    ids=["tied", "packed", "experts", "split experts", "grid"],
)
def test_a_loaded_model_is_that_of_transformers_and_ranks_read_their_slices(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], sequence_parallel: bool
) -> None:
    plain = _mixtral() if architecture == "mixtral" else build_model(architecture, torch.float32)
    plain.save_pretrained(tmp_path)
    total = sum(x.nbytes for x in plain.parameters())
    whole = sum(x.nbytes for x in plain.parameters() if x.dim() < 2)
    whole += sum(x.nbytes for name, x in plain.named_parameters() if name.endswith("wpe.weight"))
    if "etp" in sizes or "tp_grid" in sizes:  # an expert of a file is read whole, and the tied embedding is kept whole
        whole = total
    elif architecture == "mixtral":
        whole += sum(x.nbytes for name, x in plain.named_parameters() if "experts" not in name and x.dim() > 1)
    header = 12_000
    for error, count in run_ranks(2, _loaded, str(tmp_path), sizes, sequence_parallel):
        assert error <= 2e-6
        assert count <= (total + whole) / 2 + total * 0.02 + header, (count, total, whole)


class Lenient(nn.Module):
    """Whose folders may lack a parameter, as transformers' models say it."""

    _keys_to_ignore_on_load_missing = ("more", "count")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.more = nn.Linear(6, 8), nn.LayerNorm(6)
        self.register_buffer("count", torch.tensor(3.0))


def test_what_a_folder_may_lack_is_initialised_all_the_same(tmp_path: Path) -> None:
    plain = Lenient()
    del plain.more, plain.count
    fp.save_pretrained(plain, tmp_path)
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        model = fp.load_pretrained(Lenient, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(model.up.weight, plain.up.weight)
    assert torch.equal(model.more.weight, torch.ones(6)), "and not what lay in memory"
    assert torch.equal(model.more.bias, torch.zeros(6))
    assert model.count == 3.0


def test_an_index_says_which_file_is_meant_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    both = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    for name, plain in zip("ab", both, strict=True):
        fp.save_pretrained(plain, tmp_path / name)
        (tmp_path / name / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "other": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"index.json names \['other'\], which b.safetensors does not have"):
        fp.load_pretrained(lambda: nn.Linear(3, 3, bias=False), tmp_path)
    fp.save_pretrained(nn.ParameterDict({"other": both[1].weight, "weight": both[1].weight.detach()}), tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "b.safetensors")
    model = fp.load_pretrained(lambda: nn.Linear(3, 3, bias=False), tmp_path, strict=False)
    assert torch.equal(model.weight, both[0].weight)
    for damaged in ("[]", "{", '{"weight_map": {"weight": 3}}'):
        index.write_text(damaged)
        with pytest.raises(ValueError, match="is damaged: it has no weight_map"):
            fp.load_pretrained(lambda: nn.Linear(3, 3, bias=False), tmp_path)


def _loads_half(folder: str) -> None:
    torch.manual_seed(0)
    plain = Half().double()
    if dist.get_rank() == 0:
        fp.save_pretrained(plain, folder, group=fp.Communicator(None))
    dist.barrier()
    plan = {"up": "colwise", "down": "rowwise"}
    for group, wanted in ((dist.group.WORLD, plan), (None, "auto")):
        model = fp.load_pretrained(Half, folder, group, wanted, dtype=torch.float64)
        x = torch.randn(5, 6, dtype=torch.float64)
        torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(ValueError, match=r"lacks more.weight; the model has no place for up.bias"):
        fp.load_pretrained(More, folder, dist.group.WORLD, plan)
    model = fp.load_pretrained(More, folder, dist.group.WORLD, plan, strict=False, dtype=torch.float64)
    assert model.more.weight.std() > 0.01
    with pytest.raises(TypeError, match="not a Half"):
        fp.load_pretrained(plain, folder)
    with pytest.raises(ValueError, match=r"down.bias in .* has the shape \[6\], and down.bias of the model \[7\]"):
        fp.load_pretrained(lambda: nn.ModuleDict({"down": nn.Linear(9, 7)}), folder, strict=False)
    if dist.get_rank() == 1:
        folder += "/nowhere"
    with pytest.raises((FileNotFoundError, ValueError), match=r"neither model.safetensors|failed on rank 1"):
        fp.load_pretrained(Half, folder, dist.group.WORLD, plan)


class More(Half):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, bias=False)
        self.more = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x))


def test_any_module_is_loaded_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    run_ranks(2, _loads_half, str(tmp_path))


def test_no_parameter_has_memory_while_a_model_is_built() -> None:
    from fastpar.parallel.load import _meta_parameters

    with _meta_parameters():
        model = nn.Sequential(*(nn.Linear(1 << 14, 1 << 15) for _ in range(64)), nn.BatchNorm1d(3))  # 128 GiB
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert nn.Linear(2, 2).weight.device.type == "cpu"
