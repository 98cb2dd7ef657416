"""What a worker knows of every slot, built up from the deltas of plans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.step import Int32Array, Register, SamplerSpec, StepPlan, unpack


class Mirror:
    """Page tables, known tokens and sampling parameters by slot. Plans are applied strictly in order."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.page_table: Int32Array = np.zeros((num_slots, max_pages), dtype=np.int32)
        """[slot, n-th page of the request]; entries past `num_pages` are stale but valid ids."""
        self.num_pages: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.known: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """Tokens that came with the registration; positions from here on are sampled ones."""
        self.tokens: list[Int32Array | None] = [None] * num_slots
        self.num_prompt: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.samplers: list[SamplerSpec | None] = [None] * num_slots
        self.changed: npt.NDArray[np.int64] = np.zeros((0, 2), dtype=np.int64)
        """(slot, n-th page) of the entries that the last plan added to the page table."""
        self._last_plan = -1

    def apply(self, plan: StepPlan) -> list[Register]:
        """Take in a plan's deltas; returns the registrations for whoever keeps more by slot."""
        assert plan.plan_id > self._last_plan, f"plan {plan.plan_id} after {self._last_plan}"
        self._last_plan = plan.plan_id
        for slot in plan.free:
            assert self.tokens[slot] is not None, f"slot {slot} freed twice"
            self.tokens[slot] = self.samplers[slot] = None
            self.num_pages[slot] = 0
        for new in plan.register:
            assert self.tokens[new.slot] is None, f"slot {new.slot} registered while in use"
            tokens = unpack(new.tokens)
            self.tokens[new.slot] = tokens
            self.known[new.slot] = len(tokens)
            self.num_prompt[new.slot] = new.num_prompt
            self.samplers[new.slot] = new.sampler
        changed = []
        for slot, page in unpack(plan.pages, 2).tolist():
            index = int(self.num_pages[slot])
            self.page_table[slot, index] = page
            self.num_pages[slot] = index + 1
            changed.append((slot, index))
        self.changed = np.array(changed, dtype=np.int64).reshape(-1, 2)
        return plan.register
