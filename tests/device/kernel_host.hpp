// What the kernels of the device core need of CUDA, on the host. All threads of all blocks of a launch are fibres. One
// runs at a time, in an order that a seed decides; it may have to let others go on before and after every atomic
// operation, and waits at barriers of its block. A launch in which a block's threads do not all reach a barrier is an
// error.
#include <cstdint>
#include <random>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline

struct Dim {
    unsigned x = 0, y = 0;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {
struct Fibre {
    ucontext_t context;
    Dim block;
    unsigned thread = 0;
    bool done = false, waits = false;
};
static std::vector<Fibre> fibres;
static std::vector<char> stacks;
static ucontext_t scheduler;
static std::mt19937 chance;
static size_t current;
static void (*work)(void*);
static void* work_with;
constexpr size_t STACK = 1 << 14;

inline void give_way() { swapcontext(&fibres[current].context, &scheduler); }
inline void perhaps_give_way() {
    if (chance() % 3 == 0) give_way();
}
inline void begin() {
    work(work_with);
    fibres[current].done = true;
}

// Runs all fibres to their ends; returns what went wrong, or "".
inline std::string run(unsigned gx, unsigned gy, unsigned threads, unsigned seed, void (*w)(void*), void* with) {
    chance.seed(seed);
    work = w, work_with = with;
    fibres.assign(gx * gy * threads, Fibre());
    stacks.resize(fibres.size() * STACK);
    gridDim = {gx, gy}, blockDim = {threads, 1};
    std::vector<size_t> ready;
    for (size_t i = 0; i < fibres.size(); ++i) {
        Fibre& one = fibres[i];
        one.thread = i % threads;
        one.block = {unsigned(i / threads % gx), unsigned(i / threads / gx)};
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = stacks.data() + i * STACK;
        one.context.uc_stack.ss_size = STACK;
        one.context.uc_link = &scheduler;
        makecontext(&one.context, (void (*)())begin, 0);
        ready.push_back(i);
    }
    while (!ready.empty()) {
        const size_t at = chance() % ready.size();
        current = ready[at];
        blockIdx = fibres[current].block, threadIdx = {fibres[current].thread, 0};
        swapcontext(&scheduler, &fibres[current].context);
        if (!fibres[current].done && !fibres[current].waits) continue;
        ready[at] = ready.back();
        ready.pop_back();
        const size_t first = current / threads * threads;
        bool all = true, some = false;
        for (size_t i = first; i < first + threads; ++i) all &= fibres[i].done || fibres[i].waits, some |= fibres[i].waits;
        if (!all || !some) continue;
        for (size_t i = first; i < first + threads; ++i)
            if (fibres[i].done) return "a thread ended before a barrier at which others of its block wait";
        for (size_t i = first; i < first + threads; ++i) fibres[i].waits = false, ready.push_back(i);
    }
    return "";
}

template <typename T> T as(int64_t word) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(word);
    else return static_cast<T>(word);
}
template <typename... A, size_t... I>
void call(void (*kernel)(A...), const int64_t* words, std::index_sequence<I...>) {
    kernel(as<A>(words[I])...);
}
template <typename... A> void call(void (*kernel)(A...), const int64_t* words) {
    call(kernel, words, std::index_sequence_for<A...>());
}
}  // namespace host

inline void __syncthreads() {
    host::fibres[host::current].waits = true;
    host::give_way();
}
inline void __threadfence_system() {}
inline unsigned long long atomicAdd(unsigned long long* number, unsigned long long more) {
    host::perhaps_give_way();
    const unsigned long long before = *number;
    *number += more;
    host::perhaps_give_way();
    return before;
}
