"""The reference of what GPUs compute: the model in float32 in this process, attention by PyTorch, one request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from headrace.config import LayoutConfig
from headrace.layers.build import Build
from headrace.mesh import build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.step import ROW_WIDTH, Register, SamplerSpec, StepPlan, pack, unpack
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.rules import bind
from headrace.weights.source import read_spec, resolve
from headrace.worker.batch import Rows, make_batch
from headrace.worker.cache import KVCache
from headrace.worker.mirror import Mirror
from tests.parity.reference import Written

PAGE_SIZE = 64


class Reference:
    """A whole checkpoint on one device."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, max_len: int = 512
    ) -> None:
        source = resolve(str(folder), say=lambda _: None)
        self.spec = read_spec(source)
        self.device, self.dtype, self.max_len = torch.device(device), dtype, max_len
        self._mesh = build_mesh(LayoutConfig(), self.spec)
        build = Build(
            spec=self.spec,
            layers=range(self.spec.num_layers),
            max_len=max_len,
            dtype=dtype,
            device=self.device,
        )
        self.model = build_model(build)
        checkpoint = Checkpoint(source, self.spec)
        load(checkpoint, bind(self.model, rules_of(self.spec), self.spec, checkpoint.tensors))
        self.model.finalise()

    def __call__(self, ids_1T: torch.Tensor) -> SimpleNamespace:
        """As transformers' models are called: `.logits` is [1, T, V]."""
        tokens = ids_1T[0].tolist()
        with torch.inference_mode():
            return SimpleNamespace(logits=Request(self, tokens).step(0, tokens).cpu().unsqueeze(0))


class Request:
    """One request's cache: positions may be computed in any pieces, and again."""

    def __init__(self, reference: Reference, prompt: Sequence[int]) -> None:
        self._reference = reference
        spec, mesh = reference.spec, reference._mesh
        num_pages = -(-reference.max_len // PAGE_SIZE)
        self._cache = KVCache(spec, mesh.layers_of(0), num_pages, PAGE_SIZE, 1, reference.dtype, reference.device)
        self._mirror = Mirror(1, num_pages)
        pages = pack([value for page in range(num_pages) for value in (0, page)])
        register = [Register(0, pack(prompt), len(prompt), SamplerSpec())]
        self._mirror.apply(StepPlan(0, b"", [], register, pages))
        self._num_steps = 0

    @torch.inference_mode()
    def step(self, start: int, tokens: Sequence[int], last_only: bool = False) -> torch.Tensor:
        """Logits of these tokens, which stand from position `start` on."""
        of = self._reference
        self._num_steps += 1
        rows = Rows.of(unpack(pack([0, start, len(tokens), 1]), ROW_WIDTH))
        ids = torch.tensor(tokens, device=of.device)
        batch = make_batch(self._num_steps, rows, self._mirror, self._cache, PAGE_SIZE, of.device, ids)
        x_TD = of.model(ids, batch)
        return of.model.logits(x_TD[-1:] if last_only else x_TD).float()


def differences(reference: Reference, written: Written) -> torch.Tensor:
    """|log-probability - the reference's| of every token written and of the best tokens named beside it."""
    ids = [*written.prompt, *written.tokens]
    expected = reference(torch.tensor([ids])).logits[0, len(written.prompt) - 1 : -1].log_softmax(-1)
    found = [
        abs(value - float(expected[i, token])) for i, top in enumerate(written.top) for token, value in top.items()
    ]
    own = [abs(value - float(expected[i, written.tokens[i]])) for i, value in enumerate(written.logprobs)]
    return torch.tensor([*own, *found])
