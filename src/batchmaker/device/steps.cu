// Kernels of a device that schedules itself: requests enter, steps take what is ready, and what they finish makes other
// nodes ready. Compiled by NVRTC after the constants of layout.py and copies.cuh; tests compile it for the CPU.
//
// Races. Rings are popped in `begin_step` alone, by one thread, and pushed in `enter` and `finish` alone: kernels run
// one after the other. A push never reaches a place that the present step still reads: the ring of nodes holds all entries
// in flight of its type, and an entry is pushed there once; that of begun runs holds two largest batches, and no more
// runs are begun at once than fit into one. Entries of one step are different ones; what several may change at once are
// MISSING of a common reader, LEFT of a common request, tails, and ENDED: atomics.

static __device__ __forceinline__ i64 add(i64* number, i64 more) { return (i64)atomicAdd((u64*)number, (u64)more); }

static __device__ i64* of_type(const i64* core, i64 type) {
  return (i64*)core[CORE_BOARD] + BOARD_WORDS + type * TYPE_WORDS;
}

// The place of number n in a ring of a type: of its begun runs, or of its other nodes.
static __device__ i64* place(i64* of, bool runs, i64 n) {
  return (i64*)of[TYPE_RINGS] + (runs ? 0 : of[TYPE_SIZE]) + n % of[TYPE_SIZE];
}

static __device__ void push(const i64* core, i64* entry, bool runs) {
  i64* of = of_type(core, entry[ENTRY_TYPE]);
  const i64 n = add(&of[runs ? TYPE_RUNS_TAIL : TYPE_NODES_TAIL], 1);
  *place(of, runs, n) = entry - (i64*)core[CORE_ARENA];
}

// The entry in a row of the present step; null if the row is padding.
static __device__ i64* entry_of(const i64* core, i64 type, i64 row) {
  i64* of = of_type(core, type);
  const i64 runs = of[TYPE_NUM_RUNS];
  if (row >= runs + of[TYPE_NUM_NODES]) return nullptr;
  const i64* at = row < runs ? place(of, true, of[TYPE_FIRST_RUN] + row) : place(of, false, of[TYPE_FIRST_NODE] + row - runs);
  return (i64*)core[CORE_ARENA] + *at;
}

// One block for each letter. A request is copied into the arena, and its entries that wait for nothing are ready; or a
// request is cancelled. A letter that cancels comes in a later mail than the request.
extern "C" __global__ void enter(const i64* core, const i64* mail, const i64* letters) {
  const i64* letter = letters + blockIdx.x * LETTER_WORDS;
  i64* request = (i64*)((char*)core[CORE_ARENA] + letter[LETTER_WHERE]);
  const i64 count = letter[LETTER_COUNT];
  if (count == 0) {
    if (threadIdx.x == 0) request[REQUEST_CANCELLED] = 1;
    return;
  }
  const i64* words = mail + letter[LETTER_FROM];
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) request[i] = words[i];
  __syncthreads();
  for (i64 i = threadIdx.x; i < words[REQUEST_NUM_READY]; i += blockDim.x)
    push(core, request + words[words[REQUEST_READY] + i], false);
}

// The step takes up to `size` entries of a type: begun runs first, so few runs are begun at once.
extern "C" __global__ void begin_step(const i64* core, i64 type, i64 size) {
  if (threadIdx.x != 0) return;
  i64* board = (i64*)core[CORE_BOARD];
  i64* of = of_type(core, type);
  i64 room = board[BOARD_PAUSED] ? 0 : size;
  i64 runs = of[TYPE_RUNS_TAIL] - of[TYPE_RUNS_HEAD], nodes = of[TYPE_NODES_TAIL] - of[TYPE_NODES_HEAD];
  runs = runs < room ? runs : room;
  room -= runs;
  nodes = nodes < room ? nodes : room;
  of[TYPE_FIRST_RUN] = of[TYPE_RUNS_HEAD];
  of[TYPE_NUM_RUNS] = runs;
  of[TYPE_RUNS_HEAD] += runs;
  of[TYPE_FIRST_NODE] = of[TYPE_NODES_HEAD];
  of[TYPE_NUM_NODES] = nodes;
  of[TYPE_NODES_HEAD] += nodes;
  board[BOARD_CELLS] += runs + nodes;
  board[BOARD_STEPS] += runs + nodes > 0;
}

// One block for each row and input: the grid is (rows, inputs). columns: [inputs][2], the address of each buffer and the
// bytes of a row. Rows of padding keep what was there. Those of cancelled requests are zeros, since what they would read
// may never have been written, and a cell may take it for a token.
extern "C" __global__ void gather(const i64* core, i64 type, const i64* columns) {
  const i64 row = blockIdx.x, k = blockIdx.y;
  const i64* entry = entry_of(core, type, row);
  if (!entry) return;
  const i64* request = entry - entry[ENTRY_HOME];
  const i64* input = entry + ENTRY_WORDS + k * INPUT_WORDS;
  const i64 step = entry[ENTRY_STEP], stride = input[INPUT_STRIDE];
  i64 where = input[INPUT_WHERE];
  if (step > 0 && input[INPUT_STATE] != NONE)
    where = input[INPUT_STATE];
  else if (where != NONE)
    where = stride == LISTED ? ((const i64*)((const char*)request + where))[step] : where + step * stride;
  const i64 size = columns[2 * k + 1];
  const char* from = where == NONE || request[REQUEST_CANCELLED] ? nullptr : (const char*)request + where;
  copy_row((char*)columns[2 * k] + row * size, from, size);
}

// A row of an output that is a whole number of 4 or 8 bytes.
static __device__ i64 whole_number(const i64* columns, i64 output, i64 row) {
  const char* at = (const char*)columns[2 * output] + row * columns[2 * output + 1];
  return columns[2 * output + 1] == 4 ? *(const int*)at : *(const i64*)at;
}

// One block for each row. Writes the outputs where they are wanted. A run that has more steps is ready again; otherwise
// the entry is done, also if its request is cancelled: its readers may be ready, and its request may have ended.
extern "C" __global__ void finish(const i64* core, i64 type, const i64* columns, i64 inputs, i64 outputs) {
  const i64 row = blockIdx.x;
  i64* entry = entry_of(core, type, row);
  if (!entry) return;
  i64* request = entry - entry[ENTRY_HOME];
  const i64 step = entry[ENTRY_STEP];
  const bool cancelled = request[REQUEST_CANCELLED];
  const i64 until = entry[ENTRY_UNTIL];
  const bool ends = cancelled || step + 1 >= entry[ENTRY_STEPS] ||
                    (until != NONE && whole_number(columns, until, row) == entry[ENTRY_VALUE]);
  for (i64 k = 0; k < outputs && !cancelled; ++k) {
    const i64* output = entry + ENTRY_WORDS + inputs * INPUT_WORDS + k * OUTPUT_WORDS;
    const i64 size = columns[2 * k + 1];
    const char* from = (const char*)columns[2 * k] + row * size;
    const i64 kept = output[OUTPUT_KEPT], kept_stride = output[OUTPUT_KEPT_STRIDE];
    const i64 answer = output[OUTPUT_ANSWER], answer_stride = output[OUTPUT_ANSWER_STRIDE];
    if (kept != NONE && (ends || kept_stride != AT_END))
      copy_row((char*)request + kept + (kept_stride == AT_END ? 0 : step * kept_stride), from, size);
    if (output[OUTPUT_STATE] != NONE && !ends) copy_row((char*)request + output[OUTPUT_STATE], from, size);
    if (answer != NONE && (ends || answer_stride != AT_END))
      copy_row((char*)request[REQUEST_ANSWER] + answer + (answer_stride == AT_END ? 0 : step * answer_stride), from, size);
  }
  __syncthreads();  // all threads have read the step
  if (!ends) {
    if (threadIdx.x != 0) return;
    entry[ENTRY_STEP] = step + 1;
    push(core, entry, true);
    return;
  }
  for (i64 i = threadIdx.x; i < entry[ENTRY_NUM_READERS]; i += blockDim.x) {
    i64* reader = request + request[entry[ENTRY_READERS] + i];
    if (add(&reader[ENTRY_MISSING], -1) == 1) push(core, reader, false);
  }
  if (threadIdx.x != 0) return;
  if (!cancelled && entry[ENTRY_LENGTH] != NONE)
    *(i64*)((char*)request[REQUEST_ANSWER] + entry[ENTRY_LENGTH]) = step + 1;
  if (add(&request[REQUEST_LEFT], -1) != 1) return;
  const i64 n = add((i64*)core[CORE_BOARD] + BOARD_ENDED, 1);
  ((i64*)core[CORE_FINISHED])[n % core[CORE_NUM_SLOTS]] = request[REQUEST_SLOT];
}

// The end of a task, in one block: the counts go into a page of host memory, then the task's number into the counter. The
// host must see them in this order, and after all results: each thread fences what it wrote before one writes the number.
extern "C" __global__ void report(const i64* core, i64 num_pages) {
  i64* board = (i64*)core[CORE_BOARD];
  if (board[BOARD_PAUSED]) return;
  const i64 number = board[BOARD_TASKS] + 1;
  i64* page = (i64*)core[CORE_PAGES] + number % num_pages * core[CORE_PAGE_WORDS];
  if (threadIdx.x == 0) {
    page[PAGE_ENDED] = board[BOARD_ENDED];
    page[PAGE_CELLS] = board[BOARD_CELLS];
    page[PAGE_STEPS] = board[BOARD_STEPS];
  }
  for (i64 type = threadIdx.x; type < core[CORE_NUM_TYPES]; type += blockDim.x) {
    const i64* of = of_type(core, type);
    page[PAGE_WORDS + 2 * type] = of[TYPE_RUNS_TAIL] - of[TYPE_RUNS_HEAD];
    page[PAGE_WORDS + 2 * type + 1] = of[TYPE_NODES_TAIL] - of[TYPE_NODES_HEAD];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  board[BOARD_TASKS] = number;
  *(volatile i64*)core[CORE_COUNTER] = number;
}
