// Claim slots for records that enter the device pool: free slots first, then victims from the order.
//
// Used by resolve and insert; specification: reference/claim.py, docs/architecture.md, rules 2, 4, 9.
//
// The j-th record of a launch has a place of its own, so in the common case nobody waits for anybody: the j-th free
// slot, or the j-th entry of the order. An entry is passed over if its slot was used too recently or
// refilled; the record then draws further entries from a shared counter. No entry is handed out twice, so no claim needs compare-and-swap.
//
// If the order runs out, every block first finishes its claims from it; then one counter hands out all N slots, in
// two laps: the older half of what this step has not used, then the rest. After that the claim fails, in bounded time.
#pragma once
#include "common.cuh"

// What a launch's claims count from. Read before the first claim of the launch, changed only by claims.
struct ClaimStart {
  int32 num_free;
  int32 cursor;
  int32 listed;
  int32 listed_at;  // a slot whose record entered later is passed over: it changed hands since the list was made
  int32 limit;      // a slot with a later stamp is passed over
  int32 now;        // the stamp of what enters
  uint32 passed;
  uint32 lap;
};

// The loads alone, so that they may be under way while something else is done; `limit` and `now` come with `begin`.
__device__ inline ClaimStart read_claim_start(const Layer& layer) {
  return {*layer.num_free, *layer.cursor, *layer.listed, *layer.listed_at, 0, 0, layer.control->passed,
          layer.control->lap};
}

__device__ inline ClaimStart begin(ClaimStart start, int32 step, bool by_recency) {
  start.now = fetched(step);
  start.limit = by_recency && start.listed_at < start.now ? start.listed_at : start.now - 1;
  return start;
}

// How many of `wanted` records find no free slot and need a victim.
__device__ inline int32 num_victims(const ClaimStart& start, int32 wanted) {
  return wanted > start.num_free ? wanted - start.num_free : 0;
}

struct Claimed {
  int32 slot;     // kNowhere: none
  int32 evicted;  // the row that was there, kNowhere: none
};

// The slot that record `index` of the launch looks at first; kNowhere if the order is too short.
__device__ inline int32 first_candidate(const Layer& layer, const ClaimStart& start, int32 index) {
  if (index < start.num_free) return layer.free[start.num_free - 1 - index];
  const int32 entry = start.cursor + index - start.num_free;
  return entry < start.listed ? layer.order[entry] : kNowhere;
}

__device__ inline bool may_leave(int32 stamp, int32 after, int32 limit) { return stamp > after && stamp <= limit; }

// Try the first candidate, then draw entries that nobody else has, until one may leave or the order ends.
__device__ inline Claimed claim_from_order(const Layer& layer, const ClaimStart& start, int32 index, int32 candidate,
                                           int32 victims) {
  if (index < start.num_free) return {candidate, kNowhere};
  while (candidate != kNowhere) {
    const int32 stamp = load_relaxed(layer.stamp + candidate);
    const int32 entered = load_relaxed(layer.entered + candidate);  // beside the stamp, to wait once
    const int32 evicted = load_relaxed(layer.row_of_slot + candidate);
    if (may_leave(stamp, kFree, start.limit) && entered <= start.listed_at) return {candidate, evicted};
    const int32 extra = static_cast<int32>(atomicAdd(&layer.control->passed, 1u) - start.passed);
    const int32 entry = start.cursor + victims + extra;
    candidate = entry < start.listed ? layer.order[entry] : kNowhere;
    if (candidate != kNowhere) atomicAdd(layer.cursor, 1);
  }
  return {kNowhere, kNowhere};
}

// The order ran out and all claims from it are done and visible.
__device__ inline Claimed claim_by_lap(const Layer& layer, const ClaimStart& start, int64 num_slots,
                                       int64* exhausted) {
  const int32 middle = start.limit + (start.now - start.limit) / 2;
  while (true) {
    const uint32 at = atomicAdd(&layer.control->lap, 1u) - start.lap;
    if (at == 0) count(exhausted, 1);
    if (at >= 2 * num_slots) return {kNowhere, kNowhere};
    const bool first_lap = at < num_slots;
    const int32 slot = static_cast<int32>(first_lap ? at : at - num_slots);
    const int32 stamp = load_relaxed(layer.stamp + slot);
    const bool leaves = first_lap ? may_leave(stamp, kFree, middle) : may_leave(stamp, middle, start.now - 1);
    if (leaves) return {slot, load_relaxed(layer.row_of_slot + slot)};
  }
}

// `row` is now in the claimed slot and what was there is nowhere. Waiters for `row` go on.
__device__ inline void publish(const Layer& layer, const ClaimStart& start, Claimed claimed, int32 row) {
  const int32 slot = claimed.slot;
  if (claimed.evicted != kNowhere) atomicCAS(layer.slot_of_row + claimed.evicted, slot, kNowhere);
  layer.row_of_slot[slot] = row;
  layer.entered[slot] = start.now;
  store_relaxed(layer.stamp + slot, start.now);
  store_relaxed(layer.slot_of_row + row, slot);
}

// Once for a launch that claimed `wanted` slots: move the free list and the order on.
__device__ inline void advance(const Layer& layer, const ClaimStart& start, int32 wanted) {
  const int32 victims = num_victims(start, wanted), left = start.listed - start.cursor;
  *layer.num_free = start.num_free - (wanted - victims);
  const int32 entries = victims < left ? victims : left;
  if (entries > 0) atomicAdd(layer.cursor, entries);
}
