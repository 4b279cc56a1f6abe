// Selection in, slots out, in one launch over many blocks; specification: reference/resolve.py.
//
//   look_up       every selected position: position -> row -> slot. A hit raises its slot's stamp. The first to miss
//                 a row owns the miss (compare-and-swap in slot_of_row); others that select it wait for its slot.
//   first loads   of the block's missing records leave for the host at once, before there is a slot to put them in.
//   arrive, wait  until all blocks are past their lookups: no claim can take a slot that a lookup would have hit.
//   claim         a slot for each miss (claim.cuh).
//   copy          the loads land in their slots; the rest of the records follows.
//   serve waiters last: by then their slots are published.
//
// All blocks must be resident at once (they wait for each other); kernels/resolve.py sees to it. One resolve of a layer at a time.
#include "claim.cuh"

constexpr int32 kRecordBytes = HISPARSE_RECORD_BYTES;
constexpr int32 kChunks = kRecordBytes / 16;
__host__ __device__ constexpr int32 at_least(int32 chunks) {
  return chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : chunks > 2 ? 4 : chunks;
}
constexpr int32 kGroup = at_least(kChunks);                                                // lanes for a record
constexpr int32 kGoes = (kChunks + kGroup - 1) / kGroup;                                   // loads a lane for a record
constexpr int32 kInFlight = kGoes < HISPARSE_IN_FLIGHT ? kGoes : HISPARSE_IN_FLIGHT;       // of them, at a time
constexpr int32 kParts = (kGoes + kInFlight - 1) / kInFlight;
constexpr bool kIo = HISPARSE_IO;                // false: the no-IO oracle, which leaves the slots' bytes alone
constexpr int kArrivalBits = 40;                 // of Control::arrived and done; the misses are above

struct Params {
  Tables tables;
  Counters counters;
  const int32* selection;      // [b, k], lines selection_stride apart; negative: pad
  const int64* request_index;  // [b], line of each request in the page table, -1: padded request
  const int64* lengths;        // [b], positions in each request's history, later ones count as pads; null: no limit
  const int32* page_table;     // [max_requests, max_pages], -1: no page
  const byte* host;            // [rows, record_bytes], this layer's part of the host pool
  byte* pool;                  // [N, record_bytes], this layer's slots
  int32* slots;                // [b, k], out
  int32* plan_rows;            // [b * k], out: the miss plan; null: not wanted
  int32* plan_slots;           // [b * k], out
  int32* plan_count;           // [], out
  int64 selection_stride;
  int32 layer;
  int32 batch;        // b
  int32 k;
  int32 max_requests;
  int32 max_pages;
  int32 by_recency;   // the policy's lists stay exact while slots touched since are passed over
  int32 begins_step;  // no insert came before: this launch moves the layer on to the next step
  int32 capacity;     // selections that one block may look at
  int32 copiers;      // threads of a block that copy
  int32 unused;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

// What a block found: misses from the front, waiters from the back of the same lists.
struct Found {
  int32* row;    // [capacity]
  int32* where;  // [capacity], index in `slots`; for a miss that was claimed, its slot
  int32 misses;
  int32 waiters;
  int32 hits;
  int32 failed;
};

struct Shared {
  ClaimStart start;
  uint64 done;      // Control::done at the start of the launch
  int32 first;      // index of the block's first miss among the launch's
  int32 victims;    // needed by the launch
  Found found;
};

__device__ int32 row_of(const Params& p, int32 request, int32 position) {
  const int64 line = p.request_index[request], length = p.lengths ? p.lengths[request] : position + 1ll;
  const int32 page_at = position / kPageRecords;
  if (position < 0 || position >= length) return kNowhere;
  if (line < 0 || line >= p.max_requests || page_at >= p.max_pages) return kNowhere;
  const int32 page = p.page_table[line * p.max_pages + page_at];
  const int64 row = static_cast<int64>(page) * kPageRecords + position % kPageRecords;
  return page < 0 || row >= p.tables.num_rows ? kNowhere : static_cast<int32>(row);
}

// A place in the block's list for every lane with `wanted`; `total` counts them.
__device__ int32 take_places(bool wanted, int32* total) {
  const uint32 lanes = __ballot_sync(~0u, wanted);
  const int32 lane = threadIdx.x % kWarp;
  int32 first = 0;
  if (lanes && lane == 0) first = atomicAdd(total, __popc(lanes));
  return __shfl_sync(~0u, first, 0) + __popc(lanes & ((1u << lane) - 1));
}

// Where a row is: a slot; kNowhere if this thread is the first to miss it; kPending if another was. Read first:
// compare-and-swap does it in one go, but is slow on entries that are not in the L2 cache.
__device__ int32 find(int32* slot_of_row) {
  const int32 slot = load_relaxed(slot_of_row);
  return slot != kNowhere ? slot : atomicCAS(slot_of_row, kNowhere, kPending);
}

__device__ void look_up_one(const Params& p, const Layer& layer, int32 step, int32 at, Found& found) {
  const int32 size = p.batch * p.k;
  int32 row = kNowhere, slot = kNowhere;
  if (at < size) {
    const int32 request = static_cast<uint32>(at) / static_cast<uint32>(p.k);
    row = row_of(p, request, p.selection[request * p.selection_stride + (at - request * p.k)]);
    if (row != kNowhere) slot = find(layer.slot_of_row + row);
    if (slot >= 0) store_relaxed(layer.stamp + slot, hit(step));
    if (row == kNowhere || slot >= 0) p.slots[at] = slot;
  }
  const bool missed = row != kNowhere && slot == kNowhere, waits = slot == kPending;
  const int32 miss = take_places(missed, &found.misses), waiter = take_places(waits, &found.waiters);
  const uint32 hits = __ballot_sync(~0u, slot >= 0);
  if (hits && threadIdx.x % kWarp == 0) atomicAdd(&found.hits, __popc(hits));
  if (missed || waits) {
    const int32 place = missed ? miss : p.capacity - 1 - waiter;
    found.row[place] = row;
    found.where[place] = at;
  }
}

// Runs of 32 selections; a block takes neighbouring ones. Selections ascend, so its misses lie near each other in the
// host pool and share address translations, which are what limits the link when the pool is large.
__device__ void look_up(const Params& p, const Layer& layer, int32 step, Found& found) {
  const int32 warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  const int32 runs = (p.batch * p.k + kWarp - 1) / kWarp, each = p.capacity / kWarp;
  const int32 first = blockIdx.x * each, end = first + each < runs ? first + each : runs;
  for (int32 run = first + warp; run < end; run += warps) look_up_one(p, layer, step, run * kWarp + lane, found);
}

// A group of lanes takes a record, or a part of one that is too large for a go: all of a record's requests leave for
// the host together. Warp 0 comes last in line, since it also arrives and waits.
struct Copy {
  const Params& p;
  const Found& found;
  Chunk flight[kInFlight];

  __device__ bool takes_part() const { return threadIdx.x < p.copiers; }
  __device__ int32 groups() const { return p.copiers / kGroup; }
  __device__ int32 rounds() const { return (found.misses * kParts + groups() - 1) / groups(); }

  // Calls `move(miss, offset, i)` for each of this thread's chunks in a round; `offset` in bytes of the record.
  template <typename Move>
  __device__ void each(int32 round, Move move) const {
    const int32 thread = threadIdx.x >= kWarp ? threadIdx.x - kWarp : threadIdx.x + p.copiers - kWarp;
    const int32 part = round * groups() + thread / kGroup, miss = part / kParts;
    if (miss >= found.misses) return;
    const int32 first = part % kParts * kInFlight * kGroup + thread % kGroup;
#pragma unroll
    for (int32 i = 0; i < kInFlight; i++)
      if (first + i * kGroup < kChunks) move(miss, (first + i * kGroup) * 16, i);
  }
  __device__ void load(int32 round) {
    each(round, [this](int32 miss, int32 offset, int32 i) {
      flight[i] = load_host(p.host + static_cast<int64>(found.row[miss]) * kRecordBytes + offset);
    });
  }
  __device__ void store(int32 round) const {
    each(round, [this](int32 miss, int32 offset, int32 i) {
      const int64 slot = found.where[miss];
      if (slot >= 0) store_chunk(p.pool + slot * kRecordBytes + offset, flight[i]);
    });
  }
};

// One block's share of Control::arrived and done.
__device__ uint64 share(const Found& found) { return (static_cast<uint64>(found.misses) << kArrivalBits) | 1; }

__device__ int32 blocks_in(uint64 counted) { return counted & ((1ull << kArrivalBits) - 1); }

__device__ int32 misses_in(uint64 counted) { return counted >> kArrivalBits; }

// Thread 0: wait until every block's share is in `word`; returns the launch's misses.
__device__ int32 wait_for_all(const uint64* word, uint64 before) {
  uint64 counted;
  do counted = load_acquire(word) - before;
  while (blocks_in(counted) < static_cast<int32>(gridDim.x));
  return misses_in(counted);
}

// Thread 0 of the block that arrives last leaves the tables as the next launch is to find them.
__device__ void close_launch(const Params& p, const Layer& layer, const ClaimStart& start, int32 misses) {
  advance(layer, start, misses);
  if (p.begins_step) layer.control->step = start.now / 2;
  if (p.plan_count) *p.plan_count = misses;
}

__device__ void finish_miss(const Params& p, const Layer& layer, Shared& shared, int32 miss, Claimed claimed) {
  Found& found = shared.found;
  if (claimed.slot != kNowhere) {
    publish(layer, shared.start, claimed, found.row[miss]);
  } else {
    store_relaxed(layer.slot_of_row + found.row[miss], kNowhere);
    atomicAdd(&found.failed, 1);
  }
  p.slots[found.where[miss]] = claimed.slot;
  found.where[miss] = claimed.slot;
  if (p.plan_count) {
    p.plan_rows[shared.first + miss] = found.row[miss];
    p.plan_slots[shared.first + miss] = claimed.slot;
  }
}

// Claims from the order; true in every thread if one of the block's misses is left without a slot.
__device__ bool claim_misses(const Params& p, const Layer& layer, Shared& shared, int32 candidate) {
  bool left = false;
  for (int32 miss = threadIdx.x; miss < shared.found.misses; miss += blockDim.x) {
    const int32 index = shared.first + miss;
    if (miss >= static_cast<int32>(blockDim.x)) candidate = first_candidate(layer, shared.start, index);
    const Claimed claimed = claim_from_order(layer, shared.start, index, candidate, shared.victims);
    if (claimed.slot != kNowhere) {
      finish_miss(p, layer, shared, miss, claimed);
    } else {
      shared.found.where[miss] = -2 - shared.found.where[miss];  // still to be claimed
      left = true;
    }
  }
  return __syncthreads_or(left);
}

__device__ void claim_the_rest(const Params& p, const Layer& layer, Shared& shared) {
  if (threadIdx.x == 0) wait_for_all(&layer.control->done, shared.done);
  __syncthreads();
  for (int32 miss = threadIdx.x; miss < shared.found.misses; miss += blockDim.x) {
    if (shared.found.where[miss] > -2) continue;
    shared.found.where[miss] = -2 - shared.found.where[miss];
    const Claimed claimed = claim_by_lap(layer, shared.start, p.tables.num_slots, p.counters.exhausted + p.layer);
    finish_miss(p, layer, shared, miss, claimed);
  }
  __syncthreads();
}

__device__ void count_found(const Params& p, const Found& found) {
  count(p.counters.hits + p.layer, found.hits);
  count(p.counters.misses + p.layer, found.misses - found.failed);
  count(p.counters.failed + p.layer, found.failed);
}

// The same row was missed by another request: its slot comes from there.
__device__ void serve_waiters(const Params& p, const Layer& layer, const Found& found) {
  for (int32 waiter = threadIdx.x; waiter < found.waiters; waiter += blockDim.x) {
    const int32 place = p.capacity - 1 - waiter;
    int32 slot;
    do slot = load_relaxed(layer.slot_of_row + found.row[place]);
    while (slot == kPending);
    p.slots[found.where[place]] = slot;
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) resolve(const __grid_constant__ Params p) {
  extern __shared__ int32 lists[];  // [2, capacity]
  __shared__ Shared shared;
  Found& found = shared.found;
  const Layer layer = p.tables.layer(p.layer);
  const bool leads = threadIdx.x == 0;

  wait_for_previous_launch();
  const int32 step = layer.control->step + p.begins_step;
  ClaimStart start;
  uint64 done;
  if (leads) {
    start = read_claim_start(layer);
    done = layer.control->done;
    found = {lists, lists + p.capacity, 0, 0, 0, 0};
  }
  __syncthreads();
  look_up(p, layer, step, found);
  if (leads) {
    shared.start = start = begin(start, step, p.by_recency);
    shared.done = done;
  }
  __syncthreads();

  Copy copy{p, found};
  uint64 counted;
  if (leads) counted = add_release(&layer.control->arrived, share(found)) - done;
  if (kIo && copy.takes_part()) copy.load(0);
  if (leads) shared.first = misses_in(counted);
  __syncthreads();

  int32 candidate = kNowhere;
  if (threadIdx.x < found.misses) candidate = first_candidate(layer, shared.start, shared.first + threadIdx.x);
  if (leads) {
    const bool last = blocks_in(counted) + 1 == static_cast<int32>(gridDim.x);
    const int32 misses = wait_for_all(&layer.control->arrived, done);
    shared.victims = num_victims(start, misses);
    if (last) close_launch(p, layer, start, misses);
  }
  __syncthreads();

  const bool exhausted = claim_misses(p, layer, shared, candidate);
  if (leads) add_release(&layer.control->done, share(found));
  if (exhausted) claim_the_rest(p, layer, shared);
  if (leads) count_found(p, found);

  let_next_launch_begin();
  if (kIo && copy.takes_part()) {
    for (int32 round = 0; round < copy.rounds(); round++) {
      if (round > 0) copy.load(round);
      copy.store(round);
    }
  }
  serve_waiters(p, layer, found);
}
