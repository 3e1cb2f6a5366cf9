// Kernels that copy rows to and from addresses, and that signal the end of a step. Compiled by NVRTC after copies.cuh.

static __device__ __forceinline__ i64 now_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return (i64)ns;
}

// See Device.move_rows. One thread block for each row and column: the grid is (rows, columns). where: the address of
// the block in turn, its header and addresses. columns: [n][2], the address of each buffer and the bytes of one row.
extern "C" __global__ void move_rows(const i64* const* where, i64 first, const i64* columns, i64 count,
                                     int to_addresses) {
  const i64* block = *where;
  const i64 row = blockIdx.x, column = blockIdx.y;
  const i64 size = columns[2 * column + 1];
  char* buffer = (char*)columns[2 * column] + row * size;
  char* address = (char*)block[first + column * count + row];
  if (to_addresses) {
    if (address) copy_row(address, buffer, size);
    return;
  }
  if (row == 0 && column == 0 && threadIdx.x == 0 && block[1]) *(volatile i64*)block[1] = now_ns();
  copy_row(buffer, address, size);
}

// See Device.signal. Runs after all other work of the step: goes on to the next block, writes the time of the end, then
// the step's number into the counter. The host must see the two in this order: once it sees the number, it may use the
// memory of the time for something else. So a single thread writes both, with a fence between them.
extern "C" __global__ void signal_end(const i64** where) {
  if (threadIdx.x != 0) return;
  const i64* block = *where;
  if (block[4]) *where = (const i64*)block[4];
  if (block[0] == 0) return;
  *(volatile i64*)block[2] = now_ns();
  __threadfence_system();
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(block[3]), "l"(block[0]) : "memory");
}
