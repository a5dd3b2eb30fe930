// Of cuda_layers.cu: attention of one query to a row over the paged cache, cut into pieces that run side by side, and how
// the pieces of a row are put together where `out` reads them.
//
// Axes: D head dimension, g and t: lane 4g + t.

// Rows are cut so that every cluster has a piece, or every block where there are several rows: a cluster joins its
// pieces at once, but the fewer pieces there are, the longer the longest takes.
DEVICE void make_plan(const Step& s, Plan* plan, int lane) {
  int length = 0;
  if (lane < s.rows) {
    length = s.slots[lane] < CACHE_BLOCK ? 0 : s.lengths[lane];  // the first block is nobody's: a row of padding
    plan->length[lane] = length;
    plan->table_row[lane] = s.table_rows[lane];
    plan->position[lane] = s.positions[lane];
    plan->slot[lane] = s.slots[lane];
  }
  int pairs = 0, longest = 0;
  for (int row = 0; row < s.rows; ++row) {
    int other = shuffle(length, row);
    pairs += other > 0 ? KV_HEADS : 0;
    longest = other > longest ? other : longest;
  }
  bool is_by_cluster = 4 * pairs <= CLUSTERS;
  int teams = is_by_cluster ? CLUSTERS : BLOCKS, least = is_by_cluster ? 512 : 128;
  int rounds = (pairs + teams - 1) / teams;
  int size = least * ((longest + 32 * least - 1) / (32 * least)) * (lane + 1), total = 0;
  for (int row = 0; row < s.rows; ++row) {
    int other = shuffle(length, row);
    if (other > 0) total += (other + size - 1) / size * KV_HEADS;
  }
  word fits = lanes_where(total <= teams * rounds);  // the last one does
  int best = 0;
  while (best < 31 && !(fits >> best & 1)) ++best;
  size = shuffle(size, best);
  int count = length > 0 ? (length + size - 1) / size : 0, first = 0;
  for (int row = 0; row < s.rows; ++row) {
    int other = shuffle(count, row);
    if (lane == 0) plan->first[row] = first, plan->count[row] = other;
    first += other * KV_HEADS;
  }
  if (lane == 0) plan->first[s.rows] = first, plan->size = size, plan->total = first, plan->is_by_cluster = is_by_cluster;
}

struct Piece {
  int row, head, begin, end, first_block, num_blocks;  // blocks of 16 tokens: this block's first and all of the team's
};

// A team's first piece, and how far it is to its next one.
DEVICE int first_piece(const Plan* plan) { return plan->is_by_cluster ? block_index() / CLUSTER : block_index(); }
DEVICE int next_piece(const Plan* plan, int piece) { return piece + (plan->is_by_cluster ? CLUSTERS : BLOCKS); }

DEVICE Piece piece_of(const Plan* plan, int index, int rows) {
  Piece p;
  p.row = 0;
  while (p.row + 1 < rows && index >= plan->first[p.row + 1]) ++p.row;
  int in_row = index - plan->first[p.row], count = plan->count[p.row];
  p.head = in_row / count;
  p.begin = in_row % count * plan->size;
  p.end = p.begin + plan->size < plan->length[p.row] ? p.begin + plan->size : plan->length[p.row];
  p.first_block = plan->is_by_cluster ? block_index() % CLUSTER * WARPS : 0;
  p.num_blocks = plan->is_by_cluster ? CLUSTER * WARPS : WARPS;
  return p;
}

DEVICE int slot_of(const Step& s, const Plan* plan, int row, int token) {
  return s.tables[plan->table_row[row] * s.table_stride + token / CACHE_BLOCK] * CACHE_BLOCK + token % CACHE_BLOCK;
}

// Keys and values are on their way before anybody knows the queries.
DEVICE void ask_for_cache(const Step& s, const Layer& l, const Plan* plan, int lane) {
  constexpr int LINES = DIM * 2 / 128;
  for (int index = first_piece(plan); index < plan->total; index = next_piece(plan, index)) {
    Piece p = piece_of(plan, index, s.rows);
    for (int at = p.begin + 16 * p.first_block; at < p.end; at += 16 * p.num_blocks) {
      for (int block = 0; block < WARPS && at + 16 * block < p.end; ++block) {
        long long slot = slot_of(s, plan, p.row, at + 16 * block);
        for (int i = lane; i < 16 * LINES; i += 32) {
          long long line = ((slot + i / LINES) * KV_HEADS + p.head) * DIM + i % LINES * 64;
          ask_for(l.keys + line);
          ask_for(l.values + line);
        }
      }
    }
  }
}

// Normed by itself, and turned: where the model norms heads, nobody before knew all of one.
DEVICE void turn_head(uint4* x, const bf16* norm, const bf16* cos, const bf16* sin, float eps, int t) {
  float scale = 0.0f;
#pragma unroll
  for (int j = 0; j < NUM_32; ++j) scale += squares_of(x[j]);
  scale += shuffle_xor(scale, 1);
  scale += shuffle_xor(scale, 2);
  scale = 1.0f / root(scale / DIM + eps);
#pragma unroll
  for (int j = 0; j < NUM_32 / 2; ++j) {
    int a = j * 32 + t * 8, b = a + DIM / 2;
    uint4 first = normed<false>(x[j], scale, load_16(norm + a));
    uint4 second = normed<false>(x[j + NUM_32 / 2], scale, load_16(norm + b));
    x[j] = each(each(first, load_16(cos + a), times), each(second, load_16(sin + a), times), minus);
    x[j + NUM_32 / 2] = each(each(second, load_16(cos + b), times), each(first, load_16(sin + b), times), plus);
  }
}

// A warp's blocks of 16 tokens of a piece.
DEVICE Seen attend_blocks(const Step& s, const Layer& l, const Plan* plan, const Piece& p, int warp, int lane, float4* sums) {
  int g = lane / 4, t = lane % 4, row = p.row, newest = HAS_HEAD_NORMS ? plan->length[row] - 1 : -1;
  const bf16 *mine = s.qkv + row * QKV, *new_key = mine + (HEADS + p.head) * DIM, *new_value = new_key + KV_HEADS * DIM;
  const bf16 *cos = l.cos + plan->position[row] * DIM, *sin = l.sin + plan->position[row] * DIM;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  Seen seen = nothing_seen();
  int first = p.begin + 16 * (p.first_block + warp);
  if (first >= p.end) return seen;
  uint4 query[NUM_32];
#pragma unroll
  for (int j = 0; j < NUM_32; ++j)
    query[j] = g < GROUP ? load_16(mine + (p.head * GROUP + g) * DIM + j * 32 + t * 8) : zero;
  for (int at = first; at < p.end; at += 16 * p.num_blocks) {
    long long slot = slot_of(s, plan, row, at);
    auto held = [&](int token) { return ((slot + token) * KV_HEADS + p.head) * DIM; };
    Tokens of;
    uint4(&keys)[2][NUM_32] = of.keys;
    uint4(&values)[4][DIM / 64] = of.values;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      int token = n * 8 + g;
      const bf16* from = at + token == newest ? new_key : l.keys + held(token);
#pragma unroll
      for (int j = 0; j < NUM_32; ++j) keys[n][j] = at + token < p.end ? load_16(from + j * 32 + t * 8) : zero;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      int token = value_token(n, lane);
      const bf16* from = at + token == newest ? new_value : l.values + held(token);
#pragma unroll
      for (int h = 0; h < DIM / 64; ++h) values[n][h] = at + token < p.end ? load_16(from + h * 64 + g * 8) : zero;
    }
    if (HAS_HEAD_NORMS && at == first) turn_head(query, l.query_norm, cos, sin, s.head_eps, t);
    if (HAS_HEAD_NORMS && at <= newest && newest < at + 16) {  // it was made in this step, and goes into the cache
      int token = newest - at;
      uint4 turned[NUM_32];
#pragma unroll
      for (int j = 0; j < NUM_32; ++j) turned[j] = token < 8 ? keys[0][j] : keys[1][j];
      turn_head(turned, l.key_norm, cos, sin, s.head_eps, t);
#pragma unroll
      for (int j = 0; j < NUM_32; ++j) {
        if (g != token % 8) continue;
        if (token < 8) keys[0][j] = turned[j];
        else keys[1][j] = turned[j];
        *(uint4*)(l.keys + held(token) + j * 32 + t * 8) = turned[j];
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (value_token(n, lane) != token) continue;
#pragma unroll
        for (int h = 0; h < DIM / 64; ++h) *(uint4*)(l.values + held(token) + h * 64 + g * 8) = values[n][h];
      }
    }
    add_tokens(of, query, p.end - at, s.scale, lane, sums, seen);
  }
  return seen_by_all(seen);
}

// Item i of a piece, as lanes hold sums.
DEVICE void leave_piece(const Step& s, int index, int i, float4 sum, const Seen& seen) {
  int head = head_of(i);
  float* to = s.parts + (index * GROUP + head) * DIM + dimension_of(i);
  float* level = s.levels + index * GROUP + head;
  if (head < GROUP) *(float2*)to = make_float2(sum.x / seen.total.x, sum.z / seen.total.x);
  if (head + 1 < GROUP) *(float2*)(to + DIM) = make_float2(sum.y / seen.total.y, sum.w / seen.total.y);
  if (i < 4 && head < GROUP) level[0] = seen.top.x + logarithm(seen.total.x);
  if (i < 4 && head + 1 < GROUP) level[1] = seen.top.y + logarithm(seen.total.y);
}

DEVICE void attend(const Step& s, const Layer& l, const Memory& m, word& turn, int thread) {
  const Plan* plan = m.plan;
  int warp = thread / 32, lane = thread % 32, rank = block_index() % CLUSTER;
  float4* levels = m.sums + WARPS * HEAD_SUMS;  // [warp, pair of heads]
  for (int index = first_piece(plan); index < plan->total; index = next_piece(plan, index)) {
    Piece p = piece_of(plan, index, s.rows);
    float4 sums[HEAD_TILES] = {}, sum;
    Seen seen = attend_blocks(s, l, plan, p, warp, lane, sums);
    leave_found(m.sums + warp * HEAD_SUMS, levels + warp * 4, sums, seen, lane);
    workers_meet();
    bool is_item = thread < HEAD_SUMS;
    if (is_item) seen = joined<WARPS>(m.sums + thread, HEAD_SUMS, levels + thread % 4, 4, sum);
    int item = thread;
    if (plan->is_by_cluster) {
      float4* received_levels = m.received + HEAD_SUMS;
      float4 level = make_float4(seen.top.x, seen.top.y, seen.total.x, seen.total.y);
      if (thread == 0) arrive_expecting(m.arrived, (HEAD_SUMS + CLUSTER * 4) * 16);
      if (is_item) push(m.received + rank * HEAD_SHARE + thread % HEAD_SHARE, thread / HEAD_SHARE, sum, m.arrived);
      if (thread < 4)
        for (int to = 0; to < CLUSTER; ++to) push(received_levels + rank * 4 + thread, to, level, m.arrived);
      await(m.arrived, turn++ & 1);
      item += rank * HEAD_SHARE;
      is_item = thread < HEAD_SHARE;
      if (is_item) seen = joined<CLUSTER>(m.received + thread, HEAD_SHARE, received_levels + thread % 4, 4, sum);
    }
    if (is_item) leave_piece(s, index, item, sum, seen);
    if (next_piece(plan, index) < plan->total) workers_meet();  // before the next one is written there
  }
}

// x of `out`: what the pieces of every row come to.
DEVICE void load_attended(const Step& s, const Part& part, Inputs& x, const Memory& m, int thread) {
  constexpr int BATCH = 8;
  int pieces = (part.end - part.first) * 4, lane = thread % 32;
  for (int i = thread; i < s.rows * pieces; i += WORKERS) {
    int row = i / pieces, column = part.first * 32 + i % pieces * 8, head = column / DIM, count = m.plan->count[row];
    int first = (m.plan->first[row] + head / GROUP * count) * GROUP + head % GROUP;
    float top = NOTHING, total = 0.0f, sums[8] = {};
    for (int from = 0; from < count; from += BATCH) {
      float level[BATCH], highest = top;
      uint4 low[BATCH], high[BATCH];
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        int piece = first + (from + n) * GROUP;
        bool is_there = from + n < count;
        level[n] = is_there ? load_float(s.levels + piece) : NOTHING;
        low[n] = is_there ? load_16(s.parts + piece * DIM + column % DIM) : make_uint4(0, 0, 0, 0);
        high[n] = is_there ? load_16(s.parts + piece * DIM + column % DIM + 4) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int n = 0; n < BATCH; ++n) highest = fmaxf(highest, level[n]);
      float keep = exponential(top - highest);
      top = highest;
      total *= keep;
#pragma unroll
      for (int d = 0; d < 8; ++d) sums[d] *= keep;
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        float share = exponential(level[n] - top);
        total += share;
        const float a[8] = {as_float(low[n].x), as_float(low[n].y), as_float(low[n].z), as_float(low[n].w),
                            as_float(high[n].x), as_float(high[n].y), as_float(high[n].z), as_float(high[n].w)};
#pragma unroll
        for (int d = 0; d < 8; ++d) sums[d] += share * a[d];
      }
    }
    float by = count > 0 ? 1.0f / total : 0.0f;
    m.attended[i] = make_uint4(packed(sums[0] * by, sums[1] * by), packed(sums[2] * by, sums[3] * by),
                               packed(sums[4] * by, sums[5] * by), packed(sums[6] * by, sums[7] * by));
  }
  workers_meet();
  x.load<stripes_of_warp(OUT_QUARTER)>(
      s.rows, lane, [&](int row, int column) { return m.attended[row * pieces + column / 8 - part.first * 4]; });
}
