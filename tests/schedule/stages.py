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


@dataclass
class Stage:
    """What the ranks of one stage hold."""

    slots: dict[int, Mirror] = field(default_factory=dict)
    """`tokens` are those that passed through this stage, position by position."""
    known: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that came with each registration."""
    cache: dict[tuple[int, int], tuple[Mirror, int]] = field(default_factory=dict)
    """(page, offset) to whose KV of which token is there."""
    inbox: deque[tuple[StepPlan, list[list[int]]]] = field(default_factory=deque)
    """Plans to run, each with the tokens of its rows as the stage before passed them on."""

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.free:
            del self.slots[slot], self.known[slot]
        for register in plan.register:
            self._register(register)
        for slot, page in unpack(plan.pages, 2).tolist():
            owners = [s for s, mirror in self.slots.items() if page in mirror.pages]
            assert not owners, f"page {page} has two owners"
            self.slots[slot].pages.append(page)

    def _register(self, register: Register) -> None:
        assert register.slot not in self.slots, f"slot {register.slot} begins a second life"
        tokens = unpack(register.tokens).tolist()
        self.slots[register.slot] = Mirror([], len(tokens), register.num_prompt, register.sampler)
        self.known[register.slot] = tokens

    def compute(self, slot: int, start: int, tokens: list[int], page_size: int) -> list[int]:
        """Write the row's KV; read back all of the request up to the row's end."""
        mirror = self.slots[slot]
        assert start == len(mirror.tokens), "positions follow each other, each computed once"
        mirror.tokens += tokens
        end = len(mirror.tokens)
        assert end <= len(mirror.pages) * page_size, "a row outside the request's pages"
        for i in range(start, end):
            self.cache[mirror.pages[i // page_size], i % page_size] = (mirror, mirror.tokens[i])
        read = [self.cache[mirror.pages[i // page_size], i % page_size] for i in range(end)]
        assert all(owner is mirror for owner, _ in read), "another request wrote into these pages"
        history = [token for _, token in read]
        assert history == mirror.tokens
        return history


class Stages:
    """`execute` hands plans to stage 0, `advance` lets one stage run its next plan, if it can."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.stages = [Stage() for _ in range(config.num_stages)]
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
        done = Executed(plan, 0, 0, num_tokens, StepResult(plan.plan_id, b""), [])
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
        histories = [
            stage.compute(slot, start, tokens, self.config.page_size)
            for (slot, start, *_), tokens in zip(rows, passed, strict=True)
        ]
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
        known = stage.known[slot]
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
                known = last.known[slot]
                entries = [logprobs_of(history[: i + 1], known[i + 1]) for i in range(start, stop)]
                if entries:
                    prompt_logprobs[index] = entries
            if samples:
                token = next_token(history, mirror.sampler, mirror.num_prompt)
                if mirror.sampler.logprobs is not None:
                    logprobs[len(tokens)] = logprobs_of(history, token)
                tokens[slot] = token
        self.feedback.append((plan.plan_id, tokens))
        self.results.append(StepResult(plan.plan_id, pack(list(tokens.values())), logprobs, prompt_logprobs))
