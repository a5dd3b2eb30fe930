// A product of some rows with a weight, y = x Wᵀ, by Hopper's tensor cores and copy engine.
//
//     feeder   tiles of x and W, a step of 64 inputs at a time ──► stages in shared memory (as far ahead as there is room)
//     workers  GROUPS of four warps, 64 rows each, all with the same tile of W ──► sums in registers ──► out
//
// A block has 64 · GROUPS rows and TILE of the weight's. The first stages of W are asked for while the kernel before still
// runs, which writes x and not W. Rows of x that there are none of are left as they lie in shared memory: whatever they
// are, only sums that nobody stores come of them.
//
// IS_GATED: the weight is gates above ups, a tile is some gates and behind them their ups, and out is act(gate) · up
// [B, N / 2]. Otherwise out is float32 parts [P, B, N] of the summed axis, to be added up by who reads them.
//
// Constants come from rill.models.decode.hopper. Before this stand cuda_device.h, cuda_tiles.h and, made for TILE,
// multiply_tiles().

constexpr int STEP = 64, ROW_BYTES = 2 * STEP;  // of a row, in one step: what a swizzled tile holds
constexpr int ROWS = 64 * GROUPS, X_BYTES = ROWS * ROW_BYTES, W_BYTES = TILE * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int SUMS = TILE / 2;  // of a thread
constexpr int OUT_PITCH = TILE;  // bytes of a row of a gated tile
static_assert(TILE % 8 == 0 && ROWS * OUT_PITCH <= STAGES * STAGE_BYTES, "a tile");

struct Product {
  TensorMap x, weight;
  void* out;
  int rows, num_out, num_steps, x_rows;  // num_out: of out; x_rows: that one block fetches
};

struct Stages {
  char* memory;
  mbarrier *full, *empty;
  DEVICE_MEMBER char* x(int stage) const { return memory + stage * STAGE_BYTES; }
  DEVICE_MEMBER char* weight(int stage) const { return x(stage) + X_BYTES; }
};

DEVICE int first_row() { return block_index_z() * ROWS; }
DEVICE int first_step(const Product& p, int part) { return part * p.num_steps / grid_size_y(); }

DEVICE void fetch_weight(const Product& p, const Stages& s, int stage, int step) {
  if (IS_GATED) fetch_tiles(s.weight(stage), &p.weight, step * STEP, block_index() * (TILE / 2), 0, &s.full[stage]);
  else fetch_tile(s.weight(stage), &p.weight, step * STEP, block_index() * TILE, &s.full[stage]);
}
DEVICE void fetch_x(const Product& p, const Stages& s, int stage, int step) {
  fetch_tile(s.x(stage), &p.x, step * STEP, first_row(), &s.full[stage]);
}

DEVICE void feed(const Product& p, const Stages& s, int first, int end) {
  int ahead = end - first < STAGES ? end - first : STAGES, bytes = p.x_rows * ROW_BYTES + W_BYTES;
  for (int i = 0; i < ahead; ++i) {
    arrive_expecting(&s.full[i], bytes);
    fetch_weight(p, s, i, first + i);
  }
  await_kernel_before();
  for (int i = 0; i < ahead; ++i) fetch_x(p, s, i, first + i);
  int stage = 0;
  word turn = 0;
  for (int step = first + ahead; step < end; ++step) {
    await(&s.empty[stage], turn & 1);
    arrive_expecting(&s.full[stage], bytes);
    fetch_weight(p, s, stage, step);
    fetch_x(p, s, stage, step);
    if (++stage == STAGES) stage = 0, ++turn;
  }
}

DEVICE void multiply(const Stages& s, int count, int group, int thread, float (&sums)[SUMS]) {
  int stage = 0, before = 0;
  word turn = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    await(&s.full[stage], turn & 1);
    tile_address x = tile_at(s.x(stage) + group * 64 * ROW_BYTES), weight = tile_at(s.weight(stage));
    begin_tiles();
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) multiply_tiles(sums, x + k * 2, weight + k * 2);  // 32 bytes further
    end_tiles();
    await_tiles<1>();  // of the step before
    if (i > 0 && thread % 128 == 0) arrive(&s.empty[before]);
    before = stage;
    if (++stage == STAGES) stage = 0, ++turn;
  }
  await_tiles<0>();
#pragma unroll
  for (int i = 0; i < SUMS; ++i) hold(sums[i]);
}

DEVICE float rounded(float x) { return low_of(packed(x, 0.0f)); }
DEVICE float activated(float gate, float up) {
  float g = rounded(gate);
  float z = IS_GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
  return rounded(g / (1.0f + exponential(-z))) * rounded(up);
}

// A thread holds of rows r and r + 8 of its warp columns 8j + 2q and 8j + 2q + 1, q its place among four. The first half of the
// columns are gates. Where that is no multiple of eight, the ups that belong to them are held two places further.
DEVICE void leave_gated(const Product& p, const Stages& s, int thread, float (&sums)[SUMS]) {
  constexpr int HALF = TILE / 2, BEHIND = HALF / 8;
  constexpr bool IS_ELSEWHERE = HALF % 8 != 0;
  int warp = thread / 32, lane = thread % 32, q = lane % 4;
  char* mine = s.memory + warp * 16 * OUT_PITCH;
  sync_threads(1, 128 * GROUPS);  // all have read what lay there
  char* to = mine + lane / 4 * OUT_PITCH + q * 4;
#pragma unroll
  for (int j = 0; j < (HALF + 7) / 8; ++j) {
    float up[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int near = 4 * (j + BEHIND) + i;
      if (!IS_ELSEWHERE) up[i] = sums[near];
      else up[i] = shuffle_xor(q < 2 && near + 4 < SUMS ? sums[near + 4] : sums[near], 2);
    }
    if (IS_ELSEWHERE && j == BEHIND && q >= 2) continue;
    *(word*)(to + j * 16) = packed(activated(sums[4 * j], up[0]), activated(sums[4 * j + 1], up[1]));
    *(word*)(to + j * 16 + 8 * OUT_PITCH) = packed(activated(sums[4 * j + 2], up[2]), activated(sums[4 * j + 3], up[3]));
  }
  sync_warp();
  constexpr int PIECES = TILE / 8;  // of 8 bytes
  int first = first_row() + warp * 16, column = block_index() * HALF;
  bf16* out = (bf16*)p.out;
  for (int i = lane; i < 16 * PIECES; i += 32) {
    int row = first + i / PIECES, at = column + i % PIECES * 4;
    if (row < p.rows && at < p.num_out) *(uint2*)(out + (long long)row * p.num_out + at) = *(const uint2*)(mine + i * 8);
  }
}

DEVICE void leave_part(const Product& p, int part, int thread, float (&sums)[SUMS]) {
  int lane = thread % 32, row = first_row() + thread / 32 * 16 + lane / 4, column = block_index() * TILE + lane % 4 * 2;
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
  Stages s = {memory, (mbarrier*)(memory + STAGES * STAGE_BYTES), (mbarrier*)(memory + STAGES * STAGE_BYTES) + STAGES};
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
  } else {
    float sums[SUMS] = {};
    multiply(s, end - first, thread / 128, thread, sums);
    await_kernel_before();  // which may read what lies where out is written
    if (IS_GATED) leave_gated(p, s, thread, sums);
    else leave_part(p, part, thread, sums);
  }
}
