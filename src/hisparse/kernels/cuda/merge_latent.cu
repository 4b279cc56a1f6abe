// Merges the shares of attend_latent.cu by their log-sum-exp, in the order of the shares.
//
// Specification: attention/partial.py `merge`. Grid: [heads, requests]; 128 threads, four elements each.
#include "common.cuh"

constexpr int32 kLatent = 512, kThreads = kLatent / 4;
constexpr int32 kMostShares = 1024;
constexpr float kLn2 = 0.6931471805599453f;

struct Params {
  const float* shares;     // [b, num_shares, heads, 512]
  const float* share_lse;  // [b, num_shares, heads], log2
  byte* out;               // [b, heads, 512] bf16, out; zeros for a request without slots
  float* lse;              // [b, heads], out: natural log of the sum of exponentials
  int32 num_shares;
  int32 unused;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

__device__ uint32 two_bf16(float low, float high) {
  uint32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Grid: [heads, requests].
extern "C" __global__ void __launch_bounds__(kThreads) merge_latent(const __grid_constant__ Params p) {
  __shared__ float weights[kMostShares];
  const int32 head = blockIdx.x, heads = gridDim.x;
  const int64 request = blockIdx.y, first = request * p.num_shares * heads + head;
  wait_for_previous_launch();
  float largest = minus_infinity(), total = 0;
  for (int32 i = threadIdx.x; i < p.num_shares; i += kThreads) weights[i] = p.share_lse[first + i * heads];
  __syncthreads();
  for (int32 i = 0; i < p.num_shares; i++) largest = fmaxf(largest, weights[i]);
  const float base = largest == minus_infinity() ? 0 : largest;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 8
  for (int32 i = 0; i < p.num_shares; i++) {
    const float weight = exp2f(weights[i] - base);
    const float4 part = *reinterpret_cast<const float4*>(p.shares + (first + static_cast<int64>(i) * heads) * kLatent + threadIdx.x * 4);
    total += weight;
    sum.x += weight * part.x;
    sum.y += weight * part.y;
    sum.z += weight * part.z;
    sum.w += weight * part.w;
  }
  let_next_launch_begin();
  const float inverse = total > 0 ? 1 / total : 0;
  const int64 line = request * heads + head;
  uint2* out = reinterpret_cast<uint2*>(p.out + line * kLatent * 2) + threadIdx.x;
  *out = {two_bf16(sum.x * inverse, sum.y * inverse), two_bf16(sum.z * inverse, sum.w * inverse)};
  if (threadIdx.x == 0) p.lse[line] = total > 0 ? (largest + log2f(total)) * kLn2 : minus_infinity();
}
