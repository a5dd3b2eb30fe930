// Attention of the queries of one key/value head over 16 tokens at a time, by one warp, and how what several of them found is
// put together. Behind cuda_device.h.
//
// Tokens are the left side of the scores, dimensions that of the sums. Lane 4g + t holds, of keys, tokens g and g + 8, of
// values tokens 2t, 2t + 1, 2t + 8, 2t + 9 and dimensions 8g to 8g + 7 of each 64; of scores heads 2t and 2t + 1, and of sums
// these heads' dimensions 8g + 2w and 8g + 2w + 1 of the half h in sums[4h + w].

constexpr int GROUP = HEADS / KV_HEADS, NUM_32 = DIM / 32;  // a head of DIM numbers is spread over four lanes, 8 of every 32 each
constexpr int HEAD_TILES = DIM / 16, HEAD_SUMS = HEAD_TILES * 32;
constexpr float NOTHING = -1e30f;
static_assert(GROUP <= 8 && DIM % 64 == 0, "a shape");

DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float2 largest(float2 a, float2 b) { return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y)); }
DEVICE float2 shares(float2 top, float2 of) { return make_float2(exponential(top.x - of.x), exponential(top.y - of.y)); }
DEVICE float4 scaled(float4 x, float2 by) { return make_float4(x.x * by.x, x.y * by.y, x.z * by.x, x.w * by.y); }
DEVICE float2 shuffled(float2 x, int mask) { return make_float2(shuffle_xor(x.x, mask), shuffle_xor(x.y, mask)); }

// Of heads 2t and 2t + 1: the largest score, and Σ of weights, by how much each score is below it.
struct Seen {
  float2 top, total;
};
DEVICE Seen nothing_seen() { return {make_float2(NOTHING, NOTHING), make_float2(0.0f, 0.0f)}; }

struct Tokens {
  uint4 keys[2][NUM_32], values[4][DIM / 64];
};
DEVICE int value_token(int n, int lane) { return n / 2 * 8 + lane % 4 * 2 + n % 2; }

// The first `num` of them. Values of the others are zero.
DEVICE void add_tokens(const Tokens& of, const uint4* query, int num, float scale, int lane, float4* sums, Seen& seen) {
  float4 scores = make_float4(0.0f, 0.0f, 0.0f, 0.0f), others = scores;
#pragma unroll
  for (int j = 0; j < NUM_32; ++j) {
    uint4 a = of.keys[0][j], b = of.keys[1][j];
    multiply_add(scores, make_uint4(a.x, b.x, a.y, b.y), make_uint2(query[j].x, query[j].y));
    multiply_add(others, make_uint4(a.z, b.z, a.w, b.w), make_uint2(query[j].z, query[j].w));
  }
  scores = scaled(scores + others, make_float2(scale, scale));
  if (lane / 4 >= num) scores.x = scores.y = NOTHING;
  if (lane / 4 + 8 >= num) scores.z = scores.w = NOTHING;
  float2 top = largest(seen.top, largest(make_float2(scores.x, scores.y), make_float2(scores.z, scores.w)));
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) top = largest(top, shuffled(top, mask));
  float2 upper = shares(make_float2(scores.x, scores.y), top), lower = shares(make_float2(scores.z, scores.w), top);
  float2 keep = shares(seen.top, top);
  seen = {top, make_float2(seen.total.x * keep.x + upper.x + lower.x, seen.total.y * keep.y + upper.y + lower.y)};
  uint2 weights = make_uint2(transposed(packed(upper.x, upper.y)), transposed(packed(lower.x, lower.y)));
#pragma unroll
  for (int h = 0; h < DIM / 64; ++h) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word v[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint4 value = of.values[n][h];
        v[n] = w == 0 ? value.x : w == 1 ? value.y : w == 2 ? value.z : value.w;
      }
      uint4 both = make_uint4(lows_of(v[0], v[1]), highs_of(v[0], v[1]), lows_of(v[2], v[3]), highs_of(v[2], v[3]));
      sums[h * 4 + w] = scaled(sums[h * 4 + w], keep);
      multiply_add(sums[h * 4 + w], both, weights);
    }
  }
}

// Each lane has counted its own tokens.
DEVICE Seen seen_by_all(Seen seen) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    float2 other = shuffled(seen.total, mask);
    seen.total.x += other.x;
    seen.total.y += other.y;
  }
  return seen;
}

// What a warp found, for others: its sums, and of lanes 0 to 3 what they saw.
DEVICE void leave_found(float4* sums, float4* levels, const float4* found, const Seen& seen, int lane) {
#pragma unroll
  for (int tile = 0; tile < HEAD_TILES; ++tile) sums[tile * 32 + lane] = found[tile];
  if (lane < 4) levels[lane] = make_float4(seen.top.x, seen.top.y, seen.total.x, seen.total.y);
}

// NUM parts of one sum, and what is known of each.
template <int NUM>
DEVICE Seen joined(const float4* sums, int sums_step, const float4* seen, int seen_step, float4& sum) {
  Seen all = nothing_seen();
  float4 of[NUM];  // both heads' tops, then their totals
#pragma unroll
  for (int n = 0; n < NUM; ++n) {
    of[n] = seen[n * seen_step];
    all.top = largest(all.top, make_float2(of[n].x, of[n].y));
  }
  sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int n = 0; n < NUM; ++n) {
    float2 share = shares(make_float2(of[n].x, of[n].y), all.top);
    sum = sum + scaled(sums[n * sums_step], share);
    all.total.x += share.x * of[n].z;
    all.total.y += share.y * of[n].w;
  }
  return all;
}

// Where item i of a head's sums belongs: heads 2t and 2t + 1 of its group, and the first of two dimensions.
DEVICE int head_of(int i) { return i % 4 * 2; }
DEVICE int dimension_of(int i) { return i / 128 * 64 + i % 32 / 4 * 8 + i / 32 % 4 * 2; }
