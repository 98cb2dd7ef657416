"""The frame all decoder models share: embedding, a stage's layers under their global indices, final norm and head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.embedding import Embedding, Head
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rope, Rotary
from headrace.spec import LayerSpec, MlaSpec


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. Residual sums are left to the norm that follows: no pass of their own."""

    def __init__(self, build: Build, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = RMSNorm(build, build.spec.hidden)
        self.attention = attention
        self.post_norm = RMSNorm(build, build.spec.hidden)
        self.mlp = mlp

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, batch: Batch, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, what is still to be added to it) in and out."""
        h_TD, x_TD = self.input_norm.add(x_TD, delta_TD)
        h_TD, x_TD = self.post_norm.add(x_TD, self.attention(h_TD, batch, rope))
        return x_TD, self.mlp(h_TD, batch)


class Decoder(nn.Module):
    """One stage of a decoder."""

    def __init__(self, build: Build, make_layer: Callable[[Build, LayerSpec], DecoderLayer]) -> None:
        super().__init__()
        self.embedding = Embedding(build) if build.first else None
        self.rotary = Rotary(build)
        self.layers = nn.ModuleDict({str(i): make_layer(build, build.spec.layers[i]) for i in build.layers})
        self.norm = RMSNorm(build, build.spec.hidden) if build.last else None
        self.has_latent_cache = any(isinstance(build.spec.layers[i].attention, MlaSpec) for i in build.layers)
        self.head = Head(build, self.embedding if build.spec.tied else None) if build.last else None
        self._final_layers: set[int] = set()

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """ids_T on the first stage, hidden states x_TD elsewhere -> hidden states x_TD, before the final norm."""
        if self.embedding is not None:
            x = self.embedding(x)
        rope = self.rotary.tables
        delta = None
        for layer in self.layers.values():
            x, delta = layer(x, delta, batch, rope)
        return x if delta is None else x + delta

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Final norm and head, for the rows that need them: [T, vocab]."""
        assert self.norm is not None and self.head is not None
        y: torch.Tensor = self.head(self.norm(x_TD))
        return y

    def finalise_layer(self, index: int) -> None:
        """Let a layer take its final form once its weights are there, while others are still loading."""
        _finalise(self.layers[str(index)])
        self._final_layers.add(index)

    def finalise(self) -> None:
        """Let every module that has not yet taken its final form do so; all weights are loaded."""
        for name, child in self.named_children():
            if name != "layers":
                _finalise(child)
        for index in self.layers:
            if int(index) not in self._final_layers:
                self.finalise_layer(int(index))


def _finalise(root: nn.Module) -> None:
    """Parents before their children."""
    pending = [root]
    while pending:
        module = pending.pop()
        finalise = getattr(module, "finalise", None)
        if finalise is not None:
            finalise()
        pending.extend(module.children())
