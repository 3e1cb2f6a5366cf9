// What device.cuh is on a GPU, on the host: recurrent.cu runs on it unchanged.
//
// Each thread is a fibre. Fibres run one at a time, in an order that a seed decides, and wait in queues, never by
// polling. One block and some of the threads are left behind as far as the others can go without them, and others after
// a while. Memory is adversarial. What a thread stores is seen
//   - by itself at once;
//   - by its block after a block barrier, by its cluster's shared memories after a cluster barrier;
//   - by everybody after a release at gpu scope by a thread of the block that has seen it;
//   - and, at the seed's whim, by everybody at once, so that storing too early is found out as well as reading too
//   early.
// A block may keep a value of global memory that it has read until one of its threads acquires. Two threads that store
// to one place without a barrier in between are an error, and so are a deadlock, a warp that parts ways, and an address
// outside of its buffer.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#define DEVICE inline
#define KERNEL(threads) void

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emulation {

// Memory is kept in places of two bytes, the smallest that the kernel stores.
enum Scope : uint8_t { COMMITTED, THREAD, BLOCK };
struct Place {
    int writer = -1;
    uint16_t value = 0;
    Scope scope = COMMITTED;
};

struct Buffer {
    char* base;
    size_t bytes;
    int block;  // whose shared memory it is; -1 for global memory
    std::vector<Place> places;
};

struct Cached {
    unsigned epoch;
    uint16_t value;
};

struct Warp {
    int arrived = 0;
    int kind = 0;
    float sent[32];
    float received[32];
    float* sums[32];
    uint32_t a[32][4], b[32][2];
};

struct Fibre {
    ucontext_t start;
    jmp_buf here;
    bool started = false, done = false;
    int thread, block, lane;
    Warp* warp;
};

struct Block {
    int arrived = 0;
    std::vector<int> waiting;
    std::vector<std::pair<Buffer*, size_t>> stored;  // by its threads, scope THREAD
    std::vector<std::pair<Buffer*, size_t>> shared;  // known to all of its threads, scope BLOCK
    std::unordered_map<const void*, Cached> cache;
    unsigned epoch = 0;
};

struct Waiter {
    int fibre;
    const unsigned* counter;
    unsigned phase;
};

struct Machine {
    int num_blocks, num_threads, cluster;
    std::mt19937 random;
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Buffer*> shared_memories;
    std::vector<Block> blocks;
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<std::vector<int>> cluster_waiting;
    std::vector<std::vector<int>> warp_waiting;
    std::vector<Waiter> waiters;
    std::vector<int> runnable;
    std::function<void()> kernel;
    std::string error;
    jmp_buf scheduler;
    int current = -1;
};

inline Machine* machine;
inline Fibre& self() { return machine->fibres[machine->current]; }

inline void to_scheduler() {
    if (_setjmp(self().here) == 0) _longjmp(machine->scheduler, 1);
}
[[noreturn]] inline void fail(const std::string& message) {
    machine->error =
        message + " (block " + std::to_string(self().block) + ", thread " + std::to_string(self().thread) + ")";
    _longjmp(machine->scheduler, 1);
}
inline void wake(std::vector<int>& waiting) {
    machine->runnable.insert(machine->runnable.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

// --- memory ----------------------------------------------------------------------------------------------------------

inline Buffer* find(const void* p, size_t bytes) {
    for (auto& buffer : machine->buffers)
        if ((const char*)p >= buffer->base && (const char*)p + bytes <= buffer->base + buffer->bytes)
            return buffer.get();
    fail("an address outside of all buffers");
}

inline void commit(Buffer* buffer, size_t at) {
    Place& place = buffer->places[at];
    if (place.scope == COMMITTED) return;
    std::memcpy(buffer->base + 2 * at, &place.value, 2);
    machine->blocks[place.writer / machine->num_threads].cache.erase(buffer->base + 2 * at);
    place.scope = COMMITTED;
}

inline void store(void* p, const void* value, size_t bytes, bool to_peer = false) {
    Buffer* buffer = find(p, bytes);
    Block& block = machine->blocks[self().block];
    if (buffer->block >= 0 && buffer->block != self().block && !to_peer)
        fail("a store to another block's shared memory");
    const bool early = machine->random() % 2 == 0;
    for (size_t i = 0; i < bytes / 2; ++i) {
        const size_t at = ((char*)p - buffer->base) / 2 + i;
        Place& place = buffer->places[at];
        if (place.scope == THREAD && place.writer != machine->current)
            fail("two threads store to one place without a barrier");
        const bool listed = place.scope == THREAD;
        std::memcpy(&place.value, (const char*)value + 2 * i, 2);
        place.writer = machine->current;
        place.scope = THREAD;
        if (early) std::memcpy(buffer->base + 2 * at, &place.value, 2);
        if (!listed) block.stored.emplace_back(buffer, at);
    }
}

inline void load(const void* p, void* value, size_t bytes, bool cached) {
    Buffer* buffer = find(p, bytes);
    Block& block = machine->blocks[self().block];
    if (buffer->block >= 0 && buffer->block != self().block) fail("a load from another block's shared memory");
    for (size_t i = 0; i < bytes / 2; ++i) {
        const size_t at = ((const char*)p - buffer->base) / 2 + i;
        const Place& place = buffer->places[at];
        const bool own = place.scope == THREAD && place.writer == machine->current;
        const bool of_block = place.scope == BLOCK && place.writer / machine->num_threads == self().block;
        uint16_t found;
        if (own || of_block) {
            found = place.value;
        } else {
            std::memcpy(&found, buffer->base + 2 * at, 2);
            if (cached) {
                Cached& kept = block.cache.try_emplace(buffer->base + 2 * at, Cached{block.epoch, found}).first->second;
                if (kept.epoch != block.epoch) kept = Cached{block.epoch, found};
                found = kept.value;
            }
        }
        std::memcpy((char*)value + 2 * i, &found, 2);
    }
}

// What the block's threads have stored is now known to all of them; in its own shared memory that is everybody.
inline void share(Block& block, int number) {
    for (auto& [buffer, at] : block.stored) {
        if (buffer->block == number) {
            commit(buffer, at);
        } else if (buffer->places[at].scope == THREAD) {
            buffer->places[at].scope = BLOCK;
            block.shared.emplace_back(buffer, at);
        }
    }
    block.stored.clear();
}

inline void publish(Block& block) {
    for (auto& [buffer, at] : block.shared) {
        const Place& place = buffer->places[at];
        if (place.scope == BLOCK && place.writer / machine->num_threads == self().block) commit(buffer, at);
    }
    block.shared.clear();
    std::vector<std::pair<Buffer*, size_t>> others;
    for (auto& entry : block.stored)
        if (entry.first->places[entry.second].writer == machine->current)
            commit(entry.first, entry.second);
        else
            others.push_back(entry);
    block.stored.swap(others);
}

// --- barriers --------------------------------------------------------------------------------------------------------

inline void block_barrier() {
    Block& block = machine->blocks[self().block];
    block.waiting.push_back(machine->current);
    if ((int)block.waiting.size() == machine->num_threads) {
        share(block, self().block);
        wake(block.waiting);
    }
    to_scheduler();
}

inline void cluster_barrier() {
    const int number = self().block / machine->cluster;
    auto& waiting = machine->cluster_waiting[number];
    waiting.push_back(machine->current);
    if ((int)waiting.size() == machine->num_threads * machine->cluster) {
        for (int i = number * machine->cluster; i < (number + 1) * machine->cluster; ++i) {
            Block& block = machine->blocks[i];
            share(block, i);
            for (auto& [buffer, at] : block.shared)
                if (buffer->block >= 0) commit(buffer, at);
            block.shared.erase(std::remove_if(block.shared.begin(), block.shared.end(),
                                              [](auto& entry) { return entry.first->block >= 0; }),
                               block.shared.end());
        }
        wake(waiting);
    }
    to_scheduler();
}

inline void add(unsigned* counter, unsigned value, bool release) {
    find(counter, 4);
    if (release) publish(machine->blocks[self().block]);
    *counter += value;
    auto& waiters = machine->waiters;
    for (size_t i = 0; i < waiters.size();) {
        if (waiters[i].counter == counter && ((*counter ^ waiters[i].phase) & 0x80000000u)) {
            machine->runnable.push_back(waiters[i].fibre);
            waiters[i] = waiters.back();
            waiters.pop_back();
        } else {
            ++i;
        }
    }
    machine->runnable.push_back(machine->current);
    to_scheduler();
}

inline void await(const unsigned* counter, unsigned phase, bool acquire) {
    find(counter, 4);
    if (!((*counter ^ phase) & 0x80000000u)) {
        machine->waiters.push_back({machine->current, counter, phase});
        to_scheduler();
    }
    if (acquire) ++machine->blocks[self().block].epoch;
}

// --- warps -----------------------------------------------------------------------------------------------------------

// Waits for the whole warp; `meet` runs once, when all lanes have come. kind: what they do, which must be the same.
template <class F> void with_warp(int kind, F meet) {
    Warp& warp = *self().warp;
    const int number = &warp - machine->warps.data();
    if (warp.arrived > 0 && warp.kind != kind) fail("the lanes of a warp do different things");
    warp.kind = kind;
    machine->warp_waiting[number].push_back(machine->current);
    if (++warp.arrived == 32) {
        meet(warp);
        warp.arrived = 0;
        wake(machine->warp_waiting[number]);
    }
    to_scheduler();
}

inline void entry() {
    machine->kernel();
    self().done = true;
    _longjmp(machine->scheduler, 1);
}

inline std::string run(int num_blocks, int num_threads, int cluster, size_t shared_bytes, unsigned seed,
                       const std::vector<std::pair<void*, size_t>>& global, std::function<void()> kernel) {
    constexpr size_t STACK = 1 << 16;
    const size_t all_stacks = STACK * num_blocks * num_threads;
    char* const stacks =
        (char*)mmap(nullptr, all_stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return "no memory for the stacks of all threads";
    Machine here{};
    machine = &here;
    here.num_blocks = num_blocks, here.num_threads = num_threads, here.cluster = cluster;
    here.random.seed(seed);
    here.kernel = std::move(kernel);
    for (auto& [base, bytes] : global)
        if (base)
            here.buffers.push_back(
                std::make_unique<Buffer>(Buffer{(char*)base, bytes, -1, std::vector<Place>(bytes / 2)}));
    std::vector<std::unique_ptr<uint4[]>> memories;
    for (int i = 0; i < num_blocks; ++i) {
        memories.emplace_back(new uint4[shared_bytes / 16 + 1]);
        std::memset(memories.back().get(), 0xff, shared_bytes);  // 0xff.. is not a number in every type
        here.buffers.push_back(std::make_unique<Buffer>(
            Buffer{(char*)memories.back().get(), shared_bytes, i, std::vector<Place>(shared_bytes / 2)}));
        here.shared_memories.push_back(here.buffers.back().get());
    }
    here.blocks.resize(num_blocks);
    here.warps.resize(num_blocks * num_threads / 32);
    here.warp_waiting.resize(here.warps.size());
    here.cluster_waiting.resize(num_blocks / cluster);
    here.fibres.resize(num_blocks * num_threads);
    for (int i = 0; i < num_blocks * num_threads; ++i) {
        Fibre& fibre = here.fibres[i];
        fibre.thread = i % num_threads, fibre.block = i / num_threads, fibre.lane = i % 32,
        fibre.warp = &here.warps[i / 32];
        getcontext(&fibre.start);
        fibre.start.uc_stack.ss_sp = stacks + STACK * i;
        fibre.start.uc_stack.ss_size = STACK;
        fibre.start.uc_link = nullptr;
        makecontext(&fibre.start, entry, 0);
        here.runnable.push_back(i);
    }
    std::vector<bool> slow(here.fibres.size());
    int slow_block = here.random() % num_blocks, same_block = 1 << (14 + here.random() % 3), same_threads = 0;
    while (!here.runnable.empty() && here.error.empty()) {
        if (same_block-- == 0) slow_block = here.random() % num_blocks, same_block = 1 << (14 + here.random() % 3);
        if (same_threads-- == 0) {
            for (size_t i = 0; i < slow.size(); ++i) slow[i] = here.random() % 4 == 0;
            same_threads = 1 << (8 + here.random() % 4);
        }
        auto slowness = [&](size_t at) {
            const int fibre = here.runnable[at];
            return 2 * (here.fibres[fibre].block == slow_block) + slow[fibre];
        };
        size_t pick = here.random() % here.runnable.size();
        for (int tries = 0; tries < 16 && slowness(pick); ++tries) {
            const size_t other = here.random() % here.runnable.size();
            if (slowness(other) < slowness(pick)) pick = other;
        }
        here.current = here.runnable[pick];
        here.runnable[pick] = here.runnable.back();
        here.runnable.pop_back();
        if (_setjmp(here.scheduler) == 0) {
            Fibre& fibre = here.fibres[here.current];
            if (fibre.started) _longjmp(fibre.here, 1);
            fibre.started = true;
            setcontext(&fibre.start);
        }
    }
    if (here.error.empty())
        for (auto& fibre : here.fibres)
            if (!fibre.done) {
                here.error = "deadlock: block " + std::to_string(fibre.block) + ", thread " +
                             std::to_string(fibre.thread) + " waits for ever";
                break;
            }
    for (auto& buffer : here.buffers)
        for (size_t at = 0; at < buffer->places.size(); ++at) commit(buffer.get(), at);
    munmap(stacks, all_stacks);
    machine = nullptr;
    return here.error;
}

}  // namespace emulation
