// The template's plan, the weights that a thread keeps, and the sums over the hidden units.

enum Cell { LSTM = 0, GRU = 1, GRU_BEFORE = 2, GRU_ONCE = 3 };
enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Regime { BLOCK = 0, CLUSTER = 1, GRID = 2 };

template <int TYPE> struct Element {
    using Storage = unsigned short;
};
template <> struct Element<FLOAT32> {
    using Storage = float;
};

// The template's arguments and what follows from them; KernelConfig in template.py has the same names.
template <int CELL_, int TYPE_, int REGIME_, int HIDDEN_, int TILE_WIDTH_, int TILE_HEIGHT_, int GROUPS_,
          int GROUP_SIZE_, int ROW_STEP_, int SHARED_STEPS_>
struct Plan {
    static constexpr int CELL = CELL_, TYPE = TYPE_, REGIME = REGIME_, HIDDEN = HIDDEN_, TILE_WIDTH = TILE_WIDTH_;
    static constexpr int TILE_HEIGHT = TILE_HEIGHT_, GROUPS = GROUPS_, GROUP_SIZE = GROUP_SIZE_, ROW_STEP = ROW_STEP_;
    static constexpr int SHARED_STEPS = SHARED_STEPS_;
    using Storage = typename Element<TYPE>::Storage;
    static constexpr bool TENSOR = TYPE != FLOAT32;
    static constexpr int GATES = CELL == LSTM ? 4 : 3;
    static constexpr int THREADS = GROUPS * GROUP_SIZE;
    static constexpr int UNITS = GROUPS * TILE_WIDTH;
    static constexpr int BLOCKS = (HIDDEN + UNITS - 1) / UNITS;
    static constexpr int TILED_GATES = CELL == GRU_ONCE ? 2 : GATES;
    static constexpr int COLUMNS = TILED_GATES * TILE_WIDTH;
    static constexpr int SPLITS = GROUP_SIZE > 32 ? GROUP_SIZE / 32 : 1;
    static constexpr int DEPTH = TENSOR ? 32 * SPLITS : 4 * GROUP_SIZE;
    static constexpr int STEPS = (HIDDEN + DEPTH - 1) / DEPTH;
    static constexpr int PADDED = STEPS * DEPTH;
    static constexpr int STRIDE = TENSOR ? PADDED + (96 - PADDED % 64) % 64 : PADDED;
    static constexpr int CHUNKS = TENSOR ? 2 * COLUMNS / 16 : COLUMNS;
    static constexpr int REGISTER_STEPS = STEPS - SHARED_STEPS;
    static constexpr int SUM_STRIDE = GROUPS * COLUMNS + (20 - GROUPS * COLUMNS % 16) % 16;
    static constexpr int PAIRS = (TILE_HEIGHT * UNITS + THREADS - 1) / THREADS;
    static constexpr int STATE_BUFFERS = REGIME == GRID && CELL != GRU_ONCE ? 1 : 2;
    static constexpr int STATE_SIZE = TILE_HEIGHT * STRIDE;
    // Of GRU_ONCE: the units of whose reset gate a thread adds up the block's share, and the weights for it.
    static constexpr int RESET_UNITS = CELL == GRU_ONCE ? (HIDDEN + THREADS - 1) / THREADS : 0;
    static constexpr int RESET_CHUNKS = (RESET_UNITS * UNITS + 3) / 4;
    static constexpr int SHARES_SIZE = CELL == GRU_ONCE ? TILE_HEIGHT * BLOCKS * HIDDEN : 0;
    static constexpr int EXCHANGE_SIZE = 2 * (STATE_SIZE + SHARES_SIZE);
    static constexpr int NUM_REGISTER_CHUNKS = REGISTER_STEPS * CHUNKS > 0 ? REGISTER_STEPS * CHUNKS : 1;
    // Shared memory, in bytes from its beginning.
    static constexpr int STATE_AT = SHARED_STEPS * CHUNKS * THREADS * 16;
    static constexpr int SUMS_AT = STATE_AT + STATE_BUFFERS * STATE_SIZE * (int)sizeof(Storage);
    static constexpr int LENGTHS_AT = SUMS_AT + SPLITS * TILE_HEIGHT * SUM_STRIDE * 4;
    static constexpr int OWN_AT = LENGTHS_AT + TILE_HEIGHT * 4;  // of GRU_ONCE: h of the block's own units
};

// What a thread keeps of the weights: one 16-byte chunk per step of the sum and column (or pair of half tensor tiles).
template <class P> struct Weights {
    uint4 in_registers[P::NUM_REGISTER_CHUNKS];
    uint4 reset[P::RESET_CHUNKS > 0 ? P::RESET_CHUNKS : 1];
    const uint4* in_shared;

    DEVICE void load(const uint4* packed, uint4* shared, int part) {
        const uint4* mine =
            packed + (long long)part * (P::STEPS * P::CHUNKS + P::RESET_CHUNKS) * P::THREADS + thread_index();
#pragma unroll
        for (int i = 0; i < P::REGISTER_STEPS * P::CHUNKS; ++i) in_registers[i] = load_constant(mine + i * P::THREADS);
        for (int i = 0; i < P::SHARED_STEPS * P::CHUNKS; ++i)
            store_shared(shared + i * P::THREADS + thread_index(),
                         load_constant(mine + (P::REGISTER_STEPS * P::CHUNKS + i) * P::THREADS));
        in_shared = shared + thread_index();
#pragma unroll
        for (int i = 0; i < P::RESET_CHUNKS; ++i)
            reset[i] = load_constant(mine + (P::STEPS * P::CHUNKS + i) * P::THREADS);
    }

    DEVICE float reset_weight(int number) const {
        const uint4 four = reset[number / 4];
        return as_float(number % 4 == 0 ? four.x : number % 4 == 1 ? four.y : number % 4 == 2 ? four.z : four.w);
    }

    // step and chunk are known when the kernel is compiled, so a register is never addressed by a variable.
    DEVICE uint4 chunk(int step, int chunk) const {
        if (step < P::REGISTER_STEPS) return in_registers[step * P::CHUNKS + chunk];
        return load_shared(in_shared + ((step - P::REGISTER_STEPS) * P::CHUNKS + chunk) * P::THREADS);
    }
};

// --- sums over the hidden units --------------------------------------------------------------------------------------

// Adds up values over the lanes of a group that share a warp. As long as the number of values is even, a lane keeps
// half of them and sends the other half, so that in the end each lane holds few finished sums: values[0 .. returned
// count) are those from `first`.
template <int COUNT, int LANES> struct Reduction {
    static constexpr bool HALVES = COUNT % 2 == 0;
    using Next = Reduction<HALVES ? COUNT / 2 : COUNT, LANES / 2>;
    static constexpr int LEFT = Next::LEFT;

    DEVICE static void run(float* values, int lane, int& first, bool& owner) {
        const bool upper = (lane & (LANES / 2)) != 0;
        if (HALVES) {
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) {
                const float kept = upper ? values[COUNT / 2 + i] : values[i];
                const float sent = upper ? values[i] : values[COUNT / 2 + i];
                values[i] = kept + shuffle_xor(sent, LANES / 2);
            }
            first += upper ? COUNT / 2 : 0;
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) values[i] += shuffle_xor(values[i], LANES / 2);
            owner = owner && !upper;
        }
        Next::run(values, lane, first, owner);
    }
};
template <int COUNT> struct Reduction<COUNT, 1> {
    static constexpr int LEFT = COUNT;
    DEVICE static void run(float*, int, int&, bool&) {}
};

// Writes the products of h with columns FIRST to FIRST + COUNT of each group into sums[split][row][column], for all
// active rows.
template <class P, int FIRST, int COUNT>
DEVICE void multiply_scalar(const Weights<P>& weights, const float* h, float* sums, int active) {
    constexpr int ROWS = P::ROW_STEP, LANES = P::GROUP_SIZE < 32 ? P::GROUP_SIZE : 32;
    const int group = thread_index() / P::GROUP_SIZE, lane = thread_index() % P::GROUP_SIZE;
    float* target = sums + lane / 32 * P::TILE_HEIGHT * P::SUM_STRIDE + group * P::COLUMNS + FIRST;
    for (int row = 0; row < active; row += ROWS) {
        float values[COUNT * ROWS];
#pragma unroll
        for (int i = 0; i < COUNT * ROWS; ++i) values[i] = 0.0f;
#pragma unroll
        for (int step = 0; step < P::STEPS; ++step) {
            float4 x[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                x[r] = load_shared((const float4*)(h + (row + r) * P::STRIDE + 4 * (step * P::GROUP_SIZE + lane)));
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const uint4 bits = weights.chunk(step, FIRST + c);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float& sum = values[c * ROWS + r];
                    sum = fmaf(as_float(bits.x), x[r].x, sum);
                    sum = fmaf(as_float(bits.y), x[r].y, sum);
                    sum = fmaf(as_float(bits.z), x[r].z, sum);
                    sum = fmaf(as_float(bits.w), x[r].w, sum);
                }
            }
        }
        int first = 0;
        bool owner = true;
        Reduction<COUNT * ROWS, LANES>::run(values, lane, first, owner);
#pragma unroll
        for (int i = 0; i < Reduction<COUNT * ROWS, LANES>::LEFT; ++i)
            if (owner)
                store_shared(target + (row + (first + i) % ROWS) * P::SUM_STRIDE + (first + i) / ROWS, values[i]);
    }
}

// The same on tensor cores: a group is SPLITS warps, each with its part of the sum. A lane loads eight neighbouring
// units of h at once and calls them what two mma take them for; the weights are packed in that order, and a sum does
// not mind.
template <class P, int FIRST, int COUNT>
DEVICE void multiply_tensor(const Weights<P>& weights, const unsigned short* h, float* sums, int active) {
    constexpr int TILES = COUNT / 16, FIRST_TILE = FIRST / 16, ROW_TILES = P::ROW_STEP / 8;
    const int group = thread_index() / P::GROUP_SIZE, split = thread_index() % P::GROUP_SIZE / 32,
              lane = thread_index() % 32;
    float* target = sums + split * P::TILE_HEIGHT * P::SUM_STRIDE + group * P::COLUMNS + FIRST + lane / 4;
    for (int row = 0; row < active; row += P::ROW_STEP) {
        float values[TILES][ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
                values[m][n][0] = values[m][n][1] = values[m][n][2] = values[m][n][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < P::STEPS; ++step) {
            const unsigned short* from =
                h + (row + lane / 4) * P::STRIDE + 32 * (step * P::SPLITS + split) + 8 * (lane % 4);
            uint4 x[ROW_TILES];
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) x[n] = load_shared((const uint4*)(from + 8 * n * P::STRIDE));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                const uint4 low = weights.chunk(step, 2 * (FIRST_TILE + m)),
                            high = weights.chunk(step, 2 * (FIRST_TILE + m) + 1);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    multiply_accumulate<P::TYPE>(values[m][n], low, x[n].x, x[n].y);
                    multiply_accumulate<P::TYPE>(values[m][n], high, x[n].z, x[n].w);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
                float* at = target + (row + 8 * n + 2 * (lane % 4)) * P::SUM_STRIDE + 16 * m;
                store_shared(at, values[m][n][0]);
                store_shared(at + P::SUM_STRIDE, values[m][n][1]);
                store_shared(at + 8, values[m][n][2]);
                store_shared(at + P::SUM_STRIDE + 8, values[m][n][3]);
            }
    }
}

template <class P, int FIRST, int COUNT>
DEVICE void multiply(const Weights<P>& weights, const typename P::Storage* h, float* sums, int active) {
    if constexpr (P::TENSOR)
        multiply_tensor<P, FIRST * P::TILE_WIDTH, COUNT * P::TILE_WIDTH>(weights, h, sums, active);
    else
        multiply_scalar<P, FIRST * P::TILE_WIDTH, COUNT * P::TILE_WIDTH>(weights, h, sums, active);
}
