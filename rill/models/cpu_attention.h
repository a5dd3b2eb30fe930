// Attention over a paged KV cache. A query's result depends on its own keys alone, tile by tile in one order; queries
// of one sequence are computed side by side so that keys and values are read once for several of them.

#pragma once

#include <vector>

#include "cpu_vector.h"

namespace {

constexpr int KEYS = 16;         // per softmax tile; independent of the block size
constexpr int MAX_QUERIES = 16;  // heads of one group times neighbouring tokens, handled together
constexpr int MAX_DIM = 256;

// Queries that share a sequence: tokens [token, token + count) of the flat batch, the first one at `position`.
struct QueryBlock {
    int64_t seq, token, count, position;
};

inline std::vector<QueryBlock> query_blocks(const int32_t* starts, const int32_t* lengths, int64_t num_seqs, int group) {
    const int64_t most = group >= MAX_QUERIES ? 1 : MAX_QUERIES / group;
    std::vector<QueryBlock> blocks;
    for (int64_t seq = 0; seq < num_seqs; seq++)
        for (int64_t at = starts[seq]; at < starts[seq + 1]; at += most) {
            int64_t left = starts[seq + 1] - at;
            blocks.push_back({seq, at, left < most ? left : most, lengths[seq] - left});
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

// Scores of keys [tile, tile + KEYS) become weights; returns the factor for what was accumulated before. A tile with
// nothing in [first, last] leaves everything as it was, to the bit.
inline float soften(float* s, int64_t tile, int64_t first, int64_t last, float cap, float* top, float* total) {
    if (cap > 0.f)
        for (int t = 0; t < KEYS; t++) s[t] = cap * std::tanh(s[t] / cap);
    if (tile < first || tile + KEYS - 1 > last) {
        const int low = static_cast<int>(first > tile ? (first - tile < KEYS ? first - tile : KEYS) : 0);
        const int high = static_cast<int>(last - tile < KEYS ? last - tile : KEYS);
        for (int t = 0; t < KEYS; t++) s[t] = t >= low && t <= high ? s[t] : MASKED;
    }
    float best = *top;
    for (int t = 0; t < KEYS; t++) best = s[t] > best ? s[t] : best;
    float sum = 0.f;
    for (int t = 0; t < KEYS; t++) {
        s[t] = s[t] > MASKED ? fast_exp(s[t] - best) : 0.f;
        sum += s[t];
    }
    const float keep = fast_exp(*top - best);
    *total = *total * keep + sum;
    *top = best;
    return keep;
}

// One block of queries and one key/value head with up to MAX_QUERIES of its query heads.
// NV vectors to a head; 0 for head dimensions that are not a multiple of LANES.
template <class T, int NV>
void attend_block(const QueryBlock& block, const T* query, int64_t query_stride, const T* keys, const T* values,
                  const int32_t* table, int64_t block_size, int64_t kv_stride, int group, int64_t dim_, float scale,
                  int64_t window, float cap, T* out, int64_t out_stride) {
    const int64_t dim = NV ? NV * LANES : dim_;
    constexpr int WIDTH = NV ? NV * LANES : MAX_DIM;
    const int count = static_cast<int>(block.count) * group;
    alignas(64) float q[MAX_QUERIES][WIDTH];
    alignas(64) float acc[MAX_QUERIES][WIDTH];
    float top[MAX_QUERIES], total[MAX_QUERIES];
    int64_t first[MAX_QUERIES], last[MAX_QUERIES];
    for (int i = 0; i < count; i++) {
        const T* source = query + (block.token + i / group) * query_stride + i % group * dim;
        last[i] = block.position + i / group;
        first[i] = window > 0 && last[i] - window + 1 > 0 ? last[i] - window + 1 : 0;
        top[i] = MASKED;
        total[i] = 0.f;
        for (int64_t d = 0; d < dim; d++) {
            q[i][d] = load(source + d) * scale;
            acc[i][d] = 0.f;
        }
    }
    const int64_t end = last[count - 1];
    // Tiles start at multiples of KEYS whatever `first` is, so a window does not change the order of others.
    for (int64_t tile = first[0] / KEYS * KEYS; tile <= end; tile += KEYS) {
        const T* k[KEYS];
        const T* v[KEYS];
        for (int t = 0; t < KEYS; t++) {
            int64_t at = tile + t <= end ? tile + t : end;  // a key beyond the end repeats the last, unseen
            int64_t slot = static_cast<int64_t>(table[at / block_size]) * block_size + at % block_size;
            k[t] = keys + slot * kv_stride;
            v[t] = values + slot * kv_stride;
        }
        alignas(64) float s[MAX_QUERIES][KEYS];
        if constexpr (NV > 0) {
            vec dots[MAX_QUERIES][KEYS];
            for (int t = 0; t < KEYS; t++) {
                vec key[NV];
                for (int j = 0; j < NV; j++) key[j] = load_vec(k[t] + j * LANES);
                for (int i = 0; i < count; i++) {
                    vec dot = load_vec(q[i]) * key[0];
                    for (int j = 1; j < NV; j++) dot += load_vec(q[i] + j * LANES) * key[j];
                    dots[i][t] = dot;
                }
            }
            for (int i = 0; i < count; i++) {
                *reinterpret_cast<vec*>(s[i]) = sum_each(dots[i]);
                const float keep = soften(s[i], tile, first[i], last[i], cap, &top[i], &total[i]);
                for (int j = 0; j < NV; j++) *reinterpret_cast<vec*>(acc[i] + j * LANES) *= keep;
            }
            for (int j = 0; j < NV; j++) {
                vec value[KEYS];
                for (int t = 0; t < KEYS; t++) value[t] = load_vec(v[t] + j * LANES);
                for (int i = 0; i < count; i++) {
                    vec sum = load_vec(acc[i] + j * LANES);
                    for (int t = 0; t < KEYS; t++) sum += s[i][t] * value[t];
                    *reinterpret_cast<vec*>(acc[i] + j * LANES) = sum;
                }
            }
        } else {
            for (int i = 0; i < count; i++) {
                for (int t = 0; t < KEYS; t++) {
                    s[i][t] = 0.f;
                    for (int64_t d = 0; d < dim; d++) s[i][t] += q[i][d] * load(k[t] + d);
                }
                const float keep = soften(s[i], tile, first[i], last[i], cap, &top[i], &total[i]);
                for (int64_t d = 0; d < dim; d++) acc[i][d] *= keep;
                for (int t = 0; t < KEYS; t++)
                    for (int64_t d = 0; d < dim; d++) acc[i][d] += s[i][t] * load(v[t] + d);
            }
        }
    }
    for (int i = 0; i < count; i++) {
        T* target = out + (block.token + i / group) * out_stride + i % group * dim;
        const float inverse = 1.0f / total[i];
        for (int64_t d = 0; d < dim; d++) store(target + d, acc[i][d] * inverse);
    }
}

// omp for. query [tokens, query_stride], out [tokens, heads * dim].
template <class T>
void attend(const std::vector<QueryBlock>& blocks, const T* query, int64_t query_stride, const T* keys,
            const T* values, const int32_t* tables, int64_t table_stride, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t block_size, float scale, int64_t window, float cap, T* out) {
    auto run = dim == 64    ? attend_block<T, 4>
               : dim == 128 ? attend_block<T, 8>
               : dim == 32  ? attend_block<T, 2>
               : dim == 96  ? attend_block<T, 6>
               : dim == 16  ? attend_block<T, 1>
                            : attend_block<T, 0>;
    const int group_all = static_cast<int>(heads / kv_heads);
    const int64_t items = static_cast<int64_t>(blocks.size()) * kv_heads;
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < items; item++) {
        const QueryBlock& block = blocks[item / kv_heads];
        const int64_t kv = item % kv_heads;
        for (int part = 0; part < group_all; part += MAX_QUERIES) {
            const int group = group_all - part < MAX_QUERIES ? group_all - part : MAX_QUERIES;
            const int64_t head = kv * group_all + part;
            run(block, query + head * dim, query_stride, keys + kv * dim, values + kv * dim,
                tables + block.seq * table_stride, block_size, kv_heads * dim, group, dim, scale, window, cap,
                out + head * dim, heads * dim);
        }
    }
}

}  // namespace
