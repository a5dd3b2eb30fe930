// A product of some rows with a weight, y = x Wᵀ, by Hopper's tensor cores and copy engine.
//
//     feeder   tiles of x and W, a step of 64 inputs at a time ──► stages in shared memory (as far ahead as there is room)
//     workers  GROUPS of four warps, 64 rows each, all with the same tile of W ──► sums in registers ──► out
//
// A block has 64 · GROUPS rows and TILE of the weight's at a time; where tiles of the weight are more than blocks, each has
// several, the next of which is on its way while it leaves what came of the one before. The first stages of W are asked for
// while the kernel before still runs, which writes x and not W. Rows of x that there are none of are left as they lie in
// shared memory: whatever they are, only sums that nobody stores come of them.
//
// IS_GATED: the weight is gates above ups, a tile is some gates, each with its up behind it, and out is act(gate) · up
// [B, N / 2]. Otherwise out is float32 parts [P, B, N] of the summed axis, to be added up by who reads them.
//
// Constants come from rill.models.decode.hopper. Before this stand cuda_device.h, cuda_tiles.h and, made for TILE,
// multiply_tiles().

constexpr int STEP = 64, ROW_BYTES = 2 * STEP;  // of a row, in one step: what a swizzled tile holds
constexpr int ROWS = 64 * GROUPS, X_BYTES = ROWS * ROW_BYTES, W_BYTES = TILE * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int SUMS = TILE / 2;  // of a thread
constexpr int OUT_BYTES = IS_GATED ? 8 * TILE : 0;  // of eight rows of a gated tile, for each warp
static_assert(TILE % 8 == 0, "a tile");

struct Product {
  TensorMap x, weight;
  void* out;
  int rows, num_out, num_tiles, num_steps, x_rows;  // num_out: of out; x_rows: that one block fetches
};

struct Stages {
  char* memory;
  mbarrier *full, *empty;
  DEVICE_MEMBER char* x(int stage) const { return memory + stage * STAGE_BYTES; }
  DEVICE_MEMBER char* weight(int stage) const { return x(stage) + X_BYTES; }
};

DEVICE int first_row() { return block_index_z() * ROWS; }
DEVICE int first_step(const Product& p, int part) { return part * p.num_steps / grid_size_y(); }

DEVICE void fetch_weight(const Product& p, const Stages& s, int stage, int step, int tile) {
  if (IS_GATED) fetch_tiles(s.weight(stage), &p.weight, step * STEP, 0, tile * (TILE / 2), &s.full[stage]);
  else fetch_tile(s.weight(stage), &p.weight, step * STEP, tile * TILE, &s.full[stage]);
}
DEVICE void fetch_x(const Product& p, const Stages& s, int stage, int step) {
  fetch_tile(s.x(stage), &p.x, step * STEP, first_row(), &s.full[stage]);
}

struct Place {
  int stage;
  word turn;
  DEVICE_MEMBER void go_on() { if (++stage == STAGES) stage = 0, ++turn; }
};

DEVICE void feed(const Product& p, const Stages& s, int first, int end) {
  int tile = block_index(), bytes = p.x_rows * ROW_BYTES + W_BYTES;
  int ahead = end - first < STAGES ? end - first : STAGES;
  for (int i = 0; i < ahead; ++i) {
    arrive_expecting(&s.full[i], bytes);
    fetch_weight(p, s, i, first + i, tile);
  }
  await_kernel_before();
  Place at = {};
  for (int i = 0; i < ahead; ++i, at.go_on()) fetch_x(p, s, i, first + i);
  for (int step = first + ahead; tile < p.num_tiles; tile += grid_size_x(), step = first)
    for (; step < end; ++step, at.go_on()) {
      if (at.turn > 0) await(&s.empty[at.stage], (at.turn - 1) & 1);
      arrive_expecting(&s.full[at.stage], bytes);
      fetch_weight(p, s, at.stage, step, tile);
      fetch_x(p, s, at.stage, step);
    }
}

DEVICE void multiply(const Stages& s, int count, int group, int thread, Place& at, float (&sums)[SUMS]) {
  int before = 0;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < count; ++i, at.go_on()) {
    await(&s.full[at.stage], at.turn & 1);
    tile_address x = tile_at(s.x(at.stage) + group * 64 * ROW_BYTES), weight = tile_at(s.weight(at.stage));
    begin_tiles();
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) multiply_tiles(sums, x + k * 2, weight + k * 2);  // 32 bytes further
    end_tiles();
    await_tiles<1>();  // of the step before
    if (i > 0 && thread % 128 == 0) arrive(&s.empty[before]);
    before = at.stage;
  }
  await_tiles<0>();
  if (thread % 128 == 0) arrive(&s.empty[before]);
#pragma unroll
  for (int i = 0; i < SUMS; ++i) hold(sums[i]);
}

DEVICE bf16 activated(word gate_and_up) {
  float g = low_of(gate_and_up);
  float z = IS_GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
  word act = packed(quotient(g, 1.0f + exponential(-z)), 0.0f);
  return (bf16)packed(low_of(act) * high_of(gate_and_up), 0.0f);
}

// A thread holds of rows r and r + 8 of its warp columns 8j + 2q and 8j + 2q + 1, q its place among four: a gate and its up.
DEVICE void leave_gated(const Product& p, char* room, int tile, int thread, float (&sums)[SUMS]) {
  constexpr int WIDTH = TILE / 2, PIECES = WIDTH / 4;  // of 8 bytes
  int lane = thread % 32, first = first_row() + thread / 32 * 16, column = tile * WIDTH;
  bf16* mine = (bf16*)(room + thread / 32 * OUT_BYTES);
#pragma unroll
  for (int half = 0; half < 2; ++half, first += 8) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j)
      mine[lane / 4 * WIDTH + 4 * j + lane % 4] = activated(packed(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]));
    sync_warp();
    for (int i = lane; i < 8 * PIECES; i += 32) {
      int row = first + i / PIECES, at = column + i % PIECES * 4;
      bf16* to = (bf16*)p.out + (long long)row * p.num_out + at;
      if (row < p.rows && at < p.num_out) *(uint2*)to = ((const uint2*)mine)[i];
    }
    sync_warp();
  }
}

DEVICE void leave_part(const Product& p, int part, int tile, int thread, float (&sums)[SUMS]) {
  int lane = thread % 32, row = first_row() + thread / 32 * 16 + lane / 4, column = tile * TILE + lane % 4 * 2;
  float* to = (float*)p.out + ((long long)part * p.rows + row) * p.num_out + column;
#pragma unroll
  for (int j = 0; j < TILE / 8; ++j) {
    if (column + j * 8 >= p.num_out) continue;
    if (row < p.rows) *(float2*)(to + j * 8) = make_float2(sums[4 * j], sums[4 * j + 1]);
    if (row + 8 < p.rows) *(float2*)(to + j * 8 + 8 * p.num_out) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
}

KERNEL(128 * GROUPS + 32, 1) product(const CONSTANT Product p) {
  char* memory = shared_memory();
  memory += (1024 - shared_address(memory) % 1024) % 1024;
  char* room = memory + STAGES * STAGE_BYTES;
  mbarrier* barriers = (mbarrier*)(room + 4 * GROUPS * OUT_BYTES);
  Stages s = {memory, barriers, barriers + STAGES};
  int thread = thread_index(), part = block_index_y(), first = first_step(p, part), end = first_step(p, part + 1);
  if (thread == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(&s.full[stage], 1);
      init_barrier(&s.empty[stage], GROUPS);
    }
    barriers_are_made();
  }
  sync_threads(0, 128 * GROUPS + 32);
  let_next_kernel_begin();
  if (thread >= 128 * GROUPS) {
    if (thread == 128 * GROUPS) feed(p, s, first, end);
    return;
  }
  Place at = {};
  for (int tile = block_index(); tile < p.num_tiles; tile += grid_size_x()) {
    float sums[SUMS];
    multiply(s, end - first, thread / 128, thread, at, sums);
    await_kernel_before();  // which may read what lies where out is written
    if (IS_GATED) leave_gated(p, room, tile, thread, sums);
    else leave_part(p, part, tile, thread, sums);
  }
}
