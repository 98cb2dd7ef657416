"""The sampler on the last stage: from logits to tokens, and their log-probabilities.

Randomness is counter-based: the noise of a token depends on its request's seed and its position and on nothing else,
so a text does not depend on load or layout. Shapes: R sampling rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import Fault
from headrace.kernels import sampling
from headrace.kernels.sampling import argmax
from headrace.step import Register, SamplerSpec, TokenLogprobs
from headrace.worker.transfer import download, upload

NUCLEUS_GUESS = 512
"""Most likely tokens looked at first for top_p: nearly always the nucleus is among them, and a sort is spared."""


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[R] numbers in [0, 1), a hash of (seed, position): SplitMix64's finaliser applied twice."""

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        step = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mix(mix(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ step)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass
class _Counts:
    """Token counts of a request that has penalties."""

    prompt: torch.Tensor
    """[V] bool: occurs in the prompt."""
    output: torch.Tensor
    """[V] float32: times generated."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities on their way to the host: valid once the device has come to here."""

    tokens: torch.Tensor
    own: torch.Tensor
    top: torch.Tensor | None
    top_ids: torch.Tensor | None
    num_top: Sequence[int]

    @classmethod
    def of(cls, logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: Sequence[int]) -> Scores:
        """Of the tokens [R], and of the best `num_top` of each row."""
        logprobs = logits_RV.float().log_softmax(-1)
        own = download(logprobs.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1))
        most = max(num_top)
        if not most:
            return cls(download(tokens_R), own, None, None, num_top)
        top = logprobs.topk(most, dim=-1)
        return cls(download(tokens_R), own, download(top.values), download(top.indices), num_top)

    def entries(self) -> list[TokenLogprobs]:
        """One a row, of Python numbers."""
        tokens, own = self.tokens.tolist(), self.own.tolist()
        if self.top is None or self.top_ids is None:
            return [TokenLogprobs(token, value) for token, value in zip(tokens, own, strict=True)]
        best, ids = self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(tokens[r], own[r], ids[r][: self.num_top[r]], best[r][: self.num_top[r]])
            for r in range(len(tokens))
        ]


class Sampled:
    """Tokens on the device; the host reads them once they were fetched and are here."""

    def __init__(self, best_2R: torch.Tensor, logits_RV: torch.Tensor, num_top: dict[int, int]) -> None:
        """best_2R: the tokens, and whether their rows' logits are sound. num_top: by row, how many are scored."""
        self._best, self._logits, self._num_top = best_2R, logits_RV, num_top
        self._scores: Scores | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """[R] int64, on the device."""
        return self._best[0]

    def fetch(self, copies: torch.cuda.Stream | None) -> None:
        """Issue the copies to the host: after the tokens were sent on, for the next step waits for those.

        On a GPU they are made beside the next step, in the stream `copies`, from a copy that stays as it is.
        """
        if self._num_top:
            chosen = upload(np.array(list(self._num_top)), self._best.device)
            self._scores = Scores.of(
                self._logits.index_select(0, chosen), self.tokens.index_select(0, chosen), list(self._num_top.values())
            )
        if copies is None:
            return
        kept = self._best.clone()
        kept.record_stream(copies)
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self._best = download(kept)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_here(self) -> bool:
        """Whether what was fetched can be read, once the stream that fetched it has come to there."""
        return self._copied is None or self._copied.query()

    def finish(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Tokens, and log-probabilities by row where asked for. Raises Fault for logits that are no numbers."""
        tokens, sound = self._best.tolist()
        if not all(sound):
            raise Fault("the model computed a NaN or an infinity: its weights or its dtype do not hold")
        entries = {} if self._scores is None else dict(zip(self._num_top, self._scores.entries(), strict=True))
        return tokens, entries


class Sampler:
    """Sampling parameters by slot, and what penalties need to know of each request's tokens."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._num_prompt = np.zeros(num_slots, dtype=np.int64)
        self._edits = np.zeros(num_slots, dtype=bool)
        """Whether a request's logits are changed before sampling."""
        self._logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._specs: list[SamplerSpec] = [SamplerSpec()] * num_slots
        self._counts: dict[int, _Counts] = {}
        self._one = torch.ones(1, device=device)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        """In which tokens go to the host."""

    def register(self, new: Register, tokens: npt.NDArray[np.int32]) -> None:
        """A slot begins a life with these tokens, `new.num_prompt` of them the prompt."""
        spec, slot = new.sampler, new.slot
        self._specs[slot] = spec
        self._temperature[slot] = spec.temperature
        self._top_k[slot] = max(0, min(spec.top_k, self.vocab_size))
        self._top_p[slot], self._min_p[slot] = spec.top_p, spec.min_p
        self._seed[slot] = np.uint64(spec.seed & (2**64 - 1))
        self._num_prompt[slot] = new.num_prompt
        self._logprobs[slot] = -1 if spec.logprobs is None else spec.logprobs
        penalised = bool(spec.presence_penalty or spec.frequency_penalty or spec.repetition_penalty != 1.0)
        self._edits[slot] = penalised or bool(spec.logit_bias) or spec.min_tokens > 0
        self._counts.pop(slot, None)
        if penalised:
            ids = upload(tokens.astype(np.int64), self.device)
            prompt = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            prompt[ids[: new.num_prompt]] = True
            output = torch.zeros(self.vocab_size, device=self.device)
            generated = ids[new.num_prompt :]
            output.index_add_(0, generated, torch.ones(len(generated), device=self.device))
            self._counts[slot] = _Counts(prompt, output)

    def sample(
        self,
        logits_RV: torch.Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        best_2R: torch.Tensor | None = None,
    ) -> Sampled:
        """Tokens for rows of `slots`, to stand at `positions`. Nothing here waits for the device.

        best_2R: the rows' best tokens and whether their logits are sound, where that is known already.
        """
        edits = bool(self._edits[slots].any())
        drawn = bool((self._temperature[slots] > 0).any())
        best = argmax(logits_RV) if best_2R is None else best_2R
        tokens, sound = best
        if edits or drawn:
            logits = logits_RV
            if edits:
                logits = logits_RV.to(torch.float32, copy=True)
                for row in np.flatnonzero(self._edits[slots]).tolist():
                    self._edit(logits[row], int(slots[row]), int(positions[row]))
                tokens = argmax(logits)[0]
            if drawn:
                tokens = self._draw(logits, tokens, slots, positions)
            best = torch.stack((tokens, sound))
        if self._counts:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._counts:
                    self._counts[slot].output.index_add_(0, tokens[row : row + 1], self._one)
        num_top = self._logprobs[slots]
        scored = np.flatnonzero(num_top >= 0)
        return Sampled(best, logits_RV, dict(zip(scored.tolist(), num_top[scored].tolist(), strict=True)))

    def _edit(self, logits_V: torch.Tensor, slot: int, position: int) -> None:
        """Penalties, biases and the ban on early ends, in place."""
        spec, counts = self._specs[slot], self._counts.get(slot)
        if counts is not None:
            if spec.repetition_penalty != 1.0:
                seen = counts.prompt | (counts.output > 0)
                scaled = torch.where(
                    logits_V > 0, logits_V / spec.repetition_penalty, logits_V * spec.repetition_penalty
                )
                logits_V.copy_(torch.where(seen, scaled, logits_V))
            logits_V -= spec.frequency_penalty * counts.output
            logits_V -= spec.presence_penalty * (counts.output > 0)
        if spec.logit_bias:
            ids = upload(np.array(list(spec.logit_bias)), self.device)
            logits_V[ids] += upload(np.array(list(spec.logit_bias.values()), dtype=np.float32), self.device)
        if position - self._num_prompt[slot] < spec.min_tokens and spec.stop_token_ids:
            logits_V[upload(np.array(spec.stop_token_ids), self.device)] = float("-inf")

    def _draw(
        self,
        logits_RV: torch.Tensor,
        best_R: torch.Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """`best_R`, replaced by a draw in rows with a temperature."""
        temperature, noise = self._temperature[slots], uniform(self._seed[slots], positions)
        if logits_RV.is_cuda:
            floats = np.stack((temperature, self._top_p[slots], self._min_p[slots]))
            heat, top_p, min_p = upload(floats, self.device)
            top_k = upload(self._top_k[slots].astype(np.int32), self.device)
            return sampling.sample(logits_RV, heat, top_k, top_p, min_p, upload(noise, self.device))[0]
        drawn = np.flatnonzero(temperature > 0)
        rows = slots[drawn]
        picked = (logits_RV if len(drawn) == len(slots) else logits_RV[torch.from_numpy(drawn)]).float()
        scale = torch.from_numpy(self._temperature[rows]).unsqueeze(-1)
        # From the best token down: a tiny temperature must not overflow.
        probs = truncate(
            ((picked - picked.amax(-1, keepdim=True)) / scale).softmax(-1),
            torch.from_numpy(self._top_k[rows]),
            torch.from_numpy(self._top_p[rows]),
            torch.from_numpy(self._min_p[rows]),
        )
        tokens = best_R.clone()
        tokens[torch.from_numpy(drawn)] = draw(probs, torch.from_numpy(noise[drawn]))
        return tokens


def truncate(probs_RV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what top-k (0: all), top-p and min-p exclude, each [R]. Always a cut at a value, so ties stay together.

    top-p counts the mass that top-k leaves, as `transformers` does when both are given.
    """
    vocab = probs_RV.shape[-1]
    cut = min_p.unsqueeze(-1) * probs_RV.amax(-1, keepdim=True)
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, vocab)
        largest = probs_RV.topk(min(vocab, int(torch.where(top_k > 0, top_k, 1).max())), dim=-1).values
        kth = largest.gather(-1, (k.clamp(max=largest.shape[-1]) - 1).unsqueeze(-1))
        cut = torch.maximum(cut, torch.where((top_k > 0).unsqueeze(-1), kth, 0.0))
    kept = torch.where(probs_RV >= cut, probs_RV, 0.0)
    if bool((top_p < 1).any()):
        kept = torch.where(kept >= _nucleus_cut(kept, top_p), kept, 0.0)
    return kept


def _nucleus_cut(kept_RV: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[R, 1] probability of the last token that the nucleus needs: the smallest set whose mass reaches top_p."""
    target = top_p.unsqueeze(-1) * kept_RV.sum(-1, keepdim=True)
    size = min(NUCLEUS_GUESS, kept_RV.shape[-1])
    while True:
        best = kept_RV.topk(size, dim=-1).values
        mass = best.cumsum(-1, dtype=torch.float64)
        reached = mass[:, -1:] >= target
        if size == kept_RV.shape[-1] or bool((reached | (top_p.unsqueeze(-1) >= 1)).all()):
            break
        size = kept_RV.shape[-1]
    index = (mass < target).sum(-1, keepdim=True).clamp(max=size - 1)
    return torch.where(top_p.unsqueeze(-1) < 1, best.gather(-1, index), 0.0)


def draw(probs_RV: torch.Tensor, noise_R: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution in vocabulary order: [R] tokens, each of non-zero probability."""
    mass = probs_RV.cumsum(-1, dtype=torch.float64)
    target = noise_R.unsqueeze(-1) * mass[:, -1:]
    found = torch.searchsorted(mass, target, right=True).squeeze(-1)
    return found.clamp_(max=probs_RV.shape[-1] - 1)


def token_logprobs(logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the model's own distribution, whatever the sampling parameters did to it."""
    scores = Scores.of(logits_RV, tokens_R, num_top)
    if logits_RV.is_cuda:
        torch.cuda.current_stream().synchronize()
    return scores.entries()
