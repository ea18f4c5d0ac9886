"""The ranks of a job as a grid with named dims, over torch's DeviceMesh.

    mesh = init_mesh(dp_shard=2, tp=2)          # under torchrun --nproc-per-node 4
    mesh.group("tp"), mesh.size("tp"), mesh.rank("tp"), mesh["tp"]

Views of the same ranks, slowest dim first:

    dense   ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    expert  ("pp", "dp_replicate", "efsdp", "ep", "etp")     efsdp * ep * etp == dp_shard * cp * tp
    grid    ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "tp_d", "tp_z")     with `tp_grid`; see `GridSpec`

so the ranks of an expert group are neighbours: first those of one tp group, then of cp, then of dp_shard. etp splits
every expert, ep the set of them, and efsdp holds copies: how experts are laid out does not follow from tp. Derived
names, flattened: "dp" is dp_replicate x dp_shard; "fsdp" is dp_shard x cp, the ranks that parameters are sharded over;
"dp_cp" is dp_replicate x dp_shard x cp, all ranks with the same parameters; "cp_tp" is cp x tp, the ranks that share
the tokens of a sequence under sequence parallelism; "edp" is dp_replicate x efsdp, the ranks with the same part of the
experts.

Decided: every group is made in `init_mesh`, when all ranks are known to be present. Making a group is itself a
collective of the whole job; made on first use, it would hang whenever only some ranks use it. Dims of one rank get no
real group (`fastpar.mesh.one_rank`), the expert view costs nothing while ep == etp == 1, and dims are flattened only
where several of them are larger than 1.
"""

from fastpar.mesh.grid import DENSE_DIMS, EXPERT_DIMS, GRID_DIMS, Mesh, init_mesh, named_groups
from fastpar.mesh.rendezvous import RendezvousError, RendezvousTimeoutError
from fastpar.mesh.tensor_grid import GridSpec

__all__ = [
    "DENSE_DIMS",
    "EXPERT_DIMS",
    "GRID_DIMS",
    "GridSpec",
    "Mesh",
    "RendezvousError",
    "RendezvousTimeoutError",
    "init_mesh",
    "named_groups",
]
