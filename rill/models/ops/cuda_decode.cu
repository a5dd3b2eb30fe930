// Decode attention over the paged cache: a piece of a row's tokens, for two key/value heads at once (one where their number is
// odd), whose numbers lie together.
//
//     feeder   16 tokens' keys and values at a time, by the copy engine ──► stages in shared memory
//     workers  four warps; two for each head, which take every second stage ──► sums, joined ──► out, or a part of it
//
// Stages come as tiles of 16 tokens by 64 dimensions, swizzled by 128 bytes. Tokens that were there before this step are asked
// for while the kernel before still runs, which writes the newest ones.
//
// Constants come from rill.models.ops.cuda_decode. Before this stand cuda_device.h, cuda_tiles.h and cuda_scores.h.

constexpr int WARPS = 4, PAIR = KV_HEADS % 2 == 0 ? 2 : 1, SIDES = WARPS / PAIR, WORKERS = 32 * WARPS;
constexpr int TILE_BYTES = 16 * 128, PARTS = DIM / 64, SIDE_BYTES = PAIR * PARTS * TILE_BYTES, STAGE_BYTES = 2 * SIDE_BYTES;
static_assert(STAGES % SIDES == 0, "a stage is always the same warps', which have seen each of its turns");
static_assert(STAGES * STAGE_BYTES >= WARPS * (HEAD_SUMS + 4) * 16, "what warps found lies there in the end");

struct Decode {
  TensorMap keys, values;  // [64, tokens of the cache, halves of a head of all heads]
  const bf16* queries;
  const int *tables, *entries;  // rill.models.decode.decode_work
  bf16* out;                    // [B, H, D]: of rows that are one piece
  float *parts, *stats;         // [B, H, MAX_PIECES, D] and 2: of others
  int query_stride, table_stride, num_new;  // of a row's last tokens, that may be written in this step; negative: any may be
  float scale;
};

struct Entry {
  int row, piece, num_pieces, table_row, begin, end, length;
};
DEVICE Entry entry_of(const Decode& s) {
  const int* e = s.entries + block_index() * 8;
  return {e[0], e[1], e[2] + e[7], e[3], e[4], e[5], e[6]};
}

struct Stages {
  char* memory;
  mbarrier *full, *empty;
};

DEVICE void feed(const Decode& s, const Entry& e, const Stages& m, int lane) {
  int num = (e.end - e.begin + 15) / 16, num_old = s.num_new < 0 ? 0 : e.length - s.num_new, stage = 0;
  word turn = 0;
  bool has_waited = false;
  for (int base = 0; base < num; base += 32) {
    int token = e.begin + 16 * (base + lane), mine = 0;
    if (token < e.end) mine = s.tables[e.table_row * s.table_stride + token / CACHE_BLOCK] * CACHE_BLOCK + token % CACHE_BLOCK;
    for (int i = base; i < base + 32 && i < num; ++i) {
      int slot = shuffle(mine, i - base);
      if (turn > 0) await(&m.empty[stage], (turn - 1) & 1);
      if (!has_waited && e.begin + 16 * (i + 1) > num_old) await_kernel_before(), has_waited = true;
      if (lane == 0) {
        char* to = m.memory + stage * STAGE_BYTES;
        arrive_expecting(&m.full[stage], STAGE_BYTES);
        fetch_tiles(to, &s.keys, 0, slot, block_index_y() * PAIR * PARTS, &m.full[stage]);
        fetch_tiles(to + SIDE_BYTES, &s.values, 0, slot, block_index_y() * PAIR * PARTS, &m.full[stage]);
      }
      if (++stage == STAGES) stage = 0, ++turn;
    }
  }
}

// Chunk c of 16 bytes of a token's row.
DEVICE uint4 of_tile(const char* tile, int token, int c) { return *(const uint4*)(tile + token * 128 + (c ^ token % 8) * 16); }

DEVICE void work(const Decode& s, const Entry& e, const Stages& m, int thread) {
  int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, side = warp / PAIR, num = (e.end - e.begin + 15) / 16;
  int head = (block_index_y() * PAIR + warp % PAIR) * GROUP;
  // Which dimensions lanes hold is free, as long as they are the same of queries and keys: these lie in different banks.
  auto chunk = [&](int j) { return 2 * t + j % 2; };
  uint4 query[NUM_32];
  await_kernel_before();
#pragma unroll
  for (int j = 0; j < NUM_32; ++j)
    query[j] = load_16(s.queries + (long long)e.row * s.query_stride + (head + (g < GROUP ? g : 0)) * DIM + j / 2 * 64 + chunk(j) * 8);
  float4 sums[HEAD_TILES] = {};
  Seen seen = nothing_seen();
#pragma unroll 1
  for (int i = side; i < num; i += SIDES) {
    int stage = i % STAGES, left = e.end - e.begin - 16 * i;
    const char* keys = m.memory + stage * STAGE_BYTES + warp % PAIR * PARTS * TILE_BYTES;
    Tokens of;
    await(&m.full[stage], i / STAGES & 1);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < NUM_32; ++j) of.keys[n][j] = of_tile(keys + j / 2 * TILE_BYTES, n * 8 + g, chunk(j));
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < PARTS; ++h) of.values[n][h] = of_tile(keys + SIDE_BYTES + h * TILE_BYTES, value_token(n, lane), g);
    if (left < 16) {
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int h = 0; h < PARTS; ++h)
          if (value_token(n, lane) >= left) of.values[n][h] = make_uint4(0, 0, 0, 0);
    }
    add_tokens(of, query, left, s.scale, lane, sums, seen);
    sync_warp();
    if (lane == 0) arrive(&m.empty[stage]);
  }
  float4 *all = (float4*)m.memory, *levels = all + WARPS * HEAD_SUMS;
  sync_threads(1, WORKERS);  // all have read what lay there
  leave_found(all + warp * HEAD_SUMS, levels + warp * 4, sums, seen_by_all(seen), lane);
  sync_threads(1, WORKERS);
#pragma unroll 1
  for (int i = thread; i < PAIR * HEAD_SUMS; i += WORKERS) {
    int which = i / HEAD_SUMS, item = i % HEAD_SUMS, in_group = head_of(item), d = dimension_of(item);
    float4 sum;
    Seen found = joined<SIDES>(all + i, PAIR * HEAD_SUMS, levels + which * 4 + item % 4, PAIR * 4, sum);
    float tops[2] = {found.top.x, found.top.y}, totals[2] = {found.total.x, found.total.y};
    float numbers[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (in_group + k >= GROUP) continue;
      int mine = (block_index_y() * PAIR + which) * GROUP + in_group + k;
      if (e.num_pieces == 1) {
        float by = 1.0f / totals[k];
        *(word*)(s.out + ((long long)e.row * HEADS + mine) * DIM + d) = packed(numbers[k][0] * by, numbers[k][1] * by);
      } else {
        long long at = ((long long)e.row * HEADS + mine) * MAX_PIECES + e.piece;
        *(float2*)(s.parts + at * DIM + d) = make_float2(numbers[k][0], numbers[k][1]);
        if (item < 4) *(float2*)(s.stats + at * 2) = make_float2(tops[k], totals[k]);
      }
    }
  }
}

KERNEL(WORKERS + 32, PER_SM) decode(const CONSTANT Decode s) {
  char* memory = shared_memory();
  memory += (1024 - shared_address(memory) % 1024) % 1024;
  Stages m = {memory, (mbarrier*)(memory + STAGES * STAGE_BYTES), (mbarrier*)(memory + STAGES * STAGE_BYTES) + STAGES};
  int thread = thread_index();
  if (thread == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(&m.full[stage], 1);
      init_barrier(&m.empty[stage], PAIR);
    }
    barriers_are_made();
  }
  sync_threads(0, WORKERS + 32);
  let_next_kernel_begin();
  Entry e = entry_of(s);
  if (e.end > e.begin) {  // an empty entry waits for nothing and makes room
    if (thread < WORKERS) work(s, e, m, thread);
    else feed(s, e, m, thread % 32);
  }
}
