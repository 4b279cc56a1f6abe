// Decode attention over latent records at the slots that resolve handed out, on Hopper's matrix unit.
//
// Specification: attention/latent_sparse.py `attend_latent_part`. A block of two warpgroups takes 64 heads of one
// request and a share of its slots, 64 records at a time: it gathers the next records into shared memory while it
// multiplies the last ones, which serve as keys (all 576 elements) and as values (the first 512). Each warpgroup
// scores half of the 64 records, then sums half of the 512 value elements. FP8 records are gathered as they are and
// widened in shared memory. Shares are merged by merge_latent.cu. A block's work depends on the shapes alone, and so
// does every rounding.
// Grid: [shares, requests * groups of 64 heads]; 256 threads.
#include "wgmma.cuh"

constexpr bool kFp8 = HISPARSE_FP8;
constexpr int32 kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr int32 kRows = 64;  // heads of a block, and records at a time
constexpr int32 kColumns = kWidth / kColumn;
constexpr int32 kColumnBytes = kRows * kLineBytes;
constexpr int32 kMatrixBytes = kColumns * kColumnBytes;
constexpr int32 kThreads = 256, kGroup = 128;
constexpr int32 kScaleGroup = 128;  // FP8 elements that share a scale
constexpr int32 kScaleBytes = kLatent / kScaleGroup * 4;
constexpr int32 kRecordBytes = kFp8 ? kLatent + kScaleBytes + kRope * 2 : kWidth * 2;
constexpr int32 kPieces = kRecordBytes / 16;

struct Params {
  const byte* query;    // [b, heads, 576] bf16, absorbed
  const byte* records;  // [N, kRecordBytes]
  const int32* slots;   // [b, k], -1 pads
  float* out;           // [b, shares, heads, 512], out: attention over a share's slots
  float* lse;           // [b, shares, heads], out: log2 of the sum of 2 ** (score * scale); -inf for no slot
  float scale;          // log2(e) times what scores are multiplied by
  int32 heads;
  int32 k;
  int32 share;          // slots of a share, a multiple of 64
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

struct Shared {
  byte query[kMatrixBytes];
  byte keys[kFp8 ? 1 : 2][kMatrixBytes];
  byte weights[kColumnBytes];                   // softmax weights of 64 heads by 64 records, bf16
  byte raw[kFp8 ? kRows * kRecordBytes : 16];   // FP8 records as they were gathered
  float largest[2][kRows];                      // score of each head, by warpgroup
  float total[2][kRows];
  float hidden[2][kRows];                       // minus infinity for a pad, else 0; of every other 64 records
};
static_assert(sizeof(Shared) == HISPARSE_SHARED_BYTES, "kernels/attend_latent.py asks for it");

__device__ void copy_async(byte* to, const byte* from, bool is_there) {
  const int32 bytes = is_there ? 16 : 0;  // zeros otherwise
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}

__device__ void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Where piece `piece` of line `line` of a matrix of 576 columns stands.
__device__ int32 place(int32 line, int32 piece) { return piece / 8 * kColumnBytes + swizzled(line, piece % 8); }

__device__ void load_query(const Params& p, int32 request, int32 first_head, Shared& shared) {
  const byte* from = p.query + (static_cast<int64>(request) * p.heads + first_head) * kWidth * 2;
  for (int32 at = threadIdx.x; at < kRows * kWidth / 8; at += kThreads) {
    const int32 line = at / (kWidth / 8), piece = at % (kWidth / 8);
    const bool is_there = first_head + line < p.heads;
    copy_async(shared.query + place(line, piece), is_there ? from + static_cast<int64>(at) * 16 : p.query, is_there);
  }
}

// Each run of eight threads gathers two records of 64, 128 bytes at a time.
struct Gather {
  int32 line, part;
  int32 slot[2];

  __device__ Gather() : line(threadIdx.x / 8), part(threadIdx.x % 8) {}

  // The slots of the records from `first` on; later ones than `end` are pads.
  __device__ void look_up(const int32* slots, int32 first, int32 end, float* hidden) {
#pragma unroll
    for (int32 i = 0; i < 2; i++) {
      const int32 at = first + line + i * (kRows / 2);
      slot[i] = at < end ? slots[at] : kNowhere;
      if (part == 0) hidden[line + i * (kRows / 2)] = slot[i] < 0 ? minus_infinity() : 0;
    }
  }

  __device__ void start(const byte* records, byte* to) const {
#pragma unroll
    for (int32 i = 0; i < 2; i++) {
      const bool is_there = slot[i] >= 0;
      const byte* from = records + static_cast<int64>(is_there ? slot[i] : 0) * kRecordBytes;
      const int32 to_line = line + i * (kRows / 2);
#pragma unroll
      for (int32 piece = part; piece < kPieces; piece += 8)
        copy_async(to + (kFp8 ? to_line * kRecordBytes + piece * 16 : place(to_line, piece)), from + piece * 16, is_there);
    }
  }
};

struct alignas(16) Quad {
  uint32 word[4];
};

// Two e4m3 numbers, widened and scaled, as two bf16.
__device__ uint32 widen(uint32 pair, float scale) {
  uint32 halves, result;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
  asm("{.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high * scale), "f"(low * scale));
  return result;
}

// FP8 records as gathered, to a matrix of bf16.
__device__ void widen_records(const Shared& shared, byte* keys) {
  constexpr int32 kLatentPieces = kLatent / 16, kRopePieces = kRope / 8;
  for (int32 at = threadIdx.x; at < kRows * kLatentPieces; at += kThreads) {
    const int32 line = at / kLatentPieces, piece = at % kLatentPieces;
    const byte* record = shared.raw + line * kRecordBytes;
    const Quad packed = *reinterpret_cast<const Quad*>(record + piece * 16);
    const float scale = reinterpret_cast<const float*>(record + kLatent)[piece / (kScaleGroup / 16)];
#pragma unroll
    for (int32 half = 0; half < 2; half++) {
      Quad wide;
#pragma unroll
      for (int32 i = 0; i < 4; i++) wide.word[i] = widen(packed.word[half * 2 + i / 2] >> i % 2 * 16 & 0xFFFF, scale);
      *reinterpret_cast<Quad*>(keys + place(line, piece * 2 + half)) = wide;
    }
  }
  for (int32 at = threadIdx.x; at < kRows * kRopePieces; at += kThreads) {
    const int32 line = at / kRopePieces, piece = at % kRopePieces;
    const byte* from = shared.raw + line * kRecordBytes + kLatent + kScaleBytes + piece * 16;
    *reinterpret_cast<Quad*>(keys + place(line, kLatent / 8 + piece)) = *reinterpret_cast<const Quad*>(from);
  }
}

// A thread of a warpgroup holds two lines of a product, `line` and `line` + 8, and of each eight columns two.
struct Lines {
  int32 group, line, column;

  __device__ Lines()
      : group(threadIdx.x / kGroup), line(threadIdx.x % kGroup / kWarp * 16 + threadIdx.x % kWarp / 4),
        column(threadIdx.x % 4 * 2) {}
};

// The scores of 64 heads with this warpgroup's half of the records.
__device__ void score(float (&scores)[16], uint32 query, uint32 keys, int32 group) {
#pragma unroll
  for (int32 i = 0; i < 16; i++) scores[i] = 0;
  const uint32 half = keys + group * (kRows / 2) * kLineBytes;
  begin_products(scores);
#pragma unroll
  for (int32 step = 0; step < kWidth / 16; step++) {
    const uint32 at = step / 4 * kColumnBytes + step % 4 * 32;
    multiply_32(scores, descriptor(query + at), descriptor(half + at));
  }
  finish_products(scores);
}

// Scales scores; pads score minus infinity.
__device__ void scale_and_hide(float (&scores)[16], float scale, const float* hidden, int32 column) {
#pragma unroll
  for (int32 j = 0; j < 4; j++) {
    const float2 hide = *reinterpret_cast<const float2*>(hidden + j * 8 + column);
#pragma unroll
    for (int32 i = 0; i < 4; i++) scores[j * 4 + i] = fmaf(scores[j * 4 + i], scale, i % 2 ? hide.y : hide.x);
  }
}

// What has been summed so far, of the thread's two lines.
struct Softmax {
  float largest[2], total[2];

  __device__ Softmax() : largest{minus_infinity(), minus_infinity()}, total{0, 0} {}

  // Scores become weights in shared memory; what was summed so far is to be multiplied by `shrink`.
  __device__ void add(const float (&scores)[16], const Lines& lines, Shared& shared, float (&shrink)[2]) {
    float top[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int32 i = 0; i < 16; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
#pragma unroll
    for (int32 i = 0; i < 2; i++) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
      if (lines.column == 0) shared.largest[lines.group][lines.line + 8 * i] = top[i];
    }
    __syncthreads();
    float base[2];
#pragma unroll
    for (int32 i = 0; i < 2; i++) {
      const float other = shared.largest[1 - lines.group][lines.line + 8 * i];
      const float now = fmaxf(largest[i], fmaxf(top[i], other));
      base[i] = now == minus_infinity() ? 0 : now;
      shrink[i] = power_of_2(largest[i] - base[i]);
      largest[i] = now;
      total[i] *= shrink[i];
    }
#pragma unroll
    for (int32 j = 0; j < 4; j++) {
#pragma unroll
      for (int32 i = 0; i < 2; i++) {
        const float low = power_of_2(scores[j * 4 + i * 2] - base[i]);
        const float high = power_of_2(scores[j * 4 + i * 2 + 1] - base[i]);
        total[i] += low + high;
        uint32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        const int32 at = swizzled(lines.line + 8 * i, lines.group * 4 + j) + lines.column * 2;
        *reinterpret_cast<uint32*>(shared.weights + at) = both;
      }
    }
  }

  // Over the four threads of a line, and both warpgroups.
  __device__ void sum_up(const Lines& lines, Shared& shared) {
#pragma unroll
    for (int32 i = 0; i < 2; i++) {
      total[i] += __shfl_xor_sync(~0u, total[i], 1);
      total[i] += __shfl_xor_sync(~0u, total[i], 2);
      if (lines.column == 0) shared.total[lines.group][lines.line + 8 * i] = total[i];
    }
    __syncthreads();
#pragma unroll
    for (int32 i = 0; i < 2; i++) total[i] = shared.total[0][lines.line + 8 * i] + shared.total[1][lines.line + 8 * i];
  }
};

// sum = sum * shrink + weights * values, this warpgroup's half of the value elements.
__device__ void add_values(float (&sum)[128], const float (&shrink)[2], uint32 weights, uint32 keys, int32 group) {
  if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
    for (int32 i = 0; i < 128; i++) sum[i] *= shrink[i / 2 % 2];
  }
  const uint32 values = keys + group * (kLatent / 2 / kColumn) * kColumnBytes;
  begin_products(sum);
#pragma unroll
  for (int32 step = 0; step < kRows / 16; step++)
    multiply_256_transposed(sum, descriptor(weights + step * 32),
                            descriptor(values + step * 16 * kLineBytes, kColumnBytes));
  finish_products(sum);
}

__device__ void write_share(const Params& p, int32 request, int32 first_head, const Lines& lines, const Softmax& softmax,
                            const float (&sum)[128]) {
#pragma unroll
  for (int32 i = 0; i < 2; i++) {
    const int32 head = first_head + lines.line + 8 * i;
    if (head >= p.heads) continue;
    const int64 at = (static_cast<int64>(request) * gridDim.x + blockIdx.x) * p.heads + head;
    const float total = softmax.total[i], inverse = total > 0 ? 1 / total : 0;
    float* out = p.out + at * kLatent + lines.group * (kLatent / 2) + lines.column;
#pragma unroll
    for (int32 j = 0; j < 32; j++)
      *reinterpret_cast<float2*>(out + j * 8) = {sum[j * 4 + i * 2] * inverse, sum[j * 4 + i * 2 + 1] * inverse};
    if (lines.group == 0 && lines.column == 0)
      p.lse[at] = total > 0 ? softmax.largest[i] + log2f(total) : minus_infinity();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attend_latent(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int32 head_groups = (p.heads + kRows - 1) / kRows;
  const int32 request = blockIdx.y / head_groups, first_head = blockIdx.y % head_groups * kRows;
  const int32 first = blockIdx.x * p.share, end = min(first + p.share, p.k);
  const int32* slots = p.slots + static_cast<int64>(request) * p.k;
  const uint32 query = shared_address(shared.query), weights = shared_address(shared.weights);
  const Lines lines;
  Softmax softmax;
  float sum[128];
#pragma unroll
  for (int32 i = 0; i < 128; i++) sum[i] = 0;

  wait_for_previous_launch();
  load_query(p, request, first_head, shared);
  Gather gather;
  gather.look_up(slots, first, end, shared.hidden[0]);
  gather.start(p.records, kFp8 ? shared.raw : shared.keys[0]);
  for (int32 at = first, turn = 0; at < end; at += kRows, turn ^= 1) {
    byte* keys = shared.keys[kFp8 ? 0 : turn];
    gather.look_up(slots, at + kRows, end, shared.hidden[turn ^ 1]);
    finish_copies();
    publish_to_matrix_unit();
    __syncthreads();
    if (kFp8) {
      widen_records(shared, keys);
      publish_to_matrix_unit();
      __syncthreads();
    }
    if (at + kRows < end) gather.start(p.records, kFp8 ? shared.raw : shared.keys[turn ^ 1]);
    float scores[16], shrink[2];
    score(scores, query, shared_address(keys), lines.group);
    scale_and_hide(scores, p.scale, shared.hidden[turn] + lines.group * (kRows / 2), lines.column);
    softmax.add(scores, lines, shared, shrink);
    publish_to_matrix_unit();
    __syncthreads();
    add_values(sum, shrink, weights, shared_address(keys), lines.group);
  }
  let_next_launch_begin();
  softmax.sum_up(lines, shared);
  write_share(p, request, first_head, lines, softmax, sum);
}
