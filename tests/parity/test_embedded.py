"""The embedded model says from three stages what `transformers` does on its file, and makes sense in the fast type."""

from __future__ import annotations

from headrace import LLM, SamplingParams
from headrace.weights.source import resolve
from tests.gguf_files import load_gguf_reference
from tests.parity.reference import check, written_by

QUESTIONS = [
    "What is the capital of France?",
    "Name the planet we live on.",
    "Count from one to five.",
    "Write one sentence about a river.",
]


def test_three_stages_say_what_transformers_says() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    with LLM(pp=3, dtype="float32", device="cpu", max_len=512) as llm:
        answers = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    assert "Paris" in answers[0].text and "Earth" in answers[1].text
    reference = load_gguf_reference(resolve(None, say=lambda _: None).path)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        check(reference, written_by(answer), question)


def test_the_fast_type_answers_too_from_two() -> None:
    with LLM(pp=2, device="cpu", max_len=512) as llm:
        (answer,) = llm.chat(
            [{"role": "user", "content": QUESTIONS[1]}], SamplingParams(temperature=0.0, max_tokens=24)
        )
        assert "Earth" in answer.text and answer.finish_reason == "stop"
