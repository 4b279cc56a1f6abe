// Make layers' lists of victims anew where they are due. Off the critical path, on a side stream.
//
// Specification: reference/rebuild_order.py and order.py. A counting sort in two launches, many blocks a layer:
// `count_keys` counts the slots of each bin, and its last block turns counts into places; `place_slots` puts the
// slots there. Blocks never wait for each other: resolve, which does, may run beside them.
//
// Bins of an age are exact below 512 half steps and within 0.2 % above; slots of one bin are in no particular order.
// The two-rate rule ranks by heat, which is brought up to date as slots are counted (heat.py, order.py).
// Grid: [blocks over slots, layers].
#include "common.cuh"

constexpr int32 kMantissa = 9;
constexpr int32 kThreads = 1024;
constexpr int32 kEach = 12;                // bins a thread
constexpr int32 kBins = kThreads * kEach;  // room for any age below 2**31
static_assert(kBins >= (32 - kMantissa) << kMantissa);

constexpr int32 kPassesAllowed = 512;  // one in so many slots

enum Policy { kLru, kFifo, kRandom, kTwoRate };  // tables.py has the same

// As in order.py.
constexpr int32 kHot = 4095, kWarm = 1023;
constexpr int32 kFast = 2, kSlow = 6, kFiner = 6, kSlowBits = 12 + kFiner, kSlowMask = (1 << kSlowBits) - 1;
constexpr int32 kFastWeight = 2;
constexpr int32 kHeatInBin = 64;
static_assert((kHot << kFiner) * kFastWeight + kSlowMask < kHeatInBin * kBins);

struct Params {
  Tables tables;
  Counters counters;
  int32* bins;        // [layers, kBins], zero between rebuilds
  int32* heat;        // [layers, rows], of each row; two_rate alone
  int32* heat_step;   // [layers, rows], the step at whose end it was so
  int32 first_layer;  // the grid's first
  int32 policy;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");
static_assert(kBins == HISPARSE_BINS, "state.py allocates the bins");

// As reference/rebuild_order.order_is_due; and also once claims have passed over entries that were used since. A pass
// costs a miss 2 us, one after the other: lists half used up doubled the time of a resolve (bench/results).
__device__ bool is_due(const Layer& layer, int32 policy, int64 num_slots) {
  const int64 left = static_cast<int64>(*layer.num_free) + *layer.listed - *layer.cursor;
  const int64 passed = layer.control->passed - layer.control->passed_when_listed;
  return policy != kLru || left * 2 < num_slots || passed * kPassesAllowed > num_slots;
}

// Like a float: the exponent, then the highest kMantissa bits below the leading one.
__device__ int32 bin_of_age(uint32 age) {
  if (age < 1u << kMantissa) return age;
  const int32 exponent = 31 - __clz(age);
  return ((exponent - kMantissa + 1) << kMantissa) + ((age >> (exponent - kMantissa)) & ((1 << kMantissa) - 1));
}

// As order.py: a multiplicative hash of slot and step.
__device__ uint32 mix(uint32 slot, uint32 step) {
  uint32 mixed = slot + 0x9E3779B9u * (step + 1);
  mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3Bu;
  mixed = (mixed ^ (mixed >> 13)) * 0x45D9F3Bu;
  return (mixed ^ (mixed >> 16)) * 0x45D9F3Bu;
}

// Both averages one step on.
__device__ int32 warm(int32 heat, int32 worth) {
  const int32 fast = heat >> kSlowBits, slow = heat & kSlowMask;
  return (fast + ((worth - fast) >> kFast)) << kSlowBits | (slow + (((worth << kFiner) - slow) >> kSlow));
}

// A slot's row after the step that is over: selected in it, come in it, ranked high in it (heat.mark_ranked), or not.
__device__ void update_heat(const Layer& layer, int32 slot, int32* heat, int32* heat_step) {
  const int32 row = layer.row_of_slot[slot], step = layer.control->step;
  if (row < 0) return;
  const int32 before = heat[row];
  if (layer.entered[slot] == fetched(step)) {
    const float away = max(step - heat_step[row], 0);
    heat[row] = warm(static_cast<int32>((before & kSlowMask) * powf(1 - 1.0f / (1 << kSlow), away)), kHot);
  } else {
    const int32 stamp = layer.stamp[slot];
    heat[row] = warm(before, stamp == hit(step) ? kHot : stamp == fetched(step) ? kWarm : 0);
  }
  heat_step[row] = step;
}

// By what the averages add up to in the next step, if that does not select the slot.
__device__ int32 bin_of_heat(int32 heat) {
  const int32 cooler = warm(heat, 0);
  return ((cooler >> kSlowBits << kFiner) * kFastWeight + (cooler & kSlowMask)) / kHeatInBin;
}

// The lowest bin leaves first; kNowhere for a free slot. `heat` is of the layer's rows.
__device__ int32 bin_of(const Layer& layer, int32 policy, int32 slot, const int32* heat) {
  const int32 row = layer.row_of_slot[slot];
  if (row < 0) return kNowhere;
  if (policy == kTwoRate) return bin_of_heat(heat[row]);
  const int32 step = layer.control->step;
  if (policy == kRandom) return mix(slot, step) >> 19;
  const int32 since = policy == kLru ? layer.stamp[slot] : layer.entered[slot];
  return kBins - 1 - bin_of_age(hit(step) - since);
}

// Adds every lane's slot to its bin, one addition a distinct bin of the warp; returns the lane's place.
__device__ int32 add_to_bin(int32* bins, int32 bin) {
  const uint32 same = __match_any_sync(~0u, bin), lane = threadIdx.x % kWarp;
  const int32 leader = __ffs(same) - 1;
  int32 first = 0;
  if (bin != kNowhere && lane == leader) first = atomicAdd(bins + bin, __popc(same));
  return __shfl_sync(~0u, first, leader) + __popc(same & ((1u << lane) - 1));
}

// The whole block calls this; true in all threads of the block that is last through.
__device__ bool is_last_block(uint32* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

__device__ int32 sum_before_in_warp(int32 value) {
  int32 sum = value;
  for (int32 distance = 1; distance < kWarp; distance *= 2) {
    const int32 other = __shfl_up_sync(~0u, sum, distance);
    if (threadIdx.x % kWarp >= distance) sum += other;
  }
  return sum - value;
}

// The sum of `value` over the block's threads before this one. blockDim.x is kThreads.
__device__ int32 sum_before(int32 value) {
  __shared__ int32 warps[kWarp];
  const int32 warp = threadIdx.x / kWarp, before = sum_before_in_warp(value);
  if (threadIdx.x % kWarp == kWarp - 1) warps[warp] = before + value;
  __syncthreads();
  if (warp == 0) {
    const int32 earlier = sum_before_in_warp(warps[threadIdx.x]);
    warps[threadIdx.x] = earlier;
  }
  __syncthreads();
  return warps[warp] + before;
}

// Counts become places; returns the sum of all counts in the last thread.
__device__ int32 counts_to_places(int32* bins) {
  int32 counts[kEach], sum = 0;
#pragma unroll
  for (int32 i = 0; i < kEach; i++) counts[i] = load_relaxed(bins + threadIdx.x * kEach + i);
#pragma unroll
  for (int32 i = 0; i < kEach; i++) sum += counts[i];
  int32 place = sum_before(sum);
#pragma unroll
  for (int32 i = 0; i < kEach; i++) {
    bins[threadIdx.x * kEach + i] = place;
    place += counts[i];
  }
  return place;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) count_keys(const __grid_constant__ Params p) {
  const int32 index = p.first_layer + blockIdx.y;
  const Layer layer = p.tables.layer(index);
  if (!is_due(layer, p.policy, p.tables.num_slots)) return;
  int32* bins = p.bins + static_cast<int64>(index) * kBins;
  int32* heat = p.heat + index * p.tables.num_rows;
  const int64 rounded = (p.tables.num_slots + kWarp - 1) / kWarp * kWarp;
  for (int64 slot = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; slot < rounded;
       slot += static_cast<int64>(gridDim.x) * blockDim.x) {
    const bool is_slot = slot < p.tables.num_slots;
    if (p.policy == kTwoRate && is_slot) update_heat(layer, slot, heat, p.heat_step + index * p.tables.num_rows);
    add_to_bin(bins, is_slot ? bin_of(layer, p.policy, slot, heat) : kNowhere);
  }
  if (!is_last_block(&layer.control->ticket)) return;
  const int32 listed = counts_to_places(bins);
  if (threadIdx.x != blockDim.x - 1) return;
  *layer.listed = listed;
  *layer.cursor = 0;
  *layer.listed_at = hit(layer.control->step);
  layer.control->passed_when_listed = layer.control->passed;
  layer.control->due = 1;
  count(p.counters.rebuilds + index, 1);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) place_slots(const __grid_constant__ Params p) {
  const int32 index = p.first_layer + blockIdx.y;
  const Layer layer = p.tables.layer(index);
  if (!layer.control->due) return;
  int32* bins = p.bins + static_cast<int64>(index) * kBins;
  const int32* heat = p.heat + index * p.tables.num_rows;
  const int64 rounded = (p.tables.num_slots + kWarp - 1) / kWarp * kWarp;
  for (int64 slot = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; slot < rounded;
       slot += static_cast<int64>(gridDim.x) * blockDim.x) {
    const int32 bin = slot < p.tables.num_slots ? bin_of(layer, p.policy, slot, heat) : kNowhere;
    const int32 place = add_to_bin(bins, bin);
    if (bin != kNowhere) layer.order[place] = slot;
  }
  if (!is_last_block(&layer.control->ticket)) return;
  for (int32 bin = threadIdx.x; bin < kBins; bin += blockDim.x) bins[bin] = 0;
  if (threadIdx.x == 0) layer.control->due = 0;
}
