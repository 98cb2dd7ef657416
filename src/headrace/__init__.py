"""headrace serves large language models over pipeline, tensor and expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.llm import LLM as LLM
    from headrace.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `headrace --help` and the scheduler never pay for the engine.
    if name == "LLM":
        from headrace.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
