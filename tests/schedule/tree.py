"""What must hold of a scheduler's pages and prefix cache at any time."""

from __future__ import annotations

from collections import Counter

from headrace.schedule import Scheduler
from headrace.schedule.prefix import Node


def check_tree(scheduler: Scheduler) -> None:
    """Every page is in one place, held by as many as have it; the tree holds what is needed and nothing else."""
    pool, cache = scheduler._pool, scheduler._prefix
    held = Counter(page for job in scheduler._running for page in job.pages)
    assert [held[page] for page in range(pool.num_pages)] == pool._holders
    assert all(len(set(job.pages)) == len(job.pages) for job in scheduler._running)
    assert sorted([*held, *pool._blank, *pool._kept]) == list(range(pool.num_pages))
    assert scheduler.num_pages_used == len(held)

    nodes = cache._nodes.values()
    found = {node.page: node for node in nodes if node.page >= 0}
    assert found == {page: node for page, node in enumerate(cache._node_of) if node is not None}
    assert found.keys() == {page for page in range(pool.num_pages) if pool._keep[page]} >= pool._kept.keys()
    below = Counter(node.parent for node in nodes)
    below.update(job.node for job in scheduler._running)
    for node in [cache._root, *nodes]:
        assert node.num_below == below[node]
    for (parent, tokens), node in cache._nodes.items():
        assert (node.parent, node.tokens) == (parent, tokens)
        assert node.page >= 0 or node.num_below, "a node that nobody needs"
        assert parent is cache._root or (parent.parent, parent.tokens) in cache._nodes, "a node that cannot be reached"
    for job in scheduler._running:
        path: list[Node] = []
        deepest = job.node
        while deepest is not None and deepest.parent is not None:
            path.append(deepest)
            deepest = deepest.parent
        tokens = (job.request.tokens + b"".join(i.to_bytes(4, "little") for i in job.generated))[: 4 * job.num_known]
        if job.node is not None:
            assert len(path) == job.num_entered
            assert tokens.startswith(b"".join(node.tokens for node in reversed(path)))
