// The words that every kernel shares: tables, stamps, rows, and the few memory operations that C++ cannot spell.
//
// Fed by params.py, which mirrors the structs here in ctypes. Compiled by NVRTC, so there are no standard headers.
// A plain member is ordered by kernel boundaries alone; what blocks of one launch exchange goes through the
// functions at the end of this file.
#pragma once

using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;
using byte = unsigned char;

constexpr int32 kNowhere = -1;      // slot_of_row: in no slot; row_of_slot: free; slots: no such record
constexpr int32 kPending = -2;      // slot_of_row: missed in this launch, its slot is on the way
constexpr int32 kFree = -1;         // stamp of a free slot
constexpr int32 kPageRecords = 64;  // as in layout.py
constexpr int32 kWarp = 32;

// What launches of one layer leave for the next. Counts are never reset: a launch counts from where it started.
struct Control {
  uint64 arrived;  // resolve: low 40 bits count blocks past their lookups, high 24 the misses that they found
  uint64 done;     // the same, counted past their claims from the order: equal to `arrived` between launches
  int32 step;      // the current step
  uint32 passed;   // entries of the order handed out in place of one that was passed over
  uint32 lap;      // slots looked at after the order ran out
  uint32 ticket;   // blocks that are through; wraps to 0
  int32 due;       // rebuild_order: the list is being made again
  uint32 passed_when_listed;  // `passed` when the list was made
  uint32 inserted;  // rows that insert was given
  int32 unused[21];
};
static_assert(sizeof(Control) == 128, "state.py allocates 128 bytes a layer");

struct Counters {
  int64* hits;       // [layers]
  int64* misses;     // [layers]
  int64* rebuilds;   // [layers]
  int64* exhausted;  // [layers]
  int64* failed;     // [layers]
};

// One layer's tables, as in device_pool.SlotTables.
struct Layer {
  int32* slot_of_row;  // [rows]
  int32* row_of_slot;  // [N]
  int32* stamp;        // [N]
  int32* entered;      // [N]
  int32* order;        // [N]
  int32* free;         // [N]
  int32* num_free;     // []
  int32* cursor;       // []
  int32* listed;       // []
  int32* listed_at;    // []
  Control* control;    // []
};

// All layers' tables: each pointer has one more leading dimension.
struct Tables {
  Layer first;
  int64 num_rows;
  int64 num_slots;  // N

  __device__ Layer layer(int64 index) const {
    const int64 row = index * num_rows, slot = index * num_slots;
    return {first.slot_of_row + row, first.row_of_slot + slot, first.stamp + slot,       first.entered + slot,
            first.order + slot,      first.free + slot,        first.num_free + index,   first.cursor + index,
            first.listed + index,    first.listed_at + index,  first.control + index};
  }
};

// Stamps count half steps, as in device_pool.py.
__device__ inline int32 fetched(int32 step) { return 2 * step; }
__device__ inline int32 hit(int32 step) { return 2 * step + 1; }

// 16 bytes, the unit in which records move.
struct alignas(16) Chunk {
  uint64 low, high;
};

__device__ inline float minus_infinity() { return __int_as_float(0xFF800000); }

// Memory operations

// From the host pool: nothing in this launch writes it, and it must not push anything out of L1.
__device__ inline Chunk load_host(const byte* address) {
  Chunk chunk;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b64 {%0, %1}, [%2];"
               : "=l"(chunk.low), "=l"(chunk.high)
               : "l"(address));
  return chunk;
}

__device__ inline void store_chunk(byte* address, Chunk chunk) { *reinterpret_cast<Chunk*>(address) = chunk; }

// The launch may begin before the one before it on the stream has ended: it goes on only here.
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The blocks of the next launch may take their places on the GPU once all of ours have theirs; they wait there.
__device__ inline void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What other blocks of this launch may have written: past L1, in no particular order.
__device__ inline int32 load_relaxed(const int32* address) {
  int32 value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_relaxed(int32* address, int32 value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Everything written by another block before its `add_release` of the value seen here is visible after this.
__device__ inline uint64 load_acquire(const uint64* address) {
  uint64 value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64 add_release(uint64* address, uint64 value) {
  uint64 before;
  asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}

__device__ inline void count(int64* counter, int64 amount) {
  if (amount) atomicAdd(reinterpret_cast<uint64*>(counter), static_cast<uint64>(amount));
}
