// Slots for the records that a step will produce: all layers in one launch, a block a layer. Begins the step.
//
// Specification: reference/insert.py; docs/architecture.md, rule 6. The records come with write_through.
#include "claim.cuh"

struct Params {
  Tables tables;
  Counters counters;
  const int64* rows;  // [b], distinct, -1: padded request
  int32* slots;       // [layers, b], out
  int32 batch;        // b
  int32 by_recency;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

// A row that already has a slot (somebody selected it too early) keeps it; the others are numbered.
__device__ int32 keep_or_number(const Params& p, const Layer& layer, int32 now, int32 at, int32* wanted) {
  const int64 row = p.rows[at];
  if (row < 0) return kNowhere;
  const int32 slot = layer.slot_of_row[row];
  if (slot < 0) return atomicAdd(wanted, 1);
  layer.stamp[slot] = now;
  p.slots[static_cast<int64>(blockIdx.x) * p.batch + at] = slot;
  return kPending;
}

extern "C" __global__ void __launch_bounds__(1024) insert(const __grid_constant__ Params p) {
  extern __shared__ int32 number[];  // [b]: a record's number among those that want a slot
  __shared__ int32 wanted, given;
  const Layer layer = p.tables.layer(blockIdx.x);
  int32* slots = p.slots + static_cast<int64>(blockIdx.x) * p.batch;
  const int32 step = layer.control->step + 1;
  const ClaimStart start = begin(read_claim_start(layer), step, p.by_recency);
  if (threadIdx.x == 0) wanted = given = 0;
  __syncthreads();
  for (int32 at = threadIdx.x; at < p.batch; at += blockDim.x) {
    number[at] = keep_or_number(p, layer, start.now, at, &wanted);
    if (number[at] == kNowhere)
      slots[at] = kNowhere;
    else
      atomicAdd(&given, 1);
  }
  __syncthreads();

  const int32 victims = num_victims(start, wanted);
  for (int32 at = threadIdx.x; at < p.batch; at += blockDim.x) {
    if (number[at] < 0) continue;
    const int32 candidate = first_candidate(layer, start, number[at]);
    const Claimed claimed = claim_from_order(layer, start, number[at], candidate, victims);
    slots[at] = claimed.slot;
    if (claimed.slot == kNowhere) continue;
    publish(layer, start, claimed, p.rows[at]);
    number[at] = kNowhere;
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    advance(layer, start, wanted);
    layer.control->step = step;
    layer.control->inserted += given;
  }
  for (int32 at = threadIdx.x; at < p.batch; at += blockDim.x) {
    if (number[at] < 0) continue;
    const Claimed claimed =
        claim_by_lap(layer, start, p.tables.num_slots, p.counters.exhausted + blockIdx.x);
    slots[at] = claimed.slot;
    if (claimed.slot == kNowhere)
      count(p.counters.failed + blockIdx.x, 1);
    else
      publish(layer, start, claimed, p.rows[at]);
  }
}
