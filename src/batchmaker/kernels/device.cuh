// The machine's instructions that recurrent.cu is written in: sm_80 and later, clusters from sm_90. No headers.

#define DEVICE __device__ __forceinline__
#define KERNEL(threads) __global__ void __launch_bounds__(threads, 1)

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }
DEVICE char* shared_memory() {
    extern __shared__ uint4 dynamic_shared[];
    return (char*)dynamic_shared;
}

// --- memory ----------------------------------------------------------------------------------------------------------

// What nobody writes during a call.
template <class T> DEVICE T load_constant(const T* p) { return __ldg(p); }
// What other threads of the block write, or have written, with a block barrier in between.
template <class T> DEVICE T load_shared(const T* p) { return *p; }
template <class T> DEVICE void store_shared(T* p, T value) { *p = value; }
// What other blocks write, or have written, with a release and an acquire in between. The first-level cache is left
// out.
template <class T> DEVICE T load_global(const T* p) { return __ldcg(p); }
template <class T> DEVICE void store_global(T* p, T value) { *p = value; }

// Stores to where `p`, an address of this block's shared memory, is in the memory of another block of the cluster.
DEVICE unsigned peer_address(const void* p, int peer) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"((unsigned)__cvta_generic_to_shared(p)), "r"(peer));
    return address;
}
DEVICE void store_peer(float* p, float value, int peer) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer_address(p, peer)), "f"(value) : "memory");
}
DEVICE void store_peer(unsigned short* p, unsigned short value, int peer) {
    asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(peer_address(p, peer)), "h"(value) : "memory");
}

// --- barriers --------------------------------------------------------------------------------------------------------

DEVICE void block_barrier() { __syncthreads(); }
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void add_release(unsigned* counter, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE unsigned load_relaxed(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
// Waits until the top bit of the counter is not that of `phase`; what was released before is seen from here on.
DEVICE void await_flip(const unsigned* counter, unsigned phase) {
    unsigned value;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    while (((value ^ phase) & 0x80000000u) == 0u);
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

DEVICE float as_float(unsigned bits) { return __uint_as_float(bits); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float divide(float a, float b) { return __fdividef(a, b); }

template <int TYPE> struct Conversion;
template <> struct Conversion<0> {
    DEVICE static float narrow(float value) { return value; }
    DEVICE static float widen(float value) { return value; }
};
template <> struct Conversion<1> {
    DEVICE static unsigned short narrow(float value) {
        unsigned short bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
    DEVICE static float widen(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
};
template <> struct Conversion<2> {
    DEVICE static unsigned short narrow(float value) {
        unsigned short bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
    DEVICE static float widen(unsigned short bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
template <int TYPE> DEVICE auto to_storage(float value) { return Conversion<TYPE>::narrow(value); }
template <int TYPE, class T> DEVICE float from_storage(T bits) { return Conversion<TYPE>::widen(bits); }

// sums[16 x 8] += a[16 x 16] * b[16 x 8] in the warp's fragments of mma.m16n8k16.
template <int TYPE> DEVICE void multiply_accumulate(float (&sums)[4], uint4 a, unsigned b0, unsigned b1) {
    if constexpr (TYPE == 1)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
