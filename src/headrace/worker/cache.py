"""The KV cache of a stage: pages of its own layers, found through the one global-to-local layer map.

Shapes: N pages, S page size, K local KV heads, D head dim, C latent and rope dims.
"""

from __future__ import annotations

import torch

from headrace.mesh import Mesh
from headrace.spec import DTYPE_BYTES, GqaSpec, ModelSpec


def layer_shape(spec: ModelSpec, layer: int, tp: int) -> tuple[int, ...]:
    """What a token keeps in one layer on one rank: [2, K, D] or [C]. From the spec, never from a buffer."""
    attention = spec.layers[layer].attention
    if isinstance(attention, GqaSpec):
        return (2, max(1, attention.num_kv_heads // tp), attention.head_dim)
    return (attention.kv_values(tp),)


def page_bytes(spec: ModelSpec, mesh: Mesh, stage: int, page_size: int, dtype: str) -> int:
    """Bytes of one page over a stage's layers, on one rank."""
    values = sum(spec.layers[i].attention.kv_values(mesh.tp) for i in mesh.layers_of(stage))
    return values * page_size * DTYPE_BYTES[dtype]


class KVCache:
    """Pages of the layers in `layers` (global indices). Ids are the engine's, the same on every stage."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        num_pages: int,
        page_size: int,
        tp: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not garbage: pages past a request's length are read and masked, and 0 * NaN is NaN.
        self._pages = [
            torch.zeros(num_pages, page_size, *layer_shape(spec, i, tp), dtype=dtype, device=device) for i in layers
        ]
        self._local = {layer: local for local, layer in enumerate(layers)}

    def layer(self, index: int) -> torch.Tensor:
        """A layer's pages by its global index: [N, S, 2, K, D] or [N, S, C]."""
        return self._pages[self._local[index]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.nbytes for pages in self._pages)
