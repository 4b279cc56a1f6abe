// Give back the slots of rows whose request leaves the device, in all layers at once.
//
// Specification: reference/release.py; docs/architecture.md, rules 4 and 5. Grid: [blocks over rows, layers].
#include "common.cuh"

struct Params {
  Tables tables;
  const int64* rows;  // [n], distinct, -1: none
  int64 num_rows;     // n
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

extern "C" __global__ void release(const __grid_constant__ Params p) {
  const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 row = at < p.num_rows ? p.rows[at] : kNowhere;
  if (row < 0) return;
  const Layer layer = p.tables.layer(blockIdx.y);
  const int32 slot = layer.slot_of_row[row];
  if (slot < 0) return;
  layer.slot_of_row[row] = kNowhere;
  layer.row_of_slot[slot] = kNowhere;
  layer.stamp[slot] = kFree;
  layer.entered[slot] = kFree;
  layer.free[atomicAdd(layer.num_free, 1)] = slot;
}
