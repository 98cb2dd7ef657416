"""A model of all_reduce.cu's protocol for one family of blocks: every order of events in which it may go wrong.

A word of the model is a thread's; a store may arrive at any time after it was made, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Store(NamedTuple):
    """On its way into `target`'s buffer."""

    target: int
    place: tuple[int, int, int]
    """Parity, sender, word."""
    epoch: int


class Rank(NamedTuple):
    """One rank's kernel: what its threads have still to do, and the buffer that others write to."""

    launch: int
    to_send: frozenset[tuple[int, int]]
    """Word and peer; a thread waits when it has sent to all."""
    to_read: frozenset[tuple[int, int]]
    memory: tuple[int, ...]
    """The epoch of each place."""


class State(NamedTuple):
    """Of all ranks, and of the stores under way."""

    ranks: tuple[Rank, ...]
    under_way: frozenset[Store]


class Overwritten(AssertionError):
    """A place was written to before what lay there was read, or twice at once."""


@dataclass(frozen=True)
class Protocol:
    """`sizes`: words of each launch, 1 to `words`. `buffers`: how many take turns."""

    ranks: int
    words: int
    sizes: tuple[int, ...]
    buffers: int = 2

    def start(self) -> State:
        empty = (0,) * (self.buffers * self.ranks * self.words)
        return State(tuple(self._launch(rank, 0, empty) for rank in range(self.ranks)), frozenset())

    def is_over(self, state: State) -> bool:
        return all(rank.launch == len(self.sizes) for rank in state.ranks)

    def moves(self, state: State) -> Iterator[State]:
        """Everything that may happen next. Raises Overwritten."""
        for store in state.under_way:
            yield self._arrive(state, store)
        for index, rank in enumerate(state.ranks):
            busy = {word for word, _ in rank.to_send}
            for word, peer in rank.to_send:
                store = Store(peer, (self._parity(rank.launch), index, word), rank.launch + 1)
                if any(other[:2] == store[:2] for other in state.under_way):
                    raise Overwritten(f"two stores to {store} at once")
                left = rank._replace(to_send=rank.to_send - {(word, peer)})
                yield State(_with(state.ranks, index, left), state.under_way | {store})
            for word, sender in rank.to_read:
                place = self._place((self._parity(rank.launch), sender, word))
                if word not in busy and rank.memory[place] == rank.launch + 1:
                    left = rank._replace(to_read=rank.to_read - {(word, sender)})
                    if not left.to_send and not left.to_read:
                        left = self._launch(index, rank.launch + 1, rank.memory)
                    yield state._replace(ranks=_with(state.ranks, index, left))

    def _launch(self, rank: int, launch: int, memory: tuple[int, ...]) -> Rank:
        size = self.sizes[launch] if launch < len(self.sizes) else 0
        pairs = frozenset((word, peer) for word in range(size) for peer in range(self.ranks) if peer != rank)
        return Rank(launch, pairs, pairs, memory)

    def _arrive(self, state: State, store: Store) -> State:
        rank = state.ranks[store.target]
        _, sender, word = store.place
        there = rank.memory[self._place(store.place)]
        unread = rank.launch < there - 1 or (rank.launch == there - 1 and (word, sender) in rank.to_read)
        if unread:
            raise Overwritten(f"epoch {there} by {store} in launch {rank.launch}")
        memory = list(rank.memory)
        memory[self._place(store.place)] = store.epoch
        ranks = _with(state.ranks, store.target, rank._replace(memory=tuple(memory)))
        return State(ranks, state.under_way - {store})

    def _parity(self, launch: int) -> int:
        return launch % self.buffers

    def _place(self, place: tuple[int, int, int]) -> int:
        parity, sender, word = place
        return (parity * self.ranks + sender) * self.words + word


def _with(ranks: tuple[Rank, ...], index: int, rank: Rank) -> tuple[Rank, ...]:
    return (*ranks[:index], rank, *ranks[index + 1 :])
