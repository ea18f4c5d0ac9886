"""The states of torch's generators on all ranks: what dropout, fastpar's own included, draws its numbers from."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from typing import Any

import torch

from fastpar.assembly.report import mesh_rank
from fastpar.comm import Communicator
from fastpar.layouts import Layout
from fastpar.mesh import DENSE_DIMS, Mesh

_log = logging.getLogger("fastpar.assemble")


def random_states(mesh: Mesh, layout: Layout) -> str:
    """The states of all ranks, equal ones once, as JSON: one value for a checkpoint, the same on every rank, whose size
    is not compared with that of other layouts. Collective: an all-gather of a rank's state along each dim."""
    own = torch.get_rng_state()
    if mesh.device_type == "cuda":
        own = torch.cat([own, torch.cuda.get_rng_state()])
    rows = own[None].to(mesh.device_type)
    for dim in reversed(DENSE_DIMS):  # the innermost first, so that rows come in the order of ranks
        if mesh.size(dim) > 1:
            rows = Communicator(mesh.group(dim)).all_gather(rows)
    states = [bytes(row) for row in rows.cpu().numpy()]
    different = list(dict.fromkeys(states))
    return json.dumps(
        {
            "layout": _key(mesh, layout),
            "of_rank": [different.index(state) for state in states],
            "states": [base64.b64encode(zlib.compress(state)).decode() for state in different],
        }
    )


def restore_random_states(mesh: Mesh, layout: Layout, saved: str) -> None:
    """Go on from what `random_states` gave: see `Assembled.load_state`."""
    said: dict[str, Any] = json.loads(saved)
    states = [zlib.decompress(base64.b64decode(state)) for state in said["states"]]
    is_alike = len(states) == 1 and said["layout"].split()[0] == mesh.device_type
    if said["layout"] == _key(mesh, layout) or is_alike:
        state = states[0 if is_alike else said["of_rank"][mesh_rank(mesh)]]
        own = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        host = len(torch.get_rng_state())
        torch.set_rng_state(own[:host].clone())
        if mesh.device_type == "cuda":
            torch.cuda.set_rng_state(own[host:].clone())
        return
    seed = zlib.crc32(b"".join(states))
    _log.warning(
        "the states of random generators are those of the layout %s, whose ranks had different ones, and this is %s: "
        "all ranks are seeded with %d",
        said["layout"],
        _key(mesh, layout),
        seed,
    )
    torch.manual_seed(seed)


def _key(mesh: Mesh, layout: Layout) -> str:
    return f"{mesh.device_type} {layout.words}"
