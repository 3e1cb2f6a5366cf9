// Recurrent layers whose weights stay on the chip for all steps of a call (GRNN, sections 5 and 6).
//
// A batch tile is TILE_HEIGHT rows. Its hidden units are spread over the blocks of the tile, and within a block over
// work groups; whoever has a unit has all of its gates, so the blocks need nothing from each other but h, once per
// step. The threads of a group share the sum over the hidden units (see tiling.py, which says in NumPy who computes
// what).
//
// Everything that is a machine instruction is in device.cuh; tests put another file in its place and run this one on
// the host. No thread reads what another wrote but through the functions from there, and what they need of barriers is
// here.

// --- the end of a step -----------------------------------------------------------------------------------------------

// Brings h of all units of the tile to every block of it.
template <class P> struct Exchange {
    using Storage = typename P::Storage;
    Storage* state;      // h in shared memory: one buffer, or two where it is written while the other is read
    Storage* global;     // the same in global memory, two buffers; only in regime GRID
    unsigned* arrivals;  // the tile's barrier
    unsigned phase;      // top bit of `arrivals` when the barrier was last open; known to thread 0
    int part;            // which block of the tile this is
    int turn;            // exchanges so far

    DEVICE const Storage* current() const { return state + (P::REGIME == GRID ? 0 : turn % 2) * P::STATE_SIZE; }

    // Offers one value to all blocks of the tile; they have it after `finish`.
    DEVICE void offer(int row, int unit, float value) {
        const int at = (turn + 1) % 2 * P::STATE_SIZE + row * P::STRIDE + unit;
        const Storage stored = to_storage<P::TYPE>(value);
        if constexpr (P::REGIME == GRID) store_global(global + at, stored);
        if constexpr (P::REGIME == BLOCK) store_shared(state + at, stored);
        if constexpr (P::REGIME == CLUSTER)
            for (int peer = 0; peer < P::BLOCKS; ++peer) store_peer(state + at, stored, peer);
    }

    // All blocks have offered what they had, and `current` is that, for the first `rows` rows.
    DEVICE void finish(int rows) {
        ++turn;
        if constexpr (P::REGIME == BLOCK) block_barrier();
        if constexpr (P::REGIME == CLUSTER) cluster_barrier();
        if constexpr (P::REGIME == GRID) {
            grid_barrier();
            const uint4* from = (const uint4*)(global + turn % 2 * P::STATE_SIZE);
            const int count = rows * P::STRIDE * (int)sizeof(Storage) / 16;
#pragma unroll 4
            for (int i = thread_index(); i < count; i += P::THREADS)
                store_shared((uint4*)state + i, load_global(from + i));
            block_barrier();
        }
    }

    // The arrivals of a round add up to the top bit, so it flips when the last block has come and nothing is ever
    // reset. All threads' stores are before the first block barrier, thread 0 releases them, and no thread goes on
    // before thread 0 has seen the flip.
    DEVICE void grid_barrier() {
        block_barrier();
        if (thread_index() == 0) {
            add_release(arrivals, part == 0 ? 0x80000000u - (P::BLOCKS - 1) : 1u);
            await_flip(arrivals, phase);
            phase ^= 0x80000000u;
        }
        block_barrier();
    }
};

// One thread's share of a tile's units and rows, unit by unit within a row.
template <class P> struct Pair {
    int row, unit, column;  // unit: in the layer; column: of gate 0 in the sums
    bool exists;

    DEVICE Pair(int number, int part, int rows) {
        const int index = number * P::THREADS + thread_index(), in_block = index % P::UNITS;
        row = index / P::UNITS;
        unit = part * P::UNITS + in_block;
        column = in_block / P::TILE_WIDTH * P::COLUMNS + in_block % P::TILE_WIDTH;
        exists = row < rows && unit < P::HIDDEN;
    }
};

template <class P> DEVICE float total(const float* sums, const Pair<P>& pair, int gate) {
    const float* at = sums + pair.row * P::SUM_STRIDE + pair.column + gate * P::TILE_WIDTH;
    float value = load_shared(at);
#pragma unroll
    for (int split = 1; split < P::SPLITS; ++split) value += load_shared(at + split * P::TILE_HEIGHT * P::SUM_STRIDE);
    return value;
}

DEVICE float sigmoid(float x) { return divide(1.0f, 1.0f + exponential(-x)); }
DEVICE float tanh_of(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// What a call computes on. px: [rows, GATES * HIDDEN], the inputs' share of the gates with all biases but bias_n, gate
// by gate in PyTorch's order. Step t of row b reads px row px_offset[b] + step_offset[t] and writes y row y_offset[b] +
// step_offset[t]; without step_offset the steps lie one after the other. h_state, c_state: [slots, HIDDEN], read and
// written at slot[b]; c is float32. Rows should be sorted by length, longest first; slots are distinct. c_steps: c of
// every step, in the rows of y, but HIDDEN apart; only an LSTM has it. y and c_steps may be missing.
template <class P> struct Call {
    using Storage = typename P::Storage;
    const Storage* px;
    const int *px_offset, *step_offset, *slot, *length;
    Storage* h_state;
    float* c_state;
    Storage* y;
    const int* y_offset;
    float* c_steps;
    int y_stride;
    const float* bias_n;

    DEVICE int step(int t) const { return step_offset ? load_constant(step_offset + t) : t; }
};

// One tile's rows through time.
template <class P> struct Tile {
    using Storage = typename P::Storage;
    const Call<P>& call;
    Exchange<P>& exchange;
    float* sums;
    const int* lengths;  // in shared memory
    int first_row, rows;
    float h[P::PAIRS], c[P::PAIRS], z[P::PAIRS], x[P::PAIRS][P::GATES];

    DEVICE int row_length(const Pair<P>& pair) const { return pair.exists ? load_shared(lengths + pair.row) : 0; }

    DEVICE void fetch_input(int t) {
#pragma unroll
        for (int i = 0; i < P::PAIRS; ++i) {
            const Pair<P> pair(i, exchange.part, rows);
            if (t >= row_length(pair)) continue;
            const long long at = load_constant(call.px_offset + first_row + pair.row) + call.step(t);
#pragma unroll
            for (int gate = 0; gate < P::GATES; ++gate)
                x[i][gate] =
                    from_storage<P::TYPE>(load_constant(call.px + (at * P::GATES + gate) * P::HIDDEN + pair.unit));
        }
    }

    // --- the GRU whose reset gate acts before the product, with one exchange (GRNN section 5.1) ---
    //
    // The weights of the reset gate are cut by rows: a block multiplies its own units of the new h by them and so has
    // its share of the gate's sums of all units. All shares travel with h. Each block adds them up, for all units.

    DEVICE float* own() const { return sums + (P::OWN_AT - P::SUMS_AT) / 4; }
    DEVICE float* shares(int turn) const {
        return (float*)(exchange.global + 2 * P::STATE_SIZE) + turn % 2 * P::SHARES_SIZE;
    }
    DEVICE Storage* scaled() const { return exchange.state + P::STATE_SIZE; }

    DEVICE void keep_own(const Pair<P>& pair, float value) {
        store_shared(own() + pair.row * P::UNITS + pair.unit - exchange.part * P::UNITS, value);
    }

    DEVICE void offer_first() {
#pragma unroll
        for (int i = 0; i < P::PAIRS; ++i) {
            const Pair<P> pair(i, exchange.part, rows);
            if (row_length(pair) == 0) continue;
            const float first = h[i];
            exchange.offer(pair.row, pair.unit, first);
            keep_own(pair, first);
        }
    }

    DEVICE void offer_shares(const Weights<P>& weights, int active) {
        block_barrier();  // all of own() is there
        float* target = shares(exchange.turn + 1) + exchange.part * P::HIDDEN;
        for (int row = 0; row < active; ++row) {
            float values[P::RESET_UNITS];
#pragma unroll
            for (int k = 0; k < P::RESET_UNITS; ++k) values[k] = 0.0f;
#pragma unroll
            for (int u = 0; u < P::UNITS; ++u) {
                const float x = load_shared(own() + row * P::UNITS + u);
#pragma unroll
                for (int k = 0; k < P::RESET_UNITS; ++k)
                    values[k] = fmaf(weights.reset_weight(k * P::UNITS + u), x, values[k]);
            }
#pragma unroll
            for (int k = 0; k < P::RESET_UNITS; ++k) {
                const int unit = thread_index() + k * P::THREADS;
                if (unit < P::HIDDEN) store_global(target + row * P::BLOCKS * P::HIDDEN + unit, values[k]);
            }
        }
    }

    // Leaves r * h of all units in `scaled`.
    DEVICE void apply_reset(int t, int active) {
        const float* from = shares(exchange.turn);
        for (int i = thread_index(); i < active * P::HIDDEN; i += P::THREADS) {
            const int row = i / P::HIDDEN, unit = i % P::HIDDEN;
            if (t >= load_shared(lengths + row)) continue;
            const long long at = load_constant(call.px_offset + first_row + row) + call.step(t);
            float sum = from_storage<P::TYPE>(load_constant(call.px + at * P::GATES * P::HIDDEN + unit));
            for (int block = 0; block < P::BLOCKS; ++block)
                sum += load_global(from + (row * P::BLOCKS + block) * P::HIDDEN + unit);
            const float whole = from_storage<P::TYPE>(load_shared(exchange.current() + row * P::STRIDE + unit));
            store_shared(scaled() + row * P::STRIDE + unit, to_storage<P::TYPE>(whole * sigmoid(sum)));
        }
        block_barrier();
    }

    DEVICE void emit(const Pair<P>& pair, int i, int t, float value) {
        const Storage stored = to_storage<P::TYPE>(value);
        h[i] = from_storage<P::TYPE>(stored);
        exchange.offer(pair.row, pair.unit, h[i]);
        if constexpr (P::CELL == GRU_ONCE) keep_own(pair, h[i]);
        if (call.y) {
            const long long at = load_constant(call.y_offset + first_row + pair.row) + call.step(t);
            store_global(call.y + at * call.y_stride + pair.unit, stored);
        }
    }

    // The gates of one pair, from what `multiply` has left in the sums.
    DEVICE void combine(const Pair<P>& pair, int i, int t) {
        if constexpr (P::CELL == LSTM) {
            const float input = sigmoid(x[i][0] + total<P>(sums, pair, 0)),
                        forget = sigmoid(x[i][1] + total<P>(sums, pair, 1));
            const float candidate = tanh_of(x[i][2] + total<P>(sums, pair, 2)),
                        output = sigmoid(x[i][3] + total<P>(sums, pair, 3));
            c[i] = forget * c[i] + input * candidate;
            if (call.c_steps) {
                const long long at = load_constant(call.y_offset + first_row + pair.row) + call.step(t);
                store_global(call.c_steps + at * P::HIDDEN + pair.unit, c[i]);
            }
            emit(pair, i, t, output * tanh_of(c[i]));
        } else if constexpr (P::CELL == GRU) {
            const float reset = sigmoid(x[i][0] + total<P>(sums, pair, 0)),
                        update = sigmoid(x[i][1] + total<P>(sums, pair, 1));
            const float product =
                total<P>(sums, pair, 2) + (call.bias_n ? load_constant(call.bias_n + pair.unit) : 0.0f);
            const float candidate = tanh_of(x[i][2] + reset * product);
            emit(pair, i, t, candidate + update * (h[i] - candidate));
        } else if constexpr (P::CELL == GRU_ONCE) {
            const float update = sigmoid(x[i][1] + total<P>(sums, pair, 0));
            const float candidate = tanh_of(x[i][2] + total<P>(sums, pair, 1));
            emit(pair, i, t, candidate + update * (h[i] - candidate));
        } else {
            const float candidate = tanh_of(x[i][2] + total<P>(sums, pair, 2));
            emit(pair, i, t, candidate + z[i] * (h[i] - candidate));
        }
    }

    DEVICE void run(const Weights<P>& weights, int active) {
        fetch_input(0);
        if constexpr (P::CELL == GRU_ONCE) {
            offer_first();
            offer_shares(weights, active);
            exchange.finish(active);
        }
        for (int t = 0; active > 0; ++t) {
            if constexpr (P::CELL == GRU_BEFORE) {
                multiply<P, 0, 2>(weights, exchange.current(), sums, active);
                block_barrier();
#pragma unroll
                for (int i = 0; i < P::PAIRS; ++i) {
                    const Pair<P> pair(i, exchange.part, rows);
                    if (t >= row_length(pair)) continue;
                    z[i] = sigmoid(x[i][1] + total<P>(sums, pair, 1));
                    exchange.offer(pair.row, pair.unit, h[i] * sigmoid(x[i][0] + total<P>(sums, pair, 0)));
                }
                exchange.finish(active);
                multiply<P, 2, 1>(weights, exchange.current(), sums, active);
            } else if constexpr (P::CELL == GRU_ONCE) {
                apply_reset(t, active);
                multiply<P, 0, 1>(weights, exchange.current(), sums, active);
                multiply<P, 1, 1>(weights, scaled(), sums, active);
            } else {
                multiply<P, 0, P::GATES>(weights, exchange.current(), sums, active);
            }
            block_barrier();
#pragma unroll
            for (int i = 0; i < P::PAIRS; ++i) {
                const Pair<P> pair(i, exchange.part, rows);
                if (t < row_length(pair)) combine(pair, i, t);
            }
            while (active > 0 && load_shared(lengths + active - 1) <= t + 1) --active;
            fetch_input(t + 1);
            if constexpr (P::CELL == GRU_ONCE) offer_shares(weights, active);
            exchange.finish(active);
        }
    }

    // Reads the pairs' own state, or writes it back: after the first exchange, when every block has read h for its
    // first step.
    DEVICE void own_state(bool write) {
#pragma unroll
        for (int i = 0; i < P::PAIRS; ++i) {
            const Pair<P> pair(i, exchange.part, rows);
            if (row_length(pair) == 0) continue;
            const long long at = (long long)load_constant(call.slot + first_row + pair.row) * P::HIDDEN + pair.unit;
            if (write)
                store_global(call.h_state + at, to_storage<P::TYPE>(h[i]));
            else
                h[i] = from_storage<P::TYPE>(load_global(call.h_state + at));
            if (P::CELL != LSTM) continue;
            if (write)
                store_global(call.c_state + at, c[i]);
            else
                c[i] = load_global(call.c_state + at);
        }
    }
};

// Reads the lengths and first h of a tile's rows into shared memory; returns one more than the last row that has a
// step.
template <class P>
DEVICE int begin_tile(const Call<P>& call, typename P::Storage* state, int* lengths, int first_row, int rows) {
    for (int row = thread_index(); row < P::TILE_HEIGHT; row += P::THREADS)
        store_shared(lengths + row, row < rows ? load_constant(call.length + first_row + row) : 0);
    block_barrier();
    int active = rows;
    while (active > 0 && load_shared(lengths + active - 1) == 0) --active;
    for (int i = thread_index(); i < active * P::HIDDEN; i += P::THREADS) {
        const int row = i / P::HIDDEN, unit = i % P::HIDDEN;
        const long long from = (long long)load_constant(call.slot + first_row + row) * P::HIDDEN + unit;
        store_shared(state + row * P::STRIDE + unit, load_global(call.h_state + from));
    }
    return active;
}

// Computes `batch` rows. The grid is a number of times BLOCKS blocks, each of which take one tile after the other.
// weights: packed for this instance. exchange: for each of those, two buffers of TILE_HEIGHT * STRIDE, zero beyond
// HIDDEN, and two of SHARES_SIZE; arrivals: one counter each, 32 of them apart, zero before the first call ever. Only regime GRID, which must
// be launched cooperatively, uses the two.
template <int CELL, int TYPE, int REGIME, int HIDDEN, int TILE_WIDTH, int TILE_HEIGHT, int GROUPS, int GROUP_SIZE,
          int ROW_STEP, int SHARED_STEPS>
KERNEL(GROUPS* GROUP_SIZE)
recurrent(const uint4* packed, const float* bias_n, const typename Element<TYPE>::Storage* px, const int* px_offset,
          const int* step_offset, const int* slot, const int* length, typename Element<TYPE>::Storage* h_state,
          float* c_state, typename Element<TYPE>::Storage* y, const int* y_offset, float* c_steps,
          typename Element<TYPE>::Storage* global, unsigned* arrivals, int y_stride, int batch) {
    using P = Plan<CELL, TYPE, REGIME, HIDDEN, TILE_WIDTH, TILE_HEIGHT, GROUPS, GROUP_SIZE, ROW_STEP, SHARED_STEPS>;
    using Storage = typename P::Storage;
    char* shared = shared_memory();
    Storage* state = (Storage*)(shared + P::STATE_AT);
    int* lengths = (int*)(shared + P::LENGTHS_AT);
    const int team = block_index() / P::BLOCKS, teams = num_blocks() / P::BLOCKS;
    const Call<P> call{px,      px_offset, step_offset, slot,    length,   h_state,
                       c_state, y,         y_offset,    c_steps, y_stride, bias_n};
    Exchange<P> exchange{
        state, global + (long long)team * P::EXCHANGE_SIZE, arrivals + 32 * team, 0u, block_index() % P::BLOCKS, 0};
    if (REGIME == GRID && thread_index() == 0) exchange.phase = load_relaxed(exchange.arrivals) & 0x80000000u;

    Weights<P> weights;
    weights.load(packed, (uint4*)shared, exchange.part);
    const uint4 zero = {0u, 0u, 0u, 0u};
    for (int i = thread_index(); i < P::STATE_BUFFERS * P::STATE_SIZE * (int)sizeof(Storage) / 16; i += P::THREADS)
        store_shared((uint4*)state + i, zero);
    if (CELL == GRU_ONCE)
        for (int i = thread_index(); i < TILE_HEIGHT * P::UNITS; i += P::THREADS)
            store_shared((float*)(shared + P::OWN_AT) + i, 0.0f);
    // No block writes into a peer's memory before the peer has begun and cleared it.
    if (REGIME == CLUSTER)
        cluster_barrier();
    else
        block_barrier();

    for (int first_row = team * TILE_HEIGHT; first_row < batch; first_row += teams * TILE_HEIGHT) {
        const int rows = batch - first_row < TILE_HEIGHT ? batch - first_row : TILE_HEIGHT;
        const int active = begin_tile<P>(call, (Storage*)exchange.current(), lengths, first_row, rows);
        Tile<P> tile{call, exchange, (float*)(shared + P::SUMS_AT), lengths, first_row, rows};
        tile.own_state(false);
        block_barrier();
        tile.run(weights, active);
        if (active > 0) tile.own_state(true);
        block_barrier();
    }
}
