// The lightning indexer's scores of every live position: sum over heads of weight * relu(query . key).
//
// Specification: selectors/dsa.py `score_keys`. Keys lie in pages of 64 positions and are read once, 16 bytes a lane:
// the order of a dot product's terms is free as long as query and key agree on it, so a lane's 16 bytes serve several
// steps of the matrix unit. A warp takes 16 positions at a time; all heads of one request stand in shared memory.
// FP8 keys are widened to bf16, exactly, and their scale multiplies the score. A score depends on query, weights and
// key alone, and not on where the key lies.
// Grid: [blocks over positions, requests].
#include "common.cuh"

constexpr bool kFp8 = HISPARSE_FP8;
constexpr int32 kHeadDim = HISPARSE_HEAD_DIM;      // elements of a key, a multiple of 32; of 64 with FP8
constexpr int32 kHeads = HISPARSE_HEADS;           // a multiple of 8
constexpr int32 kKeyBytes = kHeadDim * (kFp8 ? 1 : 2);
constexpr int32 kPageBytes = kPageRecords * (kKeyBytes + (kFp8 ? 4 : 0));  // FP8: keys, then their scales
constexpr int32 kPieces = kKeyBytes / 64;          // of a key; four lanes read one, 16 bytes each
constexpr int32 kQueryBytes = kFp8 ? 32 : 16;      // of a query, that meet a lane's 16 bytes
constexpr int32 kRows = 16;                        // positions that a warp takes at a time
constexpr int32 kStride = kHeadDim * 2 + (kFp8 ? 16 : 64);  // bytes between queries: no bank is asked twice

struct Params {
  const byte* keys;          // [pages, kPageBytes]: 64 keys, and with FP8 their 64 float32 scales
  const int32* page_table;   // [b, max_pages]
  const int64* lengths;      // [b]
  const byte* query;         // [b, kHeads, kHeadDim] bf16
  const float* weights;      // [b, kHeads]
  float* scores;             // [b, max_pages * 64], out; past a length nothing is written
  int32 max_pages;
  int32 unused;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");
static_assert(kKeyBytes % 64 == 0 && kHeads % 8 == 0, "kernels/index_scores.py asks for nothing else");

struct alignas(16) Quad {
  uint32 a, b, c, d;
};

// d += a * b for a 16 x 16 piece of keys and a 16 x 8 piece of queries.
__device__ void multiply(float (&sum)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// NaN stays NaN, which fmaxf would make 0: a damaged key must not pass for a bad one.
__device__ float relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

// Two e4m3 numbers, one in each upper byte of a half, as two bf16: the exponent is placed and its bias set right.
__device__ uint32 widen(uint32 spread) {
  const uint32 placed = (spread & 0x7F007F00u) >> 4 | (spread & 0x80008000u), two_to_120 = 0x7B807B80u;
  uint32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(placed), "r"(two_to_120), "r"(0x80008000u));
  return result;
}

// Elements 0, 1 and 2, 3 of four e4m3 numbers.
__device__ uint32 widen_first(uint32 four) { return widen(__byte_perm(four, 0, 0x1404)); }
__device__ uint32 widen_last(uint32 four) { return widen(__byte_perm(four, 0, 0x3424)); }

__device__ Quad load_quad(const byte* address) { return *reinterpret_cast<const Quad*>(address); }

// 16 keys, two rows a lane, as the matrix unit takes them.
struct Keys {
  uint32 step[kHeadDim / 16][4];

  // `key` is the lane's first 16 bytes of its first row; the other row is eight further.
  __device__ explicit Keys(const byte* key) {
#pragma unroll
    for (int32 i = 0; i < kPieces; i++) {
      const Quad low = load_quad(key + i * 64), high = load_quad(key + 8 * kKeyBytes + i * 64);
      if constexpr (kFp8) {
        set_wide(i * 4, low.a, high.a);
        set_wide(i * 4 + 1, low.b, high.b);
        set_wide(i * 4 + 2, low.c, high.c);
        set_wide(i * 4 + 3, low.d, high.d);
      } else {
        set(i * 2, low.a, high.a, low.b, high.b);
        set(i * 2 + 1, low.c, high.c, low.d, high.d);
      }
    }
  }

  __device__ void set(int32 i, uint32 a0, uint32 a1, uint32 a2, uint32 a3) {
    step[i][0] = a0, step[i][1] = a1, step[i][2] = a2, step[i][3] = a3;
  }

  __device__ void set_wide(int32 i, uint32 low, uint32 high) {
    set(i, widen_first(low), widen_first(high), widen_last(low), widen_last(high));
  }
};

// Where the 16 bytes of a query stand that meet steps 2 i and 2 i + 1 of a lane's keys.
__device__ constexpr int32 query_bytes_at(int32 i) { return kFp8 ? i / 2 * 128 + i % 2 * 16 : i * 64; }

// The page that position `first` is in.
__device__ const byte* page_of(const Params& p, int32 first) {
  const int32 page = p.page_table[static_cast<int64>(blockIdx.y) * p.max_pages + first / kPageRecords];
  return p.keys + static_cast<int64>(page) * kPageBytes;
}

// Asks for the keys of 16 positions, so that they are in the L2 cache when they are read.
__device__ void prefetch_rows(const byte* page_keys, int32 first) {
  constexpr int32 kLine = 128;
  const byte* begin = page_keys + first % kPageRecords * kKeyBytes;
#pragma unroll
  for (int32 at = threadIdx.x % kWarp * kLine; at < kRows * kKeyBytes; at += kWarp * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
}

// The scores of 16 positions from `first` on, 16-aligned, so that all lie in one page.
__device__ void score_rows(const Params& p, const byte* page_keys, int32 first, int32 length, const byte* queries,
                           const float* weights) {
  const int32 lane = threadIdx.x % kWarp, row = lane / 4, quarter = lane % 4, in_page = first % kPageRecords;
  const Keys keys(page_keys + (in_page + row) * kKeyBytes + quarter * 16);
  float score[2] = {0, 0};
#pragma unroll 2
  for (int32 head = 0; head < kHeads; head += 8) {
    float sum[4] = {0, 0, 0, 0};
    const byte* query = queries + (head + row) * kStride + quarter * kQueryBytes;
#pragma unroll
    for (int32 i = 0; i < kHeadDim / 32; i++) {
      const Quad q = load_quad(query + query_bytes_at(i));
      multiply(sum, keys.step[2 * i], q.a, q.b);
      multiply(sum, keys.step[2 * i + 1], q.c, q.d);
    }
    const float w0 = weights[head + quarter * 2], w1 = weights[head + quarter * 2 + 1];
    score[0] += w0 * relu(sum[0]) + w1 * relu(sum[1]);
    score[1] += w0 * relu(sum[2]) + w1 * relu(sum[3]);
  }
#pragma unroll
  for (int32 i = 0; i < 2; i++) {
    float one = score[i];
    one += __shfl_xor_sync(~0u, one, 1);
    one += __shfl_xor_sync(~0u, one, 2);
    const int32 position = first + row + 8 * i;
    if (quarter != 0 || position >= length) continue;
    if constexpr (kFp8)
      one *= reinterpret_cast<const float*>(page_keys + kPageRecords * kKeyBytes)[position % kPageRecords];
    p.scores[static_cast<int64>(blockIdx.y) * p.max_pages * kPageRecords + position] = one;
  }
}

extern "C" __global__ void __launch_bounds__(256) index_scores(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) byte shared[];  // [kHeads, kStride] queries, then [kHeads] weights
  wait_for_previous_launch();
  const int32 length = static_cast<int32>(p.lengths[blockIdx.y]);
  float* weights = reinterpret_cast<float*>(shared + kHeads * kStride);
  for (int32 at = threadIdx.x; at < kHeads * kHeadDim / 8; at += blockDim.x) {
    const int32 head = at / (kHeadDim / 8), piece = at % (kHeadDim / 8);
    const byte* from = p.query + (static_cast<int64>(blockIdx.y) * kHeads + head) * kHeadDim * 2 + piece * 16;
    *reinterpret_cast<Quad*>(shared + head * kStride + piece * 16) = load_quad(from);
  }
  for (int32 head = threadIdx.x; head < kHeads; head += blockDim.x)
    weights[head] = p.weights[static_cast<int64>(blockIdx.y) * kHeads + head];
  __syncthreads();
  const int32 warp = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, warps = gridDim.x * (blockDim.x / kWarp);
  int32 first = warp * kRows;
  const byte* page_keys = first < length ? page_of(p, first) : nullptr;
  while (first < length) {
    const int32 next = first + warps * kRows;
    const byte* next_keys = next < length ? page_of(p, next) : nullptr;
    if (next_keys) prefetch_rows(next_keys, next);
    score_rows(p, page_keys, first, length, shared, weights);
    first = next, page_keys = next_keys;
  }
  let_next_launch_begin();
}
