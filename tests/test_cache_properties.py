"""Any sequence of calls, any selections: the right bytes at every slot, the misses of textbook replacement."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from hisparse.admission import CacheRequest, State
from hisparse.cache import HierarchicalCache
from hisparse.errors import CapacityError
from hisparse.layout import PAGE_RECORDS, CacheLayout
from hisparse.ranking import Ranking
from hisparse.selection_state import SelectionState
from tests.oracle import LayerOracle

LAYERS = 2
RECORD_BYTES = 32
SHAPES = ("everything", "same", "churn", "one", "newest only", "random", "nothing")


class CacheMachine(RuleBasedStateMachine):
    """Drives a small cache and the oracle side by side."""

    policy = "lru"
    device = "cpu"

    @initialize(
        top_k=st.integers(1, 40),
        slack=st.integers(1, 40),
        max_requests=st.integers(1, 4),
        extra_slots=st.sampled_from([0, 0, 1, 100]),
        shared=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def build(self, top_k: int, slack: int, max_requests: int, extra_slots: int, shared: bool, seed: int) -> None:
        buffer = top_k + slack
        layout = CacheLayout(
            num_layers=LAYERS,
            record_bytes=RECORD_BYTES,
            top_k=top_k,
            device_buffer_size=buffer,
            max_requests=max_requests,
            num_pages=8,
            num_slots=max_requests * buffer + extra_slots,
            anchors=(0, 0) if shared else (0, 1),
        )
        state = SelectionState(
            num_layers=LAYERS,
            num_pages=8,
            page_shape=(3,),
            dtype=torch.float32,
            max_requests=max_requests,
            max_pages=layout.max_pages,
            device=self.device,
        )
        self.cache = HierarchicalCache(
            layout, policy=self.policy, device=self.device, selection_state=state, debug=True
        )
        self.anchors = layout.anchors
        self.oracle = [LayerOracle(layout.num_slots, self.policy) for _ in layout.groups]
        self.bytes: dict[tuple[CacheRequest, int, int], Tensor] = {}  # (request, position, layer) -> record
        self.state: dict[CacheRequest, Tensor] = {}
        self.last: dict[tuple[CacheRequest, int], list[int]] = {}  # (request, layer) -> its last selection
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)

    # Choosing

    def pick(self, state: State) -> CacheRequest | None:
        requests = [request for request in self.cache.requests if request.state is state]
        return self.random.choice(requests) if requests else None

    def record(self, count: int) -> Tensor:
        records = torch.randint(0, 256, (count, RECORD_BYTES), dtype=torch.uint8, generator=self.torch_random)
        return records.to(self.device)

    def row(self, request: CacheRequest, position: int) -> int:
        return request.pages[position // PAGE_RECORDS] * PAGE_RECORDS + position % PAGE_RECORDS

    def choose(self, shape: str, request: CacheRequest, layer: int, length: int) -> list[int]:
        """Positions of one request; `length` counts the newest."""
        k = self.cache.layout.top_k
        last = [p for p in self.last.get((request, layer), []) if p < length]
        choices: dict[str, Callable[[], list[int]]] = {
            "everything": lambda: list(range(max(0, length - k), length)),
            "same": lambda: last[:k],
            "churn": lambda: [p for p in range(length) if p not in last][:k],
            "one": lambda: [self.random.randrange(length)],
            "newest only": lambda: [length - 1],
            "random": lambda: self.random.sample(range(length), min(self.random.randint(0, k), length)),
            "nothing": lambda: [],
        }
        return choices[shape]()

    # Rules

    @rule(positions=st.integers(1, 4 * PAGE_RECORDS), share=st.booleans())
    def admit(self, positions: int, share: bool) -> None:
        prefix = None
        donor = self.pick(State.ACTIVE)
        if share and donor is not None and donor.length >= PAGE_RECORDS and positions > PAGE_RECORDS:
            whole = min(donor.length, positions - 1) // PAGE_RECORDS * PAGE_RECORDS
            prefix = (donor, whole)
        before = [list(request.pages) for request in self.cache.requests]
        try:
            request = self.cache.admit(positions, prefix=prefix)
        except CapacityError:
            assert before == [request.pages for request in self.cache.requests]
            return
        if prefix is not None:
            for position in range(prefix[1]):
                for layer in range(LAYERS):
                    self.bytes[request, position, layer] = self.bytes[prefix[0], position, layer]
        self.remember_state(request)

    def remember_state(self, request: CacheRequest) -> None:
        """Give the pages that only this request holds a recognisable selection state."""
        state = self.cache.selection_state
        assert state is not None
        own = state.pages.held_once(request.state_pages)
        state.data[:, own] = torch.rand(LAYERS, len(own), 3, generator=self.torch_random).to(self.device)
        self.state[request] = state.data[:, request.state_pages].clone()

    @rule(count=st.integers(1, 150))
    def stage(self, count: int) -> None:
        request = self.pick(State.ACTIVE)
        if request is None or request.length == request.capacity:
            return
        start = request.length
        count = min(count, request.capacity - start)
        rows = [self.row(request, start + i) for i in range(count)]
        for layer in range(LAYERS):
            records = self.record(count)
            self.cache.stage(layer, request, start, records)  # its own moment, before the next step
            if self.anchors[layer] == layer:
                self.oracle[layer].stage(rows, self.cache.backend.step_number)
            for i in range(count):
                self.bytes[request, start + i, layer] = records[i]
        assert request.length == start + count

    @rule(shapes=st.lists(st.sampled_from(SHAPES), min_size=LAYERS, max_size=LAYERS), data=st.data())
    def step(self, shapes: list[str], data: st.DataObject) -> None:
        ready = [r for r in self.cache.requests if r.state is State.ACTIVE and r.length < r.capacity]
        requests = [request for request in ready if data.draw(st.booleans())] or ready[:1]
        if not requests:
            return
        lengths = [request.length + 1 for request in requests]
        with self.cache.step(requests) as step:
            now = self.cache.backend.step_number
            new_rows = [self.row(r, n - 1) for r, n in zip(requests, lengths, strict=True)]
            assert step.rows.tolist() == new_rows
            for layer, shape in enumerate(shapes):
                if self.anchors[layer] == layer:
                    selection = self.step_layer(layer, shape, requests, lengths, new_rows, now)
                else:
                    self.step_shared_layer(layer, requests, lengths, selection)

    def step_layer(
        self,
        layer: int,
        shape: str,
        requests: list[CacheRequest],
        lengths: list[int],
        new_rows: list[int],
        now: int,
    ) -> Tensor:
        oracle = self.oracle[layer]
        oracle.insert(new_rows, now)
        records = self.record(len(requests))
        self.cache.append(layer, records)
        selection = torch.full((len(requests), self.cache.layout.top_k), -1, dtype=torch.int32)
        rows = []
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            self.bytes[request, length - 1, layer] = records[i]
            chosen = self.choose(shape, request, layer, length)
            places = self.random.sample(range(selection.shape[1]), len(chosen))  # pads anywhere
            for place, position in zip(places, chosen, strict=True):
                selection[i, place] = position
            self.last[request, layer] = chosen
            rows += [self.row(request, position) for position in chosen]
        slots = self.cache.resolve(layer, selection.to(self.device), partial(self.best, lengths)).cpu()
        oracle.resolve(rows, now)
        self.check_slots(layer, requests, selection, slots)
        return selection

    def best(self, lengths: list[int], count: int) -> Ranking:
        """Any distinct positions of each request."""
        positions = torch.full((len(lengths), count), -1, dtype=torch.int32)
        for line, length in enumerate(lengths):
            chosen = self.random.sample(range(length), min(count, length))
            positions[line, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return Ranking(positions.to(self.device), torch.zeros(positions.shape, device=self.device))

    def step_shared_layer(
        self, layer: int, requests: list[CacheRequest], lengths: list[int], selection: Tensor
    ) -> None:
        records = self.record(len(requests))
        self.cache.append(layer, records)
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            self.bytes[request, length - 1, layer] = records[i]
        self.check_slots(layer, requests, selection, self.cache.follow(layer).cpu())

    def check_slots(self, layer: int, requests: list[CacheRequest], selection: Tensor, slots: Tensor) -> None:
        assert torch.equal(slots < 0, selection < 0)
        pool = self.cache.records(layer)
        for request, positions, places in zip(requests, selection.tolist(), slots.tolist(), strict=True):
            for position, slot in zip(positions, places, strict=True):
                if position >= 0:
                    assert torch.equal(pool[slot], self.bytes[request, position, layer])

    @rule(share=st.floats(0, 1))
    def seed(self, share: float) -> None:
        request = self.pick(State.ACTIVE)
        if request is None or not request.length:
            return
        layout, before = self.cache.layout, self.cache.backend.step_number
        most = min(layout.device_buffer_size, request.length)
        best = {anchor: self.random.sample(range(request.length), round(share * most)) for anchor in set(self.anchors)}
        positions = {anchor: torch.tensor(chosen, dtype=torch.int32) for anchor, chosen in best.items()}
        self.cache.seed(request, {anchor: chosen.to(self.device) for anchor, chosen in positions.items()})
        for anchor, chosen in best.items():
            rows = [self.row(request, position) for position in chosen]
            pieces = [rows[start : start + layout.top_k] for start in range(0, len(rows), layout.top_k)]
            for moment, piece in enumerate(reversed(pieces), start=before + 1):
                self.oracle[anchor].resolve(piece, moment)
            slots = self.cache.device_pool.layer(anchor).slot_of_row[rows].cpu()
            is_exact = self.policy == "lru" and self.device == "cpu"  # else some may leave for better ones
            certain = slice(None) if is_exact else slice(layout.top_k)
            assert (slots[certain] >= 0).all()
            there = positions[anchor].masked_fill(slots < 0, -1)
            for layer in range(LAYERS):
                if self.anchors[layer] == anchor:
                    self.check_slots(layer, [request], there[None], slots[None])

    @rule()
    def step_that_fails(self) -> None:
        request = self.pick(State.ACTIVE)
        if request is None or request.length == request.capacity:
            return
        length = request.length
        with pytest.raises(RuntimeError, match="the model broke"):
            self.break_in_a_step(request)
        for oracle in self.oracle:
            oracle.insert([self.row(request, length)], self.cache.backend.step_number)
            oracle.forget([self.row(request, length)])
        assert request.length == length

    def break_in_a_step(self, request: CacheRequest) -> None:
        with self.cache.step([request]):
            raise RuntimeError("the model broke")

    @rule()
    def retract(self) -> None:
        request = self.pick(State.ACTIVE)
        if request is None:
            return
        self.forget(request)
        self.cache.retract(request)

    @rule()
    def resume(self) -> None:
        request = self.pick(State.RETRACTED)
        if request is None:
            return
        try:
            self.cache.resume(request)
        except CapacityError:
            assert request.state is State.RETRACTED
            return
        state = self.cache.selection_state
        assert state is not None
        assert torch.equal(state.data[:, request.state_pages], self.state[request])

    @rule(retracted=st.booleans())
    def retire(self, retracted: bool) -> None:
        request = self.pick(State.RETRACTED if retracted else State.ACTIVE)
        if request is None:
            return
        self.forget(request)
        self.cache.retire(request)

    def forget(self, request: CacheRequest) -> None:
        own = self.cache.host_pool.pages.held_once(request.pages)
        for oracle in self.oracle:
            oracle.forget([page * PAGE_RECORDS + i for page in own for i in range(PAGE_RECORDS)])

    @precondition(lambda self: self.cache.backend.step_number > 0)
    @rule()
    def near_the_stamp_limit(self) -> None:
        """Renumber as the cache does just before int32 overflows; the order of eviction must not change."""
        self.cache.backend.step_number = self.cache.device_pool.rebase_stamps()
        for oracle in self.oracle:  # the oracle keeps its own times: shift them below the new count
            for times in (oracle.used, oracle.entered):
                ranks = {time: i for i, time in enumerate(sorted(set(times.values())))}
                for row in times:
                    times[row] = (ranks[times[row]] - len(ranks), 0)

    # What must hold after every call

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for layer, oracle in enumerate(self.oracle):
            resident = self.cache.device_pool.layer(layer).row_of_slot
            assert sorted(resident[resident >= 0].tolist()) == sorted(oracle.used)
            assert int(self.cache.device_pool.counters.misses[layer]) == oracle.misses


class FifoMachine(CacheMachine):
    policy = "fifo"


class BytesMachine(CacheMachine):
    """Bytes and integrity at every step; the oracle's replacement is not followed slot by slot."""

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()


class TierMachine(BytesMachine):
    policy = "two_rate_tier"


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("machine", [CacheMachine, FifoMachine, TierMachine])
def test_any_sequence_of_calls(machine: Any) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=SETTINGS)
