"""Workers of several stages, each at its own pace: what one knows comes from plans, its neighbours and the feedback.

Where `FakeExecutor` runs a plan whole as it is made, here stage 0 may be plans ahead of the last one, as on devices.
A token is known to stage 0 only after the last stage sampled it, and to the scheduler only with the result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.schedule import SchedulerConfig
from headrace.step import ROW_WIDTH, Register, StepPlan, StepResult, TokenLogprobs, pack, unpack
from tests.fakes.executor import Executed, Mirror, logprobs_of, next_token
from tests.fakes.memory import Memory


@dataclass
class Stage:
    """What the ranks of one stage hold."""

    page_size: int
    slots: dict[int, Mirror] = field(default_factory=dict)
    """`tokens` are those that came with the registration."""
    memory: Memory = field(init=False)
    inbox: deque[tuple[StepPlan, list[list[int]]]] = field(default_factory=deque)
    """Plans to run, each with the tokens of its rows as the stage before passed them on."""

    def __post_init__(self) -> None:
        self.memory = Memory(self.page_size)

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.free:
            del self.slots[slot]
        for register in plan.register:
            self._register(register)
        for slot, page in unpack(plan.pages, 2).tolist():
            assert page not in self.slots[slot].pages, f"page {page} twice in a request"
            self.slots[slot].pages.append(page)

    def _register(self, register: Register) -> None:
        assert register.slot not in self.slots, f"slot {register.slot} begins a second life"
        tokens = unpack(register.tokens).tolist()
        self.slots[register.slot] = Mirror(tokens, len(tokens), register.num_prompt, register.sampler)

    def compute(self, slot: int, start: int, tokens: list[int]) -> list[int]:
        """Write the row's KV; read back all of the request up to the row's end."""
        mirror, size = self.slots[slot], self.page_size
        assert start >= mirror.num_computed, "each position is computed once"
        if start > mirror.num_computed:
            assert start % size == mirror.num_computed % size == 0, "whole pages are shared"
            assert mirror.sampler.prompt_logprobs is None, "every position's result is wanted"
            assert start < mirror.num_registered, "the last known token is always computed"
        end = mirror.num_computed = start + len(tokens)
        self.memory.write(mirror.pages, start, tokens)
        history = self.memory.read(mirror.pages, end)
        assert history[: mirror.num_registered] == mirror.tokens[:end], "another request wrote into these pages"
        return history


class Stages:
    """`execute` hands plans to stage 0, `advance` lets one stage run its next plan, if it can."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.stages = [Stage(config.page_size) for _ in range(config.num_stages)]
        self.last_token: dict[int, int] = {}
        """Stage 0's table, by slot: kept over lives, as a device would."""
        self.sampled_in: dict[int, int] = {}
        """The plan in which each slot last samples, as far as stage 0 has come."""
        self.feedback: deque[tuple[int, dict[int, int]]] = deque()
        self.fed_back = -1
        """Last plan whose tokens stage 0 has."""
        self.results: deque[StepResult] = deque()
        self.in_flight: deque[Executed] = deque()
        self.executed: list[Executed] = []

    def execute(self, plan: StepPlan) -> Executed:
        """Send a plan; nothing is computed yet."""
        assert plan.plan_id == len(self.executed)
        rows = unpack(plan.rows, ROW_WIDTH)
        assert len(rows), "a plan with nothing to compute"
        assert len(set(rows[:, 0].tolist())) == len(rows), "a slot twice in a plan"
        num_tokens = int(rows[:, 2].sum())
        assert num_tokens <= self.config.chunk
        done = Executed(plan, 0, 0, num_tokens, 0, StepResult(plan.plan_id, b""), [])
        self.executed.append(done)
        self.in_flight.append(done)
        self.stages[0].inbox.append((plan, []))
        return done

    def next_result(self) -> StepResult:
        """The oldest result; the stages run as far as they must."""
        while not self.results:
            assert self.tick(), "no stage can go on"
        self.in_flight.popleft()
        return self.results.popleft()

    def tick(self) -> int:
        """Let every stage run a plan that was there before; how many did."""
        able = [index for index in range(len(self.stages)) if self.is_able(index)]
        return sum([self.advance(index) for index in reversed(able)])

    def is_able(self, index: int) -> bool:
        """Whether a stage has a plan, and the tokens it starts from."""
        stage = self.stages[index]
        if index or not stage.inbox:
            return bool(stage.inbox)
        plan, _ = stage.inbox[0]
        new = {register.slot for register in plan.register}
        old = [row for row in unpack(plan.rows, ROW_WIDTH).tolist() if row[0] not in new]
        sampled = [slot for slot, start, _, _ in old if start >= stage.slots[slot].num_registered]
        return self._take_tokens(max((self.sampled_in[slot] for slot in sampled), default=-1))

    def advance(self, index: int) -> bool:
        """Run the next plan of a stage, if it is able to."""
        if not self.is_able(index):
            return False
        stage = self.stages[index]
        plan, passed = stage.inbox.popleft()
        rows = unpack(plan.rows, ROW_WIDTH).tolist()
        stage.apply(plan)
        if index == 0:
            passed = [self._gather(stage, slot, start, count) for slot, start, count, _ in rows]
            self.sampled_in |= {slot: plan.plan_id for slot, _, _, samples in rows if samples}
        histories = [stage.compute(slot, start, tokens) for (slot, start, *_), tokens in zip(rows, passed, strict=True)]
        if index + 1 < len(self.stages):
            self.stages[index + 1].inbox.append((plan, passed))
        else:
            self._sample(plan, rows, histories)
        return True

    def _take_tokens(self, up_to: int) -> bool:
        while self.feedback and self.fed_back < up_to:
            self.fed_back, tokens = self.feedback.popleft()
            self.last_token |= tokens
        return self.fed_back >= up_to

    def _gather(self, stage: Stage, slot: int, start: int, count: int) -> list[int]:
        known = stage.slots[slot].tokens
        if start < len(known):
            assert start + count <= len(known), "a row of tokens known and sampled"
            return known[start : start + count]
        assert count == 1
        return [self.last_token[slot]]

    def _sample(self, plan: StepPlan, rows: list[list[int]], histories: list[list[int]]) -> None:
        last = self.stages[-1]
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, ((slot, start, count, samples), history) in enumerate(zip(rows, histories, strict=True)):
            mirror = last.slots[slot]
            if mirror.sampler.prompt_logprobs is not None:
                stop = min(start + count, mirror.num_prompt - 1)
                entries = [logprobs_of(history[: i + 1], mirror.tokens[i + 1]) for i in range(start, stop)]
                if entries:
                    prompt_logprobs[index] = entries
            if samples:
                token = next_token(history, mirror.sampler, mirror.num_prompt)
                if mirror.sampler.logprobs is not None:
                    logprobs[len(tokens)] = logprobs_of(history, token)
                tokens[slot] = token
        self.feedback.append((plan.plan_id, tokens))
        self.results.append(StepResult(plan.plan_id, pack(list(tokens.values())), logprobs, prompt_logprobs))
