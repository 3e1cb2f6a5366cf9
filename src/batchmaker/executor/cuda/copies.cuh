// What kernels that copy rows share. Compiled by NVRTC without headers, before the kernels.
typedef long long i64;
typedef unsigned long long u64;

struct alignas(16) Chunk { u64 low, high; };

// Copies `size` bytes; writes zeros if `from` is null. 16 bytes at a time if both addresses are aligned for this.
static __device__ void copy_row(char* to, const char* from, i64 size) {
  i64 done = 0;
  if ((((u64)to | (u64)from) & 15) == 0) {
    const Chunk zero = {0, 0};
    for (i64 i = threadIdx.x; i < size / 16; i += blockDim.x)
      ((Chunk*)to)[i] = from ? ((const Chunk*)from)[i] : zero;
    done = size / 16 * 16;
  }
  for (i64 i = done + threadIdx.x; i < size; i += blockDim.x) to[i] = from ? from[i] : (char)0;
}
