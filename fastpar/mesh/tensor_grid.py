"""The sizes of a tensor-parallel grid, as data; `fastpar.tensor.grid_linear` computes on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fastpar.arguments import checked, checked_fields


@checked_fields
@dataclass(frozen=True)
class GridSpec:
    """How tensor-parallel ranks share Y [M, N] = X [M, K] W [K, N]: x by y ranks over features, z over tokens.

    Each matrix lies on one face of the grid. Column-parallel linears have K on x and N on y, row-parallel ones K on y
    and N on x, so that the output of one lies where the input of the next has to.

    x, y      ranks that share the features, the one way and the other
    z         ranks that share the tokens; the weights are spread over them and gathered for each product
    spread    what the third axis of an activation does. "rows": it cuts tokens (gather, reduce-scatter). "copy": it has
              copies (all-reduce). "features": it cuts K; every linear then has N on y, and x is 1
    replicas  copies of each weight among the z ranks; their gradients are added. z is a multiple of it
    stream    of spread="features" with y = z / replicas: blocks of K are broadcast one after the other (SUMMA), in the
              place of gathers. The same words in the memory of two blocks, which are 2 / y of what gathers make

    Forms by name, with ranks p: one dim (Megatron-LM) is GridSpec(1, p, 1); Optimus' 2D (Xu et al. 2021,
    arXiv:2104.05343) `summa(q)`, p = q * q; 2.5D (Tesseract, Wang et al. 2021, arXiv:2105.14500) `tesseract(q, d)`,
    p = q * q * d; 3D (Bian et al. 2021, arXiv:2105.14450) `cube(q)`, p = q**3; AxoNN's 4D with data parallelism as the
    fourth (Singh et al. 2023, arXiv:2305.13525) `axonn(x, y, z)`. ZeRO-3 by linears is GridSpec(1, 1, p).

    Raises ValueError for sizes below 1, an unknown spread, replicas that do not divide z, x above 1 with "features",
    and for stream with another spread or other sizes.
    """

    x: int
    y: int
    z: int
    spread: Literal["rows", "copy", "features"] = "rows"
    replicas: int = 1
    stream: bool = False

    def __post_init__(self) -> None:
        for name in ("x", "y", "z", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a grid must be at least 1, got {getattr(self, name)}")
        if self.z % self.replicas:
            raise ValueError(f"replicas must divide z, got {self.replicas} and {self.z}")
        if self.spread == "features" and self.x != 1:
            raise ValueError(f'spread="features" has all features on y, so x must be 1, got {self.x}')
        if self.stream:
            self.check_stream()

    @staticmethod
    @checked(computed=False)
    def summa(q: int, *, stream: bool = False) -> GridSpec:
        """Optimus' layout on q * q ranks: X [M / q, K / q], W [K / q, N / q]. With `stream` its schedule as well."""
        return GridSpec(1, q, q, spread="features", stream=stream)

    @staticmethod
    @checked(computed=False)
    def tesseract(q: int, d: int, *, stream: bool = False) -> GridSpec:
        """2.5D on q * q * d ranks: `summa(q)` on each of d layers that share the tokens and have the same weights."""
        return GridSpec(1, q, q * d, spread="features", replicas=d, stream=stream)

    @staticmethod
    @checked(computed=False)
    def cube(q: int) -> GridSpec:
        """3D on q**3 ranks."""
        return GridSpec(q, q, q)

    @staticmethod
    @checked(computed=False)
    def axonn(x: int, y: int, z: int) -> GridSpec:
        """AxoNN's: activations are copied over the axis that does not cut them."""
        return GridSpec(x, y, z, spread="copy")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the mesh dims tp_x, tp_y, tp_d (copies of the weights) and tp_z (what weights are spread over)."""
        return self.x, self.y, self.replicas, self.z // self.replicas

    @property
    def ranks(self) -> int:
        """x * y * z."""
        return self.x * self.y * self.z

    def check_stream(self) -> None:
        """ValueError unless blocks of K can be broadcast one after the other, with the grids on which they can."""
        inner = self.z // self.replicas
        if self.spread == "features" and self.y == inner:
            return
        if self.spread != "features":
            reason = f"stream=True broadcasts blocks of K, which spread={self.spread!r} does not cut over y"
        else:
            copies = f" / replicas ({self.z} / {self.replicas})" if self.replicas > 1 else ""
            reason = f"stream=True needs y == z{copies}, blocks of K cut alike, got {self.y} and {inner}"
        squares = [q for q in range(2, self.ranks + 1) if self.ranks % (q * q) == 0]
        names = [f"tesseract({q}, {d})" if (d := self.ranks // (q * q)) > 1 else f"summa({q})" for q in squares]
        found = (
            f"grids of {self.ranks} ranks that work: {', '.join(names)}"
            if names
            else (f"{self.ranks} ranks form no grid of q * q * d with q > 1")
        )
        raise ValueError(f"{reason}; {found}; or leave stream out")

    @checked(computed=False)
    def check_ranks(self, tp: int) -> None:
        """ValueError unless the grid has `tp` ranks, with grids that have."""
        if self.ranks != tp:
            raise ValueError(
                f"tp_grid ({self.x}, {self.y}, {self.z}) has {self.ranks} ranks, but tp is {tp}: "
                f"for instance {', '.join(map(str, _near(self, tp)))}"
            )


def _near(spec: GridSpec, ranks: int) -> list[tuple[int, int, int]]:
    """Up to three factorisations of `ranks` whose sizes are nearest to those of the grid."""
    found = [
        (x, y, ranks // (x * y))
        for x in range(1, ranks + 1)
        if ranks % x == 0
        for y in range(1, ranks // x + 1)
        if (ranks // x) % y == 0
    ]
    wanted = (spec.x, spec.y, spec.z)
    distance = {sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, wanted, strict=True)) for sizes in found}
    return sorted(found, key=lambda sizes: (distance[sizes], sizes))[:3]
