// The k best-scored positions of each request, ascending; of equal scores the lower position wins.
//
// Specification: selectors/dsa.py `best_scored`. Scores are taken as integers of the same order, and the k-th is found
// digit by digit from the top. `count_scores` counts first digits. `top_k` marks every position whose first digit is
// above the k-th score's and lists those that share it; the last block of a request finds the k-th score among those
// listed and writes out what is marked. Blocks share a request's positions, so that a long history is read by many.
// Grid of both: [blocks over positions, requests].
#include "common.cuh"

constexpr int32 kThreads = 1024;
constexpr int32 kFirstBits = 12, kNextBits = 10, kLastBits = 10;
constexpr int32 kBins = 1 << kFirstBits;

// A position that shares the first digit.
struct alignas(8) Listed {
  uint32 key;  // its score as an integer
  uint32 position;
};

struct Params {
  const float* scores;  // [b, score_stride]
  const int64* lengths; // [b]: later scores are not read
  int32* positions;     // [b, k], out: ascending, then -1
  float* kth;           // [b], out: the k-th score; -inf where all are selected
  int32* counts;        // [b, kBins + 2], zeros: of first digits, then how many are listed, then blocks that are through
  uint32* marked;       // [b, score_stride / 32], a bit a position: selected; then the same for ties with the k-th score
  Listed* listed;       // [b, score_stride]
  int32* failures;      // [] or null: requests with scores that are not finite
  int64 score_stride;   // a multiple of 32
  int32 k;
  int32 batch;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

struct Shared {
  int32 bins[kBins];
  uint32 warps[kThreads / kWarp];
  uint32 digit;     // chosen last
  int32 remaining;  // of the k, those that share all digits chosen
  bool is_last;     // block of the request
};

// Floats as integers of the same order; zero has one sign.
__device__ uint32 ordered(float score) {
  const uint32 bits = __float_as_uint(score + 0.0f);
  return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

__device__ float unordered(uint32 key) { return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u)); }

__device__ uint32 first_digit(uint32 key) { return key >> (32 - kFirstBits); }

// One request's part of everything.
struct Request {
  const float* scores;
  int32 length, k;
  int32* counts;
  int32* num_listed;
  uint32* ticket;
  uint32* marked;
  uint32* ties;
  Listed* listed;

  __device__ explicit Request(const Params& p)
      : scores(p.scores + blockIdx.y * p.score_stride), length(static_cast<int32>(p.lengths[blockIdx.y])), k(p.k),
        counts(p.counts + blockIdx.y * (kBins + 2)), num_listed(counts + kBins),
        ticket(reinterpret_cast<uint32*>(counts + kBins + 1)), marked(p.marked + blockIdx.y * (p.score_stride / kWarp)),
        ties(marked + p.batch * (p.score_stride / kWarp)), listed(p.listed + blockIdx.y * p.score_stride) {}
};

__device__ void clear_bins(Shared& shared) {
  for (int32 bin = threadIdx.x; bin < kBins; bin += kThreads) shared.bins[bin] = 0;
  __syncthreads();
}

// The sum of `value` over the block's threads before this one; `total` over all.
__device__ uint32 sum_before(uint32 value, Shared& shared, uint32* total) {
  const int32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32 sum = value;
#pragma unroll
  for (int32 distance = 1; distance < kWarp; distance *= 2) {
    const uint32 other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();  // the values of the call before are read
  if (lane == kWarp - 1) shared.warps[warp] = sum;
  __syncthreads();
  uint32 before = sum - value, all = 0;
#pragma unroll
  for (int32 i = 0; i < kThreads / kWarp; i++) {
    if (i < warp) before += shared.warps[i];
    all += shared.warps[i];
  }
  *total = all;
  return before;
}

// The digit of the `wanted`-th best: from the highest bin down, the one in which the count reaches it.
__device__ void choose_digit(const int32* bins, int32 num_bins, int32 wanted, Shared& shared) {
  constexpr int32 kEach = kBins / kThreads;
  const int32 highest = num_bins - 1 - kEach * static_cast<int32>(threadIdx.x);
  int32 count[kEach], sum = 0;
#pragma unroll
  for (int32 i = 0; i < kEach; i++) {
    count[i] = highest - i >= 0 ? bins[highest - i] : 0;
    sum += count[i];
  }
  uint32 total;
  int32 before = sum_before(sum, shared, &total);
#pragma unroll
  for (int32 i = 0; i < kEach; i++) {
    if (before < wanted && wanted <= before + count[i]) {
      shared.digit = highest - i;
      shared.remaining = wanted - before;
    }
    before += count[i];
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads) count_scores(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  wait_for_previous_launch();
  const Request request(p);
  if (request.length <= request.k) return;
  clear_bins(shared);
  for (int32 first = (blockIdx.x * kThreads + threadIdx.x) * 4; first < request.length; first += gridDim.x * kThreads * 4) {
    const float4 four = *reinterpret_cast<const float4*>(request.scores + first);
    const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int32 i = 0; i < 4; i++)
      if (first + i < request.length) atomicAdd(shared.bins + first_digit(ordered(each[i])), 1);
  }
  __syncthreads();
  let_next_launch_begin();
  for (int32 bin = threadIdx.x; bin < kBins; bin += kThreads)
    if (shared.bins[bin]) atomicAdd(request.counts + bin, shared.bins[bin]);
}

// Infinities and NaN of either sign have the first eight digits, or the last eight.
__device__ void note_failure(const Request& r, int32* failures) {
  constexpr int32 kEnd = 8;
  const int32 bin = threadIdx.x < kEnd ? threadIdx.x : kBins - 2 * kEnd + threadIdx.x;
  const bool found = threadIdx.x < 2 * kEnd && r.counts[bin] != 0;
  if (__any_sync(~0u, found) && threadIdx.x == 0) atomicAdd(failures, 1);
}

// Marks what is above the first digit and lists what shares it, a few words a warp at a time.
__device__ void mark_and_list(const Request& r, uint32 digit) {
  constexpr int32 kWords = 4;
  const int32 lane = threadIdx.x % kWarp, warp = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  const uint32 before = (1u << lane) - 1;
  for (int32 first = warp * kWords * kWarp; first < r.length; first += gridDim.x * kThreads * kWords) {
    uint32 key[kWords], same[kWords];
    int32 count = 0;
#pragma unroll
    for (int32 i = 0; i < kWords; i++) {
      const int32 position = first + i * kWarp + lane;
      key[i] = position < r.length ? ordered(r.scores[position]) : 0;
    }
#pragma unroll
    for (int32 i = 0; i < kWords; i++) {
      const int32 word = first / kWarp + i;
      const bool is_there = word * kWarp + lane < r.length;
      const uint32 above = __ballot_sync(~0u, is_there && first_digit(key[i]) > digit);
      same[i] = __ballot_sync(~0u, is_there && first_digit(key[i]) == digit);
      count += __popc(same[i]);
      if (lane == 0 && word * kWarp < r.length) {
        r.marked[word] = above;
        r.ties[word] = 0;
      }
    }
    if (!count) continue;
    int32 at = lane == 0 ? atomicAdd(r.num_listed, count) : 0;
    at = __shfl_sync(~0u, at, 0);
#pragma unroll
    for (int32 i = 0; i < kWords; i++) {
      const uint32 position = first + i * kWarp + lane;
      if (same[i] >> lane & 1) r.listed[at + __popc(same[i] & before)] = {key[i], position};
      at += __popc(same[i]);
    }
  }
}

// Among those listed, the digit at `shift` of the `wanted`-th best that has `prefix` above it.
__device__ void choose_next(const Request& r, int32 listed, uint32 prefix, int32 shift, int32 bits, Shared& shared) {
  clear_bins(shared);
#pragma unroll 4
  for (int32 at = threadIdx.x; at < listed; at += kThreads) {
    const uint32 key = r.listed[at].key;
    if (key >> (shift + bits) == prefix) atomicAdd(shared.bins + (key >> shift & ((1u << bits) - 1)), 1);
  }
  __syncthreads();
  choose_digit(shared.bins, 1 << bits, shared.remaining, shared);
}

// Marks those listed whose score is above the k-th, and notes those that equal it.
__device__ void mark_listed(const Request& r, int32 listed, uint32 kth) {
  for (int32 at = threadIdx.x; at < listed; at += kThreads) {
    const Listed one = r.listed[at];
    if (one.key < kth) continue;
    atomicOr((one.key == kth ? r.ties : r.marked) + one.position / kWarp, 1u << one.position % kWarp);
  }
  __syncthreads();
}

// Everything marked, and the first `room` ties, in order.
__device__ void write_positions(const Request& r, int32 room, int32* out, Shared& shared) {
  const int32 words = (r.length + kWarp - 1) / kWarp;
  int32 written = 0, seen = 0;  // marked and ties of earlier goes
  for (int32 first = 0; first < words; first += kThreads) {
    const int32 word = first + threadIdx.x;
    const uint32 marked = word < words ? r.marked[word] : 0, tied = word < words ? r.ties[word] : 0;
    uint32 total;  // unsigned: 2 ** 31 where all of a go are ties
    const uint32 before = sum_before(__popc(marked) | __popc(tied) << 16, shared, &total);
    int32 ties = seen + (before >> 16), at = written + (before & 0xFFFF) + min(ties, room);
    for (uint32 left = marked | tied; left; left &= left - 1) {
      const int32 bit = __ffs(left) - 1;
      const bool is_tie = tied >> bit & 1;
      if (!is_tie || ties < room) out[at++] = word * kWarp + bit;
      ties += is_tie;
    }
    written += total & 0xFFFF;
    seen += total >> 16;
  }
}

__device__ void finish(const Request& r, uint32 digit, int32* out, float* kth, Shared& shared) {
  const int32 listed = load_relaxed(r.num_listed);
  uint32 prefix = digit;
  choose_next(r, listed, prefix, kLastBits, kNextBits, shared);
  prefix = prefix << kNextBits | shared.digit;
  choose_next(r, listed, prefix, 0, kLastBits, shared);
  prefix = prefix << kLastBits | shared.digit;
  const int32 room = shared.remaining;
  mark_listed(r, listed, prefix);
  write_positions(r, room, out, shared);
  if (threadIdx.x == 0) *kth = unordered(prefix);
}

extern "C" __global__ void __launch_bounds__(kThreads) top_k(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  wait_for_previous_launch();
  const Request request(p);
  int32* out = p.positions + static_cast<int64>(blockIdx.y) * p.k;
  if (request.length <= request.k) {
    if (blockIdx.x != 0) return;
    for (int32 at = threadIdx.x; at < p.k; at += kThreads) out[at] = at < request.length ? at : kNowhere;
    if (threadIdx.x == 0) p.kth[blockIdx.y] = minus_infinity();
    return;
  }
  choose_digit(request.counts, kBins, request.k, shared);
  const uint32 digit = shared.digit;
  if (p.failures && blockIdx.x == 0 && threadIdx.x < kWarp) note_failure(request, p.failures);
  mark_and_list(request, digit);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicAdd(request.ticket, 1) == gridDim.x - 1;
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  finish(request, digit, out, p.kth + blockIdx.y, shared);
}
