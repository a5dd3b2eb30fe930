// Of cuda_layers.cu: what a step is given, how a block shares its memory out, and the products with what stands between.
//
// Axes: B row, E hidden size, H query head, G key/value head, D head dimension.

constexpr int CLUSTER = 4, WARPS = 8, FEEDERS = WARPS / 2, WORKERS = 32 * WARPS;
constexpr int CLUSTERS = BLOCKS / CLUSTER;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int ROWS = 8;  // of x; a step may have fewer
constexpr int OUT_ROWS = (SIZE / 8 + CLUSTERS - 1) / CLUSTERS * 8, OUT_TILES = (OUT_ROWS + 15) / 16;
constexpr int OUT_SUMS = OUT_TILES * 32, OUT_SHARE = OUT_SUMS / CLUSTER;  // of a cluster; of a block
constexpr int HEAD_SHARE = HEAD_SUMS / CLUSTER;

DEVICE constexpr int most(int a, int b) { return a > b ? a : b; }

// Inputs are counted in stripes of 32. A slot of a ring holds three of them of a tile, as one warp reads them.
constexpr int SLOT_STRIPES = 3, PITCH = 64 * SLOT_STRIPES, SLOT_BYTES = 16 * PITCH;
DEVICE constexpr int stripes_of_warp(int stripes) { return (stripes + WARPS - 1) / WARPS; }
constexpr int OUT_STRIPES = HEADS * DIM / 32, DOWN_STRIPES = INNER / 32;
constexpr int OUT_QUARTER = (OUT_STRIPES + CLUSTER - 1) / CLUSTER, DOWN_QUARTER = (DOWN_STRIPES + CLUSTER - 1) / CLUSTER;
constexpr int MAX_STRIPES = stripes_of_warp(most(SIZE / 32, most(OUT_QUARTER, DOWN_QUARTER)));

struct Layer {
  const bf16 *qkv, *qkv_bias, *out, *gate_up, *down, *norm, *mlp_norm, *query_norm, *key_norm, *cos, *sin;
  bf16 *keys, *values;
};

struct Step {
  const Layer* layers;
  bf16* hidden;                // [B, E]: in and out
  const int *positions, *slots, *lengths, *table_rows, *tables;
  bf16 *qkv, *inner;           // what products leave for others
  float *parts, *levels;       // of attention: [piece, head of a group, D], and the logarithms of what they stand for
  word* counters;              // arrivals and exits, zero between launches
  int num_layers, rows, table_stride;
  float eps, head_eps, scale;
};

// Where rows are, and how they are cut for attention: found by every block for itself.
struct Plan {
  int first[ROWS + 1], count[ROWS], length[ROWS], table_row[ROWS], position[ROWS], slot[ROWS];
  int size, total, is_by_cluster;
};

// --- shared memory ------------------------------------------------------------------------------------------------

constexpr int JOINT_BYTES = WARPS * (HEAD_SUMS + 4) * 16;
constexpr int AT_ONCE = 2;  // tiles: their multiplications do not wait for each other
constexpr int MAX_TILES = most(OUT_TILES, JOINT_BYTES / (WARPS * 512) / AT_ONCE * AT_ONCE);  // whose sums there is room for
constexpr int SUM_BYTES = most(MAX_TILES * WARPS * 512, JOINT_BYTES);
constexpr int RECEIVED_BYTES = CLUSTER * most(OUT_SHARE, HEAD_SHARE + 4) * 16;
constexpr int ATTENDED_BYTES = ROWS * 64 * OUT_QUARTER;
static_assert(
    WARPS * SLOTS * (SLOT_BYTES + 16) + SUM_BYTES + RECEIVED_BYTES + ATTENDED_BYTES + ROWS * WARPS * 4 + 8 + (int)sizeof(Plan) <=
        MEMORY_BYTES,
    "too much");
static_assert(SIZE % 32 == 0 && INNER % 32 == 0, "a shape");

struct Memory {
  char* rings;
  float4* sums;      // of each tile and warp, as its lanes hold them; or attention's
  float4* received;  // from the blocks of the cluster
  uint4* attended;   // [B, stripe, 4]: of `out`, this block's inputs
  float* squares;    // [B, warp]
  Plan* plan;
  mbarrier *full, *empty, *arrived;
};

DEVICE Memory memory_of(char* at) {
  Memory m;
  m.rings = at;
  m.sums = (float4*)(at + WARPS * SLOTS * SLOT_BYTES);
  m.received = m.sums + SUM_BYTES / 16;
  m.attended = (uint4*)(m.received + RECEIVED_BYTES / 16);
  m.squares = (float*)(m.attended + ATTENDED_BYTES / 16);
  m.full = (mbarrier*)(m.squares + ROWS * WARPS);
  m.empty = m.full + WARPS * SLOTS;
  m.arrived = m.empty + WARPS * SLOTS;
  m.plan = (Plan*)(m.arrived + 1);
  return m;
}

// A warp's, as it sees it; its feeder takes the same slots in the same order.
struct Ring {
  char* slots;
  mbarrier *full, *empty;
  int index;
  word turn;

  DEVICE_MEMBER void go_on() {
    if (++index == SLOTS) index = 0, ++turn;
  }
  DEVICE_MEMBER const char* await_full() const {
    await(&full[index], turn & 1);
    return slots + index * SLOT_BYTES;
  }
  DEVICE_MEMBER void give_back(int lane) const {
    if (lane == 0) arrive(&empty[index]);
  }
};

DEVICE Ring ring_of(const Memory& m, int warp) {
  return {m.rings + warp * SLOTS * SLOT_BYTES, m.full + warp * SLOTS, m.empty + warp * SLOTS, 0, 0};
}

// --- products -----------------------------------------------------------------------------------------------------

// What one block reads of a weight: tiles, of which row r is the weight's row start(tile) + r, and from r = 8 on `jump`
// further, over stripes [first, end) of the inputs.
struct Part {
  const bf16* weight;
  int tiles, jump, rows, width, first, end;  // rows of all tiles; of a row all inputs

  DEVICE_MEMBER int first_of(int warp) const { return first + warp * (end - first) / WARPS; }
  DEVICE_MEMBER int count_of_warp(int warp) const { return first_of(warp + 1) - first_of(warp); }
  DEVICE_MEMBER int slots() const { return (stripes_of_warp(end - first) + SLOT_STRIPES - 1) / SLOT_STRIPES; }
};

// Of qkv a tile is eight dimensions of a head and those that they are turned with, of gate_up eight gates and their ups.
DEVICE int unit_of(int tile) { return block_index() + tile * BLOCKS; }
DEVICE int qkv_start(int tile) { return unit_of(tile) / HEAD_TILES * DIM + unit_of(tile) % HEAD_TILES * 8; }
DEVICE int onto_start() { return block_index() / CLUSTER * OUT_ROWS; }
DEVICE int units_of(int num_units) { return num_units / BLOCKS + (block_index() < num_units % BLOCKS); }

DEVICE Part normed_part(const Layer& l, bool is_mlp) {
  int tiles = is_mlp ? units_of(INNER / 8) : units_of(QKV / 16);
  return {is_mlp ? l.gate_up : l.qkv, tiles, is_mlp ? INNER - 8 : DIM / 2 - 8, 16 * tiles, SIZE, 0, SIZE / 32};
}
DEVICE int normed_start(bool is_mlp, int tile) { return is_mlp ? 8 * unit_of(tile) : qkv_start(tile); }
DEVICE Part onto_part(const Layer& l, bool is_mlp) {
  int stripes = is_mlp ? DOWN_STRIPES : OUT_STRIPES, rank = block_index() % CLUSTER;
  int rows = SIZE - onto_start() < OUT_ROWS ? SIZE - onto_start() : OUT_ROWS;
  rows = rows > 0 ? rows : 0;
  return {is_mlp ? l.down : l.out, (rows + 15) / 16, 0, rows, 32 * stripes, rank * stripes / CLUSTER, (rank + 1) * stripes / CLUSTER};
}

// A feeder's, for two warps. `ring` is that of the first; the other one's lies behind it and is as far.
template <class Start>
DEVICE void fetch(const Part& part, Start start, Ring& ring, int feeder, int lane, policy keep) {
  constexpr int COPIES = SLOT_BYTES / 512, PIECES = PITCH / 16;  // of 16 bytes to each lane; to a row
  int rows[COPIES], pieces[COPIES], offsets[COPIES];
#pragma unroll
  for (int c = 0; c < COPIES; ++c) {
    rows[c] = (lane + c * 32) / PIECES, pieces[c] = (lane + c * 32) % PIECES;
    offsets[c] = (rows[c] + (rows[c] >= 8 ? part.jump : 0)) * part.width * 2 + pieces[c] * 16;
  }
  int first = part.first_of(feeder * 2), second = part.first_of(feeder * 2 + 1), end = part.first_of(feeder * 2 + 2);
  for (int tile = 0; tile < part.tiles; tile += AT_ONCE) {
    for (int slot = 0; slot < part.slots(); ++slot) {
      for (int now = tile; now < tile + AT_ONCE && now < part.tiles; ++now) {
        const char* weight = (const char*)(part.weight + (long long)start(now) * part.width);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          int at = (which ? second : first) + slot * SLOT_STRIPES, left = ((which ? end : second) - at) * 4;
          int index = ring.index + which * SLOTS;
          if (ring.turn > 0) await(&ring.empty[index], (ring.turn - 1) & 1);
          char* to = ring.slots + index * SLOT_BYTES + lane * 16;
#pragma unroll
          for (int c = 0; c < COPIES; ++c)
            if (pieces[c] < left && now * 16 + rows[c] < part.rows) copy_16(to + c * 512, weight + at * 64 + offsets[c], keep);
          arrive_with_copies(&ring.full[index]);
        }
        ring.go_on();
      }
    }
  }
}

// What a warp holds of the inputs of its block: lane 4g + t of row g eight numbers of each stripe, from 8t on.
struct Inputs {
  uint4 of[MAX_STRIPES];
  int first, count;  // stripes

  DEVICE_MEMBER Inputs(const Part& part, int warp) : first(part.first_of(warp)), count(part.count_of_warp(warp)) {}
  // at(row, column) of its stripes, NUM at most; nothing of rows that are not there.
  template <int NUM, class At>
  DEVICE_MEMBER void load(int num_rows, int lane, At at) {
#pragma unroll
    for (int n = 0; n < NUM; ++n) {
      bool is_there = n < count && lane / 4 < num_rows;
      of[n] = is_there ? at(lane / 4, (first + n) * 32 + lane % 4 * 8) : make_uint4(0, 0, 0, 0);
    }
  }
};

// A warp's sums of tiles [from, to), left in m.sums.
DEVICE void multiply(const Part& part, int from, int to, const Inputs& x, const Memory& m, Ring& ring, int warp, int lane) {
  int num_slots = part.slots();
#pragma unroll 1
  for (int tile = from; tile < to; tile += AT_ONCE) {
    float4 sums[AT_ONCE][2] = {};
#pragma unroll
    for (int slot = 0; slot * SLOT_STRIPES < MAX_STRIPES; ++slot) {
      if (slot >= num_slots) continue;
      Ring held = ring;
      const char* at[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (tile + i < to) at[i] = ring.await_full() + lane / 4 * PITCH + lane % 4 * 16, ring.go_on();
#pragma unroll
      for (int n = 0; n < SLOT_STRIPES; ++n) {
        int stripe = slot * SLOT_STRIPES + n;
        if (stripe >= MAX_STRIPES || stripe >= x.count) continue;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          if (tile + i >= to) continue;
          uint4 a = *(const uint4*)(at[i] + n * 64), b = *(const uint4*)(at[i] + n * 64 + 8 * PITCH), y = x.of[stripe];
          multiply_add(sums[i][0], make_uint4(a.x, b.x, a.y, b.y), make_uint2(y.x, y.y));
          multiply_add(sums[i][1], make_uint4(a.z, b.z, a.w, b.w), make_uint2(y.z, y.w));
        }
      }
      sync_warp();
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (tile + i < to) held.give_back(lane), held.go_on();
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (tile + i < to) m.sums[((tile + i - from) * WARPS + warp) * 32 + lane] = sums[i][0] + sums[i][1];
  }
}

// Item i of the sums of all warps: tile, lane.
DEVICE float4 sum_of(const Memory& m, int i) {
  const float4* from = m.sums + i / 32 * WARPS * 32 + i % 32;
  float4 sum = from[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum = sum + from[warp * 32];
  return sum;
}

DEVICE void workers_meet() { sync_threads(1, WORKERS); }

// All blocks of the launch. What was written before arriving is read behind waiting, by load_16() and its kin: past the
// first cache, so that nobody has to empty it.
struct Grid {
  word* counter;
  word target;
  DEVICE_MEMBER void arrive_all(int thread) {
    workers_meet();
    if (thread == 0) count_up(counter);
    target += BLOCKS;
  }
  DEVICE_MEMBER void wait(int thread) {
    if (thread == 0)
      while (count_of(counter) < target) pause();
    workers_meet();
  }
};

// --- what stands between products ---------------------------------------------------------------------------------

DEVICE float rounded(float x) { return low_of(packed(x, 0.0f)); }
template <class F>
DEVICE uint4 each(uint4 a, uint4 b, F f) {
  return make_uint4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}
template <bool IS_OFFSET_>
DEVICE uint4 normed(uint4 x, float scale, uint4 weight) {
  return each(x, weight, [&](word x, word weight) {
    if (IS_OFFSET_)
      return packed(low_of(x) * scale * (1.0f + low_of(weight)), high_of(x) * scale * (1.0f + high_of(weight)));
    return times(packed(low_of(x) * scale, high_of(x) * scale), weight);
  });
}
DEVICE float square(word x) { return low_of(x) * low_of(x) + high_of(x) * high_of(x); }
DEVICE float squares_of(uint4 x) { return square(x.x) + square(x.y) + (square(x.z) + square(x.w)); }

// x = norm(hidden).
DEVICE void load_normed(const Step& s, const bf16* norm, Inputs& x, const Memory& m, Grid& grid, int warp, int lane) {
  constexpr int NUM = stripes_of_warp(SIZE / 32);
  uint4 weight[NUM];
#pragma unroll
  for (int n = 0; n < NUM; ++n)
    weight[n] = n < x.count ? *(const uint4*)(norm + (x.first + n) * 32 + lane % 4 * 8) : make_uint4(0, 0, 0, 0);
  grid.wait(warp * 32 + lane);
  x.load<NUM>(s.rows, lane, [&](int row, int column) { return load_16(s.hidden + row * SIZE + column); });
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < NUM; ++n) squares += squares_of(x.of[n]);
  squares += shuffle_xor(squares, 1);
  squares += shuffle_xor(squares, 2);
  if (lane % 4 == 0) m.squares[lane / 4 * WARPS + warp] = squares;
  workers_meet();
  const float4* of_row = (const float4*)(m.squares + lane / 4 * WARPS);
  float4 both = of_row[0] + of_row[1];
  float scale = 1.0f / root((both.x + both.y + (both.z + both.w)) / SIZE + s.eps);
#pragma unroll
  for (int n = 0; n < NUM; ++n) x.of[n] = normed<IS_OFFSET>(x.of[n], scale, weight[n]);
}

DEVICE void store(bf16* to, float x) { *to = (bf16)packed(x, 0.0f); }

// Two numbers of a head that are turned with each other, of one row.
DEVICE void leave_pair(const Step& s, const Layer& l, const Plan* plan, int row, int head, int d, float a, float b) {
  a = rounded(a), b = rounded(b);
  bf16* to = s.qkv + row * QKV + head * DIM + d;
  if (!HAS_HEAD_NORMS) {
    if (head < HEADS + KV_HEADS) {
      const bf16 *cos = l.cos + plan->position[row] * DIM + d, *sin = l.sin + plan->position[row] * DIM + d;
      float first = rounded(a * low_of(cos[0])) - rounded(b * low_of(sin[0]));
      b = rounded(b * low_of(cos[DIM / 2])) + rounded(a * low_of(sin[DIM / 2]));
      a = first;
    }
    if (head >= HEADS) {  // into the cache
      if (plan->length[row] == 0) return;
      int kv_head = (head - HEADS) % KV_HEADS;
      to = (head < HEADS + KV_HEADS ? l.keys : l.values) + ((long long)plan->slot[row] * KV_HEADS + kv_head) * DIM + d;
    }
  }
  store(to, a);
  store(to + DIM / 2, b);
}

DEVICE float activated(float gate, float up) {
  float g = rounded(gate);
  float z = IS_GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
  return rounded(g / (1.0f + exponential(-z))) * rounded(up);
}

// Sums of tiles [from, to) of qkv or gate_up become what others read.
DEVICE void leave(const Step& s, const Layer& l, bool is_mlp, int from, int to, const Memory& m, int thread) {
#pragma unroll 1
  for (int i = thread; i < (to - from) * 32; i += WORKERS) {
    int tile = from + i / 32, lane = i % 32, row = lane % 4 * 2;
    if (row >= s.rows) continue;
    bool has_next = row + 1 < s.rows;
    float4 y = sum_of(m, i);
    if (is_mlp) {  // gates above ups
      bf16* at = s.inner + row * INNER + 8 * unit_of(tile) + lane / 4;
      store(at, activated(y.x, y.z));
      if (has_next) store(at + INNER, activated(y.y, y.w));
    } else {
      int start = qkv_start(tile) + lane / 4, head = start / DIM, d = start % DIM;
      float a = l.qkv_bias ? low_of(l.qkv_bias[start]) : 0.0f, b = l.qkv_bias ? low_of(l.qkv_bias[start + DIM / 2]) : 0.0f;
      leave_pair(s, l, m.plan, row, head, d, y.x + a, y.z + b);
      if (has_next) leave_pair(s, l, m.plan, row + 1, head, d, y.y + a, y.w + b);
    }
  }
}

// hidden += what the four blocks of the cluster made of a quarter of the inputs each.
DEVICE void add_to_hidden(const Step& s, const Part& part, const Memory& m, word& turn, int thread) {
  if (part.tiles == 0) return;  // as for the whole cluster
  int rank = block_index() % CLUSTER;
  int item = rank * OUT_SHARE + thread, lane = item % 32, tile = item / 32, row = lane % 4 * 2;
  bf16* at = s.hidden + row * SIZE + onto_start() + tile * 16 + lane / 4;
  auto is_there = [&](int i, int j) { return thread < OUT_SHARE && row + i < s.rows && tile * 16 + j * 8 < part.rows; };
  float before[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) before[i][j] = is_there(i, j) ? low_of(load_2(at + i * SIZE + j * 8)) : 0.0f;
  }
  if (thread == 0) arrive_expecting(m.arrived, OUT_SUMS * 16);
  for (int i = thread; i < OUT_SUMS; i += WORKERS)
    push(m.received + rank * OUT_SHARE + i % OUT_SHARE, i / OUT_SHARE, sum_of(m, i), m.arrived);
  await(m.arrived, turn++ & 1);
  if (thread >= OUT_SHARE) return;
  float4 y = m.received[thread];
#pragma unroll
  for (int from = 1; from < CLUSTER; ++from) y = y + m.received[from * OUT_SHARE + thread];
  if (is_there(0, 0)) store(at, before[0][0] + rounded(y.x));
  if (is_there(1, 0)) store(at + SIZE, before[1][0] + rounded(y.y));
  if (is_there(0, 1)) store(at + 8, before[0][1] + rounded(y.z));
  if (is_there(1, 1)) store(at + SIZE + 8, before[1][1] + rounded(y.w));
}
