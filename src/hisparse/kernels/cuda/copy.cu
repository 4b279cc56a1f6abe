// Records from where they are to where they belong, without looking anything up: write_through, stage and replay.
//
// A thread moves 16 bytes at a time; consecutive threads move consecutive chunks of a record.
#include "common.cuh"

constexpr int32 kRecordBytes = HISPARSE_RECORD_BYTES;
constexpr int32 kChunks = kRecordBytes / 16;

struct Params {
  Tables tables;
  const byte* records;     // [n, record_bytes], source of write_through and stage
  const int64* rows;       // [n], their rows in the host pool; write_through skips -1
  const int32* slots;      // [n], their slots (write_through), -1: skipped
  byte* host;              // [rows, record_bytes], one layer's part of the host pool
  byte* pool;              // [N, record_bytes], one layer's slots
  const int32* plan_rows;  // [plan_count], replay
  const int32* plan_slots; // [plan_count]
  const int32* plan_count; // []
  int64 num_records;       // n
  int32 layer;
  int32 unused;
};
static_assert(sizeof(Params) == HISPARSE_PARAMS_BYTES, "params.py mirrors this struct");

__device__ int64 first_chunk() { return static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64 stride() { return static_cast<int64>(gridDim.x) * blockDim.x; }
__device__ int64 offset(int64 record, int32 chunk) { return record * kRecordBytes + chunk * 16; }

// New records to their slots and, at the same time, to the host; both from the tensor that produced them.
// Specification: reference/write_through.py.
extern "C" __global__ void write_through(const __grid_constant__ Params p) {
  for (int64 at = first_chunk(); at < p.num_records * kChunks; at += stride()) {
    const int64 record = at / kChunks, row = p.rows[record], slot = p.slots[record];
    const int32 chunk = at % kChunks;
    const Chunk data = *reinterpret_cast<const Chunk*>(p.records + offset(record, chunk));
    if (slot >= 0) store_chunk(p.pool + offset(slot, chunk), data);
    if (row >= 0) store_chunk(p.host + offset(row, chunk), data);
  }
}

// The block that is last through, in its thread 0.
__device__ bool is_last_block(uint32* ticket) {
  __threadfence();
  return atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
}

// Prefill records to the host and, as far as slots are free, into slots. Evicts nobody. A step of its own: the records
// are newer than everything that a list of victims names.
// Specification: reference/stage.py.
extern "C" __global__ void stage(const __grid_constant__ Params p) {
  const Layer layer = p.tables.layer(p.layer);
  const int32 num_free = *layer.num_free, step = layer.control->step + 1;
  for (int64 at = first_chunk(); at < p.num_records * kChunks; at += stride()) {
    const int64 record = at / kChunks, row = p.rows[record];
    const int32 chunk = at % kChunks;
    const Chunk data = *reinterpret_cast<const Chunk*>(p.records + offset(record, chunk));
    store_chunk(p.host + offset(row, chunk), data);
    if (record >= num_free) continue;
    const int32 slot = layer.free[num_free - 1 - record];
    store_chunk(p.pool + offset(slot, chunk), data);
    if (chunk > 0) continue;
    layer.row_of_slot[slot] = row;
    layer.slot_of_row[row] = slot;
    layer.stamp[slot] = layer.entered[slot] = fetched(step);
  }
  __syncthreads();
  if (threadIdx.x != 0 || !is_last_block(&layer.control->ticket)) return;
  *layer.num_free = num_free > p.num_records ? num_free - p.num_records : 0;
  layer.control->step = step;
}

// A miss plan into another layer of the index group: rows and slots are those of the anchor.
extern "C" __global__ void replay(const __grid_constant__ Params p) {
  const int64 chunks = static_cast<int64>(*p.plan_count) * kChunks;
  for (int64 at = first_chunk(); at < chunks; at += stride()) {
    const int64 record = at / kChunks, row = p.plan_rows[record], slot = p.plan_slots[record];
    const int32 chunk = at % kChunks;
    if (slot >= 0) store_chunk(p.pool + offset(slot, chunk), load_host(p.host + offset(row, chunk)));
  }
}
