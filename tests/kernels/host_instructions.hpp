// The functions of device.cuh under the same names, on the emulated machine.
#include "emulation.hpp"

inline int thread_index() { return emulation::self().thread; }
inline int block_index() { return emulation::self().block; }
inline int num_blocks() { return emulation::machine->num_blocks; }
inline char* shared_memory() { return emulation::machine->shared_memories[block_index()]->base; }

template <class T> T load_constant(const T* p) { return *p; }
template <class T> T load_shared(const T* p) {
    T value;
    emulation::load(p, &value, sizeof(T), false);
    return value;
}
template <class T> void store_shared(T* p, T value) { emulation::store(p, &value, sizeof(T)); }
template <class T> T load_global(const T* p) {
    T value;
    emulation::load(p, &value, sizeof(T), true);
    return value;
}
template <class T> void store_global(T* p, T value) { emulation::store(p, &value, sizeof(T)); }
template <class T> void store_peer(T* p, T value, int peer) {
    const int cluster = emulation::machine->cluster, first = block_index() / cluster * cluster;
    auto& memories = emulation::machine->shared_memories;
    emulation::store(memories[first + peer]->base + ((char*)p - memories[block_index()]->base), &value, sizeof(T),
                     true);
}

inline void block_barrier() { emulation::block_barrier(); }
inline void cluster_barrier() { emulation::cluster_barrier(); }
inline void add_release(unsigned* counter, unsigned value) { emulation::add(counter, value, true); }
inline void add_relaxed(unsigned* counter, unsigned value) { emulation::add(counter, value, false); }
inline unsigned load_relaxed(const unsigned* counter) { return *counter; }
inline void await_flip(const unsigned* counter, unsigned phase) { emulation::await(counter, phase, true); }
inline void await_flip_relaxed(const unsigned* counter, unsigned phase) { emulation::await(counter, phase, false); }

inline float as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned as_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float shuffle_xor(float value, int mask) {
    auto& fibre = emulation::self();
    fibre.warp->sent[fibre.lane] = value;
    emulation::with_warp(mask, [mask](emulation::Warp& warp) {
        for (int lane = 0; lane < 32; ++lane) warp.received[lane] = warp.sent[lane ^ mask];
    });
    return fibre.warp->received[fibre.lane];
}
inline float exponential(float x) { return std::exp(x); }
inline float divide(float a, float b) { return a / b; }
using std::fmaf;

template <int TYPE> struct Conversion;
template <> struct Conversion<0> {
    static float narrow(float value) { return value; }
    static float widen(float value) { return value; }
};
template <> struct Conversion<1> {
    static unsigned short narrow(float value) {  // to nearest, ties to even
        const unsigned bits = as_bits(value);
        if (value != value) return 0x7fff;
        return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static float widen(unsigned short bits) { return as_float((unsigned)bits << 16); }
};
template <> struct Conversion<2> {
    static unsigned short narrow(float value) {
        const _Float16 half = (_Float16)value;
        unsigned short bits;
        std::memcpy(&bits, &half, 2);
        return bits;
    }
    static float widen(unsigned short bits) {
        _Float16 half;
        std::memcpy(&half, &bits, 2);
        return (float)half;
    }
};
template <int TYPE> auto to_storage(float value) { return Conversion<TYPE>::narrow(value); }
template <int TYPE, class T> float from_storage(T bits) { return Conversion<TYPE>::widen(bits); }

// The fragments of mma.m16n8k16 as the PTX manual lays them out; the products of one sum are added in the order of k.
template <int TYPE> void multiply_accumulate(float (&sums)[4], uint4 a, unsigned b0, unsigned b1) {
    auto& fibre = emulation::self();
    auto& mine = *fibre.warp;
    mine.sums[fibre.lane] = sums;
    std::memcpy(mine.a[fibre.lane], &a, 16);
    mine.b[fibre.lane][0] = b0, mine.b[fibre.lane][1] = b1;
    emulation::with_warp(100, [](emulation::Warp& warp) {
        float left[16][16], right[16][8];
        auto half = [](unsigned word, int i) { return from_storage<TYPE>((unsigned short)(word >> 16 * i)); };
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) {
                const int row = lane / 4 + (i / 2 % 2) * 8, k = lane % 4 * 2 + i % 2 + (i / 4) * 8;
                left[row][k] = half(warp.a[lane][i / 2], i % 2);
                if (i < 4) right[lane % 4 * 2 + i % 2 + (i / 2) * 8][lane / 4] = half(warp.b[lane][i / 2], i % 2);
            }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
                float& sum = warp.sums[lane][i];
                for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
            }
    });
}
