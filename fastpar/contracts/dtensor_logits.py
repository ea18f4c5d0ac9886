"""Logits that come as a DTensor, split over the vocabulary: what an op computes with, and its result's way back.

A vocabulary-parallel head marks its output as torch's loss_parallel expects it: a DTensor with Shard(-1) over the group
of the head. Ops take this rank's columns out of it, differentiably, and the group and the range from its placements.
What is split over the vocabulary in the same way goes back as a DTensor; everything else is a plain tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from fastpar.comm import GroupLike

VocabRange = tuple[int, int, int]


def unwrap(
    logits: Tensor, group: GroupLike, vocab_range: VocabRange | None
) -> tuple[Tensor, GroupLike, VocabRange | None]:
    """This rank's columns, their group and their range: of a DTensor as its placements say, else as they are given.

    The last dim is split by one dim of the mesh, or whole on every rank. Other dims of the mesh may replicate, or split
    rows where one splits the vocabulary; what follows is then about this rank's rows. A group and a range that the
    caller gives as well have to be those of the DTensor.
    """
    if not hasattr(logits, "device_mesh"):
        return logits, group, vocab_range
    source = cast("DTensor", logits)
    dim = _vocab_dim(source)
    _check_group(source, dim, group)
    local: Tensor = source.to_local()
    total = source.shape[-1]
    own = (0, total, total) if dim is None else _own_range(source, dim)
    if local.shape[-1] != own[1] - own[0]:
        raise ValueError(
            f"logits hold {local.shape[-1]} columns on this rank, but Shard(-1) of {total} ids gives it "
            f"[{own[0]}, {own[1]}): pass the local tensor with group and vocab_range instead of a DTensor"
        )
    if vocab_range is not None and tuple(vocab_range) != own:
        raise ValueError(f"vocab_range is {vocab_range}, but the DTensor logits hold {own} on this rank: leave it out")
    if dim is None:
        return local, None, None
    return local, source.device_mesh.get_group(dim) if group is None else group, own


def placed_like(logits: Tensor, out: Tensor) -> Tensor:
    """`out`, which has this rank's columns of `logits`' shape, as a DTensor where `logits` is one; differentiable."""
    if not hasattr(logits, "device_mesh"):
        return out
    from torch.distributed.tensor import DTensor

    source = cast(DTensor, logits)
    stride, elements = [], 1
    for size in reversed(source.shape):
        stride.append(elements)
        elements *= max(size, 1)
    return DTensor.from_local(
        out, source.device_mesh, source.placements, run_check=False, shape=source.shape, stride=tuple(reversed(stride))
    )


def local_tensor(x: Tensor, name: str) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    if not hasattr(x, "device_mesh"):
        return x
    source = cast("DTensor", x)
    if any(p.is_partial() for p in source.placements):
        raise ValueError(f"{name} that is a partial sum has to be reduced first, got placements {source.placements}")
    return source.to_local()


def check_same_group(group: GroupLike, mesh: Any, dim: int, name: str) -> None:
    """ValueError unless `group` has the ranks of `dim` of the mesh that `name` lies on."""
    given, own = _ranks(group), _ranks(mesh.get_group(dim))
    if given != own and max(len(given), len(own)) > 1:
        raise ValueError(
            f"group has the ranks {given}, but {name} is a DTensor that ranks {own} share: leave group out, or pass "
            "the group of its device mesh"
        )


def _vocab_dim(source: DTensor) -> int | None:
    """The dim of the mesh that splits the vocabulary, None where every rank has all of it."""
    if source.dim() == 0:
        raise ValueError("logits must have at least one dim, the vocabulary, got a scalar")
    if any(p.is_partial() for p in source.placements):
        raise ValueError(f"logits that are partial sums have to be reduced first, got placements {source.placements}")
    if source.device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in the device mesh of the logits, {source.device_mesh}")
    last = source.dim() - 1
    dims = [i for i, p in enumerate(source.placements) if p.is_shard(last) or p.is_shard(-1)]
    rest = [p for i, p in enumerate(source.placements) if i not in dims and not p.is_replicate()]
    if len(dims) > 1:
        raise ValueError(f"the vocabulary may be split over one dim of the mesh, got placements {source.placements}")
    if rest and (not dims or not all(p.is_shard() for p in rest)):
        raise ValueError(
            f"logits that are a DTensor must be split over the vocabulary, Shard(-1), or whole, Replicate(); got "
            f"placements {source.placements}: redistribute them, or pass this rank's rows as logits.to_local()"
        )
    return dims[0] if dims else None


def _check_group(source: DTensor, dim: int | None, group: GroupLike) -> None:
    if group is None:
        return
    if dim is not None:
        return check_same_group(group, source.device_mesh, dim, "logits")
    # Whole on every rank: the group is that of a dim that replicates, and nothing is left to exchange.
    ranks = _ranks(group)
    if len(ranks) > 1 and all(ranks != _ranks(g) for g in source.device_mesh.get_all_groups()):
        raise ValueError(f"group has the ranks {ranks}, which are those of no dim of the logits' {source.device_mesh}")


def _own_range(source: DTensor, dim: int) -> VocabRange:
    from fastpar.comm import shard_range

    mesh, total = source.device_mesh, source.shape[-1]
    return (*shard_range(total, mesh.size(dim), mesh.get_local_rank(dim)), total)


def _ranks(group: GroupLike) -> list[int]:
    """Global ranks of a group; [] for a Communicator of nobody else."""
    import torch.distributed as dist

    from fastpar.comm import Communicator

    group = group.group if isinstance(group, Communicator) else Communicator(group).group
    return [] if group is None else dist.get_process_group_ranks(group)
