// Attention over a paged KV cache, for the engine.
//
//     tables[s] = 7, 2, …            block 7                         block 2
//                                    | pos 0 | pos 1 | … | pos 15 |  | pos 16 | …
//     keys, values [blocks, block_size, K, D]      a place is K heads × D numbers, side by side
//
//     query [tokens, H, D]           a block of up to 16 queries: neighbouring tokens of one sequence × the H / K query
//                                    heads of one or more key/value heads
//     scores [16 queries, 64 keys] ─► running maximum and sum ─► acc [16 queries, D] ─► out [tokens, H, D]
//
// A query's result depends on its own keys alone, 64 at a time in one order, so it is the same in any batch; queries are
// taken together only so that keys and values are read once for several of them.

#pragma once

#include <vector>

#include "cpu_vector.h"

namespace {

constexpr int KEYS = 64;         // per step of the running softmax; independent of the block size
constexpr int MAX_QUERIES = 16;  // query heads times neighbouring tokens, handled together
constexpr int MAX_DIM = 256;

// What one thread computes at a time: queries of tokens [token, token + count) of the flat batch, neighbours in one
// sequence, the first one at `position`, for num_kv key/value heads and all or a part of the query heads that share
// each.
struct QueryBlock {
    int64_t seq, token, count, position;
    int kv, num_kv, head, num_heads;
};

// Neighbouring tokens share keys; where there are none, neighbouring key/value heads lie side by side in the cache and
// are read together, as long as every thread has something to do.
inline std::vector<QueryBlock> query_blocks(const int32_t* starts, const int32_t* lengths, int64_t num_seqs,
                                            int64_t heads, int64_t kv_heads, int threads) {
    const int group = static_cast<int>(heads / kv_heads), part = group < MAX_QUERIES ? group : MAX_QUERIES;
    const int64_t most = MAX_QUERIES / part;
    std::vector<QueryBlock> blocks;
    for (int64_t seq = 0; seq < num_seqs; seq++)
        for (int64_t at = starts[seq]; at < starts[seq + 1]; at += most) {
            const int64_t left = starts[seq + 1] - at, count = left < most ? left : most;
            const int64_t wide = num_seqs >= 4 * threads ? MAX_QUERIES / (count * part) : 1;
            for (int64_t kv = 0; kv < kv_heads; kv += wide)
                for (int head = 0; head < group; head += part)
                    blocks.push_back({seq, at, count, lengths[seq] - left, static_cast<int>(kv),
                                      static_cast<int>(kv_heads - kv < wide ? kv_heads - kv : wide), head,
                                      group - head < part ? group - head : part});
        }
    return blocks;
}

// Lane i is the sum of the lanes of d[i].
inline vec sum_each(const vec* d) {
    vec e[8], f[4], h[2];
    for (int i = 0; i < 8; i++)
        e[i] = __builtin_shufflevector(d[i], d[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(d[i], d[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        f[i] = __builtin_shufflevector(e[i], e[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(e[i], e[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        h[i] = __builtin_shufflevector(f[i], f[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(f[i], f[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(h[0], h[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(h[0], h[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Scores of `count` keys from `at` on, a multiple of LANES, become weights; returns the factor for what was accumulated
// before. Keys outside of [first, last] weigh nothing and leave everything as it was, to the bit.
inline float soften(float* s, int count, int64_t at, int64_t first, int64_t last, float cap, float* top, float* total) {
    if (cap > 0.f)
        for (int t = 0; t < count; t++) s[t] = cap * std::tanh(s[t] / cap);
    if (at < first || at + count - 1 > last)
        for (int t = 0; t < count; t++) s[t] = at + t >= first && at + t <= last ? s[t] : MASKED;
    vec highest = load_vec(s);
    for (int t = LANES; t < count; t += LANES) {
        const vec v = load_vec(s + t);
        highest = v > highest ? v : highest;
    }
    const float found = max_lane(highest), best = found > *top ? found : *top;
    vec sum = {};
    for (int t = 0; t < count; t += LANES) {
        const vec v = load_vec(s + t), weights = v > MASKED ? exp_vec(v - best) : vec{};
        *reinterpret_cast<vec*>(s + t) = weights;
        sum += weights;
    }
    const float keep = best > *top ? fast_exp(*top - best) : 1.0f;
    *total = *total * keep + sum_lanes(sum);
    *top = best;
    return keep;
}

// Queries are numbered key/value head first, then token, then query head. NV vectors to a head; 0 for head dimensions
// that are not a multiple of LANES.
template <class T, int NV>
struct BlockAttention {
    static constexpr int WIDTH = NV ? NV * LANES : MAX_DIM;
    int num_kv, per_kv;  // queries to a key/value head
    int64_t dim;
    alignas(64) float q[MAX_QUERIES][WIDTH], acc[MAX_QUERIES][WIDTH], scores[MAX_QUERIES][KEYS];
    const T *k[KEYS], *v[KEYS];

    // scores[.][from .. from + LANES); the values that will be wanted next are fetched meanwhile
    void score(int from) {
        if constexpr (NV > 0) {
            vec dots[MAX_QUERIES][LANES];
            for (int t = 0; t < LANES; t++)
                for (int h = 0; h < num_kv; h++) {
                    vec key[NV];
                    for (int j = 0; j < NV; j++) key[j] = load_vec(k[from + t] + h * dim + j * LANES);
                    for (int64_t d = 0; d < NV * LANES; d += 64 / static_cast<int64_t>(sizeof(T)))
                        __builtin_prefetch(v[from + t] + h * dim + d);
                    for (int i = h * per_kv; i < (h + 1) * per_kv; i++) {
                        vec dot = load_vec(q[i]) * key[0];
                        for (int j = 1; j < NV; j++) dot += load_vec(q[i] + j * LANES) * key[j];
                        dots[i][t] = dot;
                    }
                }
            for (int i = 0; i < num_kv * per_kv; i++) *reinterpret_cast<vec*>(scores[i] + from) = sum_each(dots[i]);
        } else {
            for (int i = 0; i < num_kv * per_kv; i++)
                for (int t = from; t < from + LANES; t++) {
                    const T* key = k[t] + i / per_kv * dim;
                    scores[i][t] = 0.f;
                    for (int64_t d = 0; d < dim; d++) scores[i][t] += q[i][d] * load(key + d);
                }
        }
    }

    void accumulate(int count) {
        if constexpr (NV > 0) {
            for (int from = 0; from < count; from += LANES)
                for (int h = 0; h < num_kv; h++)
                    for (int j = 0; j < NV; j++) {
                        vec value[LANES];
                        for (int t = 0; t < LANES; t++) value[t] = load_vec(v[from + t] + h * dim + j * LANES);
                        for (int i = h * per_kv; i < (h + 1) * per_kv; i++) {
                            vec sum = load_vec(acc[i] + j * LANES);
                            for (int t = 0; t < LANES; t++) sum += scores[i][from + t] * value[t];
                            *reinterpret_cast<vec*>(acc[i] + j * LANES) = sum;
                        }
                    }
        } else {
            for (int i = 0; i < num_kv * per_kv; i++)
                for (int t = 0; t < count; t++)
                    for (int64_t d = 0; d < dim; d++) acc[i][d] += scores[i][t] * load(v[t] + i / per_kv * dim + d);
        }
    }
};

template <class T, int NV>
void attend_block(const QueryBlock& block, const T* query, int64_t query_stride, const T* keys, const T* values,
                  const int32_t* table, int64_t block_size, int64_t kv_stride, int group, int64_t dim, float scale,
                  int64_t window, float cap, const T* sinks, T* out, int64_t out_stride) {
    BlockAttention<T, NV> a;
    a.num_kv = block.num_kv;
    a.per_kv = static_cast<int>(block.count) * block.num_heads;
    a.dim = dim;
    const int queries = a.num_kv * a.per_kv;
    float top[MAX_QUERIES], total[MAX_QUERIES];
    auto token = [&](int i) { return i % a.per_kv / block.num_heads; };
    auto head = [&](int i) { return (block.kv + i / a.per_kv) * group + block.head + i % block.num_heads; };
    auto last = [&](int i) { return block.position + token(i); };
    auto first = [&](int i) { return window > 0 && last(i) - window + 1 > 0 ? last(i) - window + 1 : 0; };
    for (int i = 0; i < queries; i++) {
        const T* source = query + (block.token + token(i)) * query_stride + head(i) * dim;
        top[i] = sinks ? load(sinks + head(i)) : MASKED;  // a sink is a key that was seen before all others
        total[i] = sinks ? 1.f : 0.f;
        for (int64_t d = 0; d < dim; d++) {
            a.q[i][d] = load(source + d) * scale;
            a.acc[i][d] = 0.f;
        }
    }
    const int64_t end = block.position + block.count - 1;
    // Steps start at multiples of KEYS whatever `first` is, so a window does not change the order of others.
    for (int64_t at = first(0) / KEYS * KEYS; at <= end; at += KEYS) {
        const int count = static_cast<int>(end - at < KEYS ? (end - at) / LANES * LANES + LANES : KEYS);
        int64_t column = at / block_size, offset = at % block_size;
        for (int t = 0; t < count; t++) {
            const int64_t place = (table[column] * block_size + offset) * kv_stride + block.kv * dim;
            a.k[t] = keys + place;
            a.v[t] = values + place;
            if (at + t >= end) continue;  // beyond the end the last key is repeated, unseen
            if (++offset == block_size) {
                offset = 0;
                column++;
            }
        }
        for (int from = 0; from < count; from += LANES) a.score(from);
        for (int i = 0; i < queries; i++) {
            const float keep = soften(a.scores[i], count, at, first(i), last(i), cap, &top[i], &total[i]);
            if (keep != 1.0f)
                for (int64_t d = 0; d < dim; d++) a.acc[i][d] *= keep;
        }
        a.accumulate(count);
    }
    for (int i = 0; i < queries; i++) {
        T* target = out + (block.token + token(i)) * out_stride + head(i) * dim;
        const float inverse = 1.0f / total[i];
        for (int64_t d = 0; d < dim; d++) store(target + d, a.acc[i][d] * inverse);
    }
}

// query [tokens, query_stride], out [tokens, heads * dim], sinks [heads] or null.
template <class T>
void attend(const T* query, int64_t query_stride, const T* keys, const T* values, const int32_t* tables,
            int64_t table_stride, const int32_t* starts, const int32_t* lengths, int64_t num_seqs, int64_t heads,
            int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window, float cap, const T* sinks,
            T* out, int threads) {
    auto run = dim == 64    ? attend_block<T, 4>
               : dim == 128 ? attend_block<T, 8>
               : dim == 32  ? attend_block<T, 2>
               : dim == 96  ? attend_block<T, 6>
               : dim == 16  ? attend_block<T, 1>
                            : attend_block<T, 0>;
    const int group = static_cast<int>(heads / kv_heads);
    const auto blocks = query_blocks(starts, lengths, num_seqs, heads, kv_heads, threads);
#pragma omp parallel for schedule(dynamic, 2) num_threads(threads) if (threads > 1 && starts[num_seqs] * heads > 8)
    for (int64_t item = 0; item < static_cast<int64_t>(blocks.size()); item++) {
        const QueryBlock& block = blocks[item];
        run(block, query, query_stride, keys, values, tables + block.seq * table_stride, block_size, kv_heads * dim,
            group, dim, scale, window, cap, sinks, out, heads * dim);
    }
}

}  // namespace
