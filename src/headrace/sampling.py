"""What a user asks of sampling: how tokens are chosen, and when a request ends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a request ends. Values are checked by `validate`, which names the field."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in transformers; 1 is none."""
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: one is drawn for the request when it is submitted."""
    logprobs: int | None = None
    """None: none; n: the chosen token's and the n best tokens' log-probabilities, of the model's own distribution."""
    prompt_logprobs: int | None = None
    """The same for every prompt position but the first."""
    max_tokens: int | None = None
    """Most tokens to generate; None: up to the model's length. 0 only with prompt_logprobs or echo."""
    min_tokens: int = 0
    """No stop token is sampled before so many tokens."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts that end the request; never part of the output."""
    stop_token_ids: tuple[int, ...] = ()

    def ending_at(self, token_ids: Sequence[int]) -> SamplingParams:
        """The same with these ids as ends too, unless ignore_eos: a tokenizer may know more ends than the config."""
        if self.ignore_eos or set(token_ids) <= set(self.stop_token_ids):
            return self
        ends = tuple(dict.fromkeys((*self.stop_token_ids, *token_ids)))
        return msgspec.structs.replace(self, stop_token_ids=ends)

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError naming the field whose value cannot be used."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100"),
            ("top_k", self.top_k >= -1, "must be 0 (all), or at least 1"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "must be above 0 and at most 100"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "must fit 64 bits"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must be between 0 and 20"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
                "must be between 0 and 20",
            ),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "must be at least 0"),
            ("min_tokens", self.min_tokens >= 0, "must be at least 0"),
            ("logit_bias", len(self.logit_bias) <= 1024, "holds more than 1024 tokens"),
            (
                "logit_bias",
                all(0 <= t < vocab_size and -100.0 <= b <= 100.0 for t, b in self.logit_bias.items()),
                f"needs token ids under {vocab_size} and values between -100 and 100",
            ),
            ("stop", len(self.stop) <= 16 and all(self.stop), "takes at most 16 non-empty texts"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= 512 and all(0 <= t < vocab_size for t in self.stop_token_ids),
                f"needs at most 512 ids under {vocab_size}",
            ),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                "must not be above max_tokens",
            ),
        )
        for name, good, problem in checks:
            if not good:
                raise ValueError(f"{name}: {problem}")
