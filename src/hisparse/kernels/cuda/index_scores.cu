// The lightning indexer's scores of every live position: sum over heads of weight * relu(query . key).
//
// Specification: selectors/dsa.py `score_keys`. Keys lie in pages of 64 positions and are read once, 16 bytes a lane, a
// page ahead of the one that is scored; four warps take a page, each 16 positions. All queries of a request stand in
// shared memory. The order of a dot product's terms is free as long as query and key agree on it, so queries are laid
// out in the order in which lanes hold what they read (`place_of`). FP8 keys are widened to bf16, exactly, and their
// scale multiplies the score; of a key that is not finite the scale is not. A score depends on query, weights and key
// alone, and not on where the key lies.
// Hopper's matrix unit takes 32 or 64 heads at once; elsewhere, and for other numbers, it is 8 (`multiply_queries`).
// Grid: [blocks over pages, requests].
#include "wgmma.cuh"

constexpr bool kFp8 = HISPARSE_FP8;
constexpr int32 kHeadDim = HISPARSE_HEAD_DIM;     // elements of a key, a multiple of 32; of 64 with FP8
constexpr int32 kHeads = HISPARSE_HEADS;          // a multiple of 8
constexpr int32 kThreads = HISPARSE_THREADS;
constexpr int32 kKeyBytes = kHeadDim * (kFp8 ? 1 : 2);
constexpr int32 kPageBytes = kPageRecords * (kKeyBytes + (kFp8 ? 4 : 0));  // FP8: keys, then their scales
constexpr int32 kRuns = kKeyBytes / 64;           // of a key; four lanes read one, 16 bytes each
constexpr int32 kPieceElements = kFp8 ? 16 : 8;   // of a key, in a lane's 16 bytes
constexpr int32 kRows = 16;                       // positions of a warp
constexpr int32 kGroup = kPageRecords / kRows * kWarp;  // threads that take a page
constexpr int32 kSteps = kHeadDim / 16;           // of the matrix unit
constexpr int32 kColumns = (kHeadDim + kColumn - 1) / kColumn;
constexpr int32 kColumnBytes = kHeads * kLineBytes;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int32 kAtOnce = kHeads % 64 == 0 ? 64 : kHeads % 32 == 0 ? 32 : 8;  // heads
#else
constexpr int32 kAtOnce = 8;
#endif

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
static_assert(kThreads % kGroup == 0, "the warps of a group take the same page, and products together");

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

struct alignas(16) Piece {
  uint32 part[4];
};

// A lane's share of 16 keys, as it is read: two keys, eight apart; of each, 16 of every 64 bytes.
struct Read {
  Piece low[kRuns], high[kRuns];
  float scale[2];

  __device__ void load(const byte* page, int32 row, int32 quarter) {
    const byte* key = page + row * kKeyBytes + quarter * 16;
#pragma unroll
    for (int32 i = 0; i < kRuns; i++) {
      low[i] = *reinterpret_cast<const Piece*>(key + i * 64);
      high[i] = *reinterpret_cast<const Piece*>(key + 8 * kKeyBytes + i * 64);
    }
    if constexpr (kFp8) {
      const float* scales = reinterpret_cast<const float*>(page + kPageRecords * kKeyBytes) + row;
      scale[0] = scales[0], scale[1] = scales[8];
    }
  }
};

// The same as the matrix unit takes it.
struct Keys {
  uint32 step[kSteps][4];
  float scale[2];

  __device__ explicit Keys(const Read& read) : scale{read.scale[0], read.scale[1]} {
#pragma unroll
    for (int32 i = 0; i < kRuns; i++) {
      const uint32(&low)[4] = read.low[i].part, (&high)[4] = read.high[i].part;
      if constexpr (kFp8) {
#pragma unroll
        for (int32 j = 0; j < 4; j++)
          set(i * 4 + j, widen_first(low[j]), widen_first(high[j]), widen_last(low[j]), widen_last(high[j]));
      } else {
        set(i * 2, low[0], high[0], low[1], high[1]);
        set(i * 2 + 1, low[2], high[2], low[3], high[3]);
      }
    }
  }

  __device__ void set(int32 i, uint32 a0, uint32 a1, uint32 a2, uint32 a3) {
    step[i][0] = a0, step[i][1] = a1, step[i][2] = a2, step[i][3] = a3;
  }
};

// Where elements `element` and `element` + 1 of a head's query stand in shared memory: at the place of the product's
// terms for which a lane's pieces hold these elements of a key.
__device__ int32 place_of(int32 head, int32 element) {
  constexpr int32 kStepsOfRun = kPieceElements / 4;
  const int32 run = element / (4 * kPieceElements), quarter = element / kPieceElements % 4;
  const int32 step = run * kStepsOfRun + element / 4 % kStepsOfRun, half = element / 2 % 2;
  const int32 term = step * 16 + half * 8 + quarter * 2;
  return term / kColumn * kColumnBytes + swizzled(head, term % kColumn / 8) + term % 8 * 2;
}

// Asks for a page that is read next and scored after that. Bytes of bf16 keys are on their way in sufficient number without it.
__device__ void prefetch_page(const byte* page) {
  const int32 at = threadIdx.x % kGroup * kLineBytes;
  if (at < kPageBytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(page + at));
}

// sum = keys . queries, 16 keys a warp, for the heads from `head` on. On Hopper: a page's keys by 32 or 64 heads.
template <int32 N>
__device__ void multiply_queries(float (&sum)[N], const Keys& keys, uint32 queries, int32 head) {
#pragma unroll
  for (int32 i = 0; i < N; i++) sum[i] = 0;
  begin_products(sum);
#pragma unroll
  for (int32 i = 0; i < kSteps; i++) {
    const uint32 at = queries + i / 4 * kColumnBytes + head * kLineBytes + i % 4 * 32;
    multiply_registers(sum, keys.step[i], descriptor(at));
  }
  finish_products(sum);
}

// sum += left * right for one warp: 16 lines by 8 columns, 16 terms.
__device__ void multiply_16_by_8(float (&sum)[4], const uint32 (&left)[4], uint32 right0, uint32 right1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// The same by 8 heads, on any GPU.
__device__ void multiply_queries(float (&sum)[4], const Keys& keys, uint32 queries, int32 head) {
  const int32 lane = threadIdx.x % kWarp;
#pragma unroll
  for (int32 i = 0; i < 4; i++) sum[i] = 0;
#pragma unroll
  for (int32 i = 0; i < kSteps; i += 2) {
    uint32 b[4];
    const uint32 at = queries + i / 4 * kColumnBytes + swizzled(head + lane % 8, i % 4 * 2 + lane / 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(at));
    multiply_16_by_8(sum, keys.step[i], b[0], b[1]);
    multiply_16_by_8(sum, keys.step[i + 1], b[2], b[3]);
  }
}

// NaN stays NaN, which fmaxf would make 0: a damaged key must not pass for a bad one.
__device__ float relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

// Writes the scores of a lane's two positions, the second eight further on; `left` are before the history's end.
__device__ void write_scores(const Keys& keys, uint32 queries, const float* weights, int32 left, float* scores) {
  const int32 quarter = threadIdx.x % 4;
  float score[2] = {0, 0};
#pragma unroll(kAtOnce == 8 ? 2 : 1)
  for (int32 head = 0; head < kHeads; head += kAtOnce) {
    float sum[kAtOnce / 2];
    multiply_queries(sum, keys, queries, head);
#pragma unroll
    for (int32 i = 0; i < kAtOnce / 8; i++) {
      const float* weight = weights + head + i * 8 + quarter * 2;
      score[0] += weight[0] * relu(sum[i * 4]) + weight[1] * relu(sum[i * 4 + 1]);
      score[1] += weight[0] * relu(sum[i * 4 + 2]) + weight[1] * relu(sum[i * 4 + 3]);
    }
  }
#pragma unroll
  for (int32 i = 0; i < 2; i++) {
    float one = score[i];
    one += __shfl_xor_sync(~0u, one, 1);
    one += __shfl_xor_sync(~0u, one, 2);
    if (quarter == 0 && i * 8 < left) scores[i * 8] = kFp8 ? one * keys.scale[i] : one;
  }
}

// Queries in the matrix unit's layout, then the weights.
__device__ void read_queries(const Params& p, byte* shared, float* weights) {
  const int64 request = blockIdx.y;
  for (int32 at = threadIdx.x * 2; at < kHeads * kHeadDim; at += kThreads * 2)
    *reinterpret_cast<uint32*>(shared + place_of(at / kHeadDim, at % kHeadDim)) =
        *reinterpret_cast<const uint32*>(p.query + (request * kHeads * kHeadDim + at) * 2);
  for (int32 head = threadIdx.x; head < kHeads; head += kThreads) weights[head] = p.weights[request * kHeads + head];
}

extern "C" __global__ void __launch_bounds__(kThreads) index_scores(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) byte shared[];  // [kColumns, kHeads, 128] queries, then [kHeads] weights
  wait_for_previous_launch();
  const int32 length = static_cast<int32>(p.lengths[blockIdx.y]), pages = (length + kPageRecords - 1) / kPageRecords;
  const int32* page_table = p.page_table + static_cast<int64>(blockIdx.y) * p.max_pages;
  const auto keys_of = [&](int32 page) { return p.keys + static_cast<int64>(page_table[page]) * kPageBytes; };
  float* weights = reinterpret_cast<float*>(shared + kColumns * kColumnBytes);
  read_queries(p, shared, weights);
  publish_to_matrix_unit();
  __syncthreads();
  const int32 lane = threadIdx.x % kWarp, row = threadIdx.x % kGroup / kWarp * kRows + lane / 4, quarter = lane % 4;
  const int32 stride = gridDim.x * (kThreads / kGroup);
  int32 page = blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup;
  float* scores = p.scores + static_cast<int64>(blockIdx.y) * p.max_pages * kPageRecords + row;
  Read read;
  if (page < pages) read.load(keys_of(page), row, quarter);
  const byte* next = page + stride < pages ? keys_of(page + stride) : nullptr;
  for (; page < pages; page += stride) {
    const Keys keys(read);
    if (next) read.load(next, row, quarter);
    next = page + 2 * stride < pages ? keys_of(page + 2 * stride) : nullptr;
    if (kFp8 && next) prefetch_page(next);
    const int32 first = page * kPageRecords;
    write_scores(keys, shared_address(shared), weights, length - first - row, scores + first);
  }
  let_next_launch_begin();
}
