"""The prefix cache: whole pages found again by their tokens and all tokens before them.

A page can be found as soon as a plan that computes it is made: plans run in order on every worker, so who finds it
reads it in that plan or a later one. What is found is what was asked for: tokens are compared, not their hashes.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.schedule.pages import PagePool
from headrace.schedule.request import Job


class Node:
    """A page's worth of tokens, after those of the nodes above it."""

    __slots__ = ("num_below", "page", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = -1
        """What holds their keys and values; -1 where that was given away, and something below it was not."""
        self.num_below = 0
        """Nodes right below, and jobs whose deepest node this is."""


class PrefixCache:
    """A tree of pages over one pool. `Job.node` is the deepest node whose tokens a job has pages of."""

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool) -> None:
        self.pool = PagePool(num_pages, page_size, self._forget)
        self._enabled = enabled
        self._root = Node(None, b"")
        self._nodes: dict[tuple[Node, bytes], Node] = {}
        self._node_of: list[Node | None] = [None] * num_pages
        """By page: whose tokens it is found by."""

    # --- what jobs do -------------------------------------------------------------------------------------------------

    def begin(self, job: Job) -> int:
        """A job begins a life: it takes what is there of its tokens. How many positions that spares it."""
        if not self._enabled:
            return 0
        job.node = self._root
        self._root.num_below += 1
        return self.follow(job)

    def follow(self, job: Job, *, only_held: bool = False) -> int:
        """Take pages that hold what comes next in the job; how many positions that spares it.

        The last known token is always computed, for its result is wanted. Prompt log-probabilities are results of every
        position, so a job that still wants them takes nothing. `only_held`: no free page is taken.
        """
        node, size = job.node, self.pool.page_size
        if node is None or job.num_computed < job.capacity or job.prompt_logprobs is not None:
            return 0
        if job.num_entered < len(job.pages):
            self.enter(job)
        first = index = len(job.pages)
        last = (job.num_tokens - 1) // size
        node = job.node
        assert node is not None
        while index < last:
            found = self._nodes.get((node, job.page_tokens(index, size)))
            if found is None or found.page < 0 or (only_held and not self.pool.is_held(found.page)):
                break
            self.pool.share(found.page)
            job.pages.append(found.page)
            node = found
            index += 1
        if index > first:
            self._move(job, node)
            job.num_entered = index
            job.num_computed = job.capacity = index * size
        return (index - first) * size

    def enter(self, job: Job) -> None:
        """Let others find the job's pages that are full of known tokens, all computed by plans that are made."""
        node, nodes, size = job.node, self._nodes, self.pool.page_size
        if node is None:
            return
        full = min(job.num_known, job.num_computed) // size
        if full <= job.num_entered:
            return
        for index in range(job.num_entered, full):
            tokens = job.page_tokens(index, size)
            key = (node, tokens)
            below = nodes.get(key)
            if below is None:
                below = nodes[key] = Node(node, tokens)
                node.num_below += 1
            if below.page < 0:
                self._hold(below, job.pages[index])
            node = below
        self._move(job, node)
        job.num_entered = full

    def release(self, job: Job) -> None:
        """A job gives up its pages; those that can be found stay until their room is needed, the last go first."""
        self.enter(job)
        node = job.node
        if node is not None:
            for page in reversed(job.pages[: job.num_entered]):
                assert node is not None
                if node.page < 0:  # another request's page held these tokens too, and was given away
                    self._hold(node, page)
                node = node.parent
        self.pool.free(job.pages)
        if job.node is not None:
            job.node.num_below -= 1
            self._prune(job.node)
            job.node = None

    def reset(self, running: Iterable[Job]) -> None:
        """Forget all; `running` jobs keep their pages to themselves for the rest of this life."""
        for job in running:
            job.node = None
        self._root = Node(None, b"")
        self._nodes.clear()
        self._node_of = [None] * self.pool.num_pages
        self.pool.forget_all()

    # --- the tree -----------------------------------------------------------------------------------------------------

    def _hold(self, node: Node, page: int) -> None:
        """Let tokens be found in a page."""
        node.page = page
        self._node_of[page] = node
        self.pool.keep(page)

    def _move(self, job: Job, node: Node) -> None:
        """Make a node below the job's deepest one the deepest."""
        assert job.node is not None
        node.num_below += 1
        job.node.num_below -= 1
        job.node = node

    def _forget(self, page: int) -> None:
        """The pool gives a page away."""
        node = self._node_of[page]
        assert node is not None
        self._node_of[page] = None
        node.page = -1
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Drop a node that has no page and nothing below it, and so on upwards."""
        while node.page < 0 and not node.num_below and node.parent is not None:
            del self._nodes[node.parent, node.tokens]
            node = node.parent
            node.num_below -= 1
