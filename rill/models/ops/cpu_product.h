// x @ weight.T with the weights where torch keeps them, row by row: nothing is packed, copied or cached, so an update
// of a parameter in place is all that an update takes. Weights and rows are float or bf16, sums are float. AVX-512 only.
//
// Products are computed transposed, so that a lane is a row of x and only x has to be turned:
//
//     weight  16 outputs × k                  straight from the parameter
//     panel   16 places of k × 16 rows of x   floats; rows and k beyond the end are zero
//     result  16 outputs × 16 rows            one accumulator over all of k, in order
//
// An element's sum runs over k in one order whatever the number of rows or threads: a row's bits do not depend on the
// batch.

#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define RILL_PRODUCTS 1

#include <immintrin.h>

#include <new>
#include <vector>

#include "cpu_vector.h"

namespace {

constexpr int EDGE = 16;  // of a tile
constexpr int64_t TILE_WORDS = EDGE * EDGE;
constexpr int64_t GROUP = 4;         // row tiles that are multiplied together
constexpr int64_t CHUNK_TILES = 16;  // rows / 16 of a panel part that stays in L2

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t panel_words(int64_t k) { return ceil_div(k, EDGE) * TILE_WORDS; }  // of one row tile
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

// Up to 16 numbers as floats, zero beyond `left`.
inline __m512i load_words(const float* x, int64_t left) {
    return _mm512_castps_si512(left >= EDGE ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps((1u << left) - 1, x));
}
inline __m512i load_words(const bf16* x, int64_t left) {
    const __mmask16 mask = left >= EDGE ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}

// Up to 16 rows of x into one row tile of a panel.
template <class T>
void pack(const T* x, int64_t rows, int64_t k, float* panel) {
    for (int64_t at = 0; at < k; at += EDGE, panel += TILE_WORDS) {
        __m512i r[EDGE];
        for (int i = 0; i < EDGE; i++)
            r[i] = i < rows ? load_words(x + i * k + at, k - at) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < EDGE; i++) _mm512_store_si512(panel + i * EDGE, r[i]);
    }
}

inline __m512 rounded(__m512 v, const float*) { return v; }
inline __m512 rounded(__m512 v, const bf16*) {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(0xFFFF0000)));
}
inline void store_lanes(float* p, __m512 v, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, v); }
inline void store_lanes(bf16* p, __m512 v, __mmask16 mask) {
    __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(rounded(v, p)), 16);
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtepi32_epi16(bits));
}

// The next weights are asked for while these are multiplied: rows of a parameter are too short for the processor to see
// where reading goes on.
template <int ROW_TILES, int OUTPUTS, class T>
__attribute__((noinline)) void multiply_rows(const T* w, int64_t k, const float* panel, float* results) {
    const int64_t tile_words = panel_words(k);
    __m512 sum[OUTPUTS][ROW_TILES];
    for (int n = 0; n < OUTPUTS; n++)
        for (int m = 0; m < ROW_TILES; m++) sum[n][m] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i++) {
        if (i % EDGE == 0)
            for (int n = 0; n < OUTPUTS; n++) __builtin_prefetch(w + (OUTPUTS + n) * k + i, 0, 2);
        __m512 x[ROW_TILES];
        for (int m = 0; m < ROW_TILES; m++) x[m] = _mm512_load_ps(panel + m * tile_words + i * EDGE);
        for (int n = 0; n < OUTPUTS; n++) {
            const __m512 b = _mm512_set1_ps(load(w + n * k + i));
            for (int m = 0; m < ROW_TILES; m++) sum[n][m] = _mm512_fmadd_ps(b, x[m], sum[n][m]);
        }
    }
    for (int n = 0; n < OUTPUTS; n++)
        for (int m = 0; m < ROW_TILES; m++) _mm512_store_ps(results + m * TILE_WORDS + n * EDGE, sum[n][m]);
}

// 16 outputs, so many at a time as the registers hold sums for.
template <int ROW_TILES, class T>
void multiply_strip(const T* w, int64_t k, const float* panel, float* results) {
    constexpr int FIRST = ROW_TILES == 4 ? 6 : 8, THEN = ROW_TILES == 4 ? 5 : 8;
    multiply_rows<ROW_TILES, FIRST>(w, k, panel, results);
    for (int n = FIRST; n < EDGE; n += THEN)
        multiply_rows<ROW_TILES, THEN>(w + n * k, k, panel, results + n * EDGE);
}

// A few rows would leave most lanes empty: lanes are outputs then, the weights are turned, and sums keep their order.
constexpr int64_t FEW = 4;
template <class T>
__attribute__((noinline)) void multiply_few(const T* w, int64_t k, const float* panel, int64_t rows, float* results) {
    __m512 sum[2][FEW];
    for (int t = 0; t < 2; t++)
        for (int m = 0; m < FEW; m++) sum[t][m] = _mm512_setzero_ps();
    for (int64_t at = 0; at < k; at += EDGE) {
        const int64_t depth = k - at < EDGE ? k - at : EDGE;
        __m512i turned[2][EDGE];
        for (int t = 0; t < 2; t++) {
            for (int n = 0; n < EDGE; n++) turned[t][n] = load_words(w + (t * EDGE + n) * k + at, k - at);
            transpose(turned[t]);
        }
        for (int64_t i = 0; i < depth; i++)
            for (int m = 0; m < rows; m++) {
                __m512 x = _mm512_set1_ps(panel[(at + i) * EDGE + m]);
                for (int t = 0; t < 2; t++)
                    sum[t][m] = _mm512_fmadd_ps(_mm512_castsi512_ps(turned[t][i]), x, sum[t][m]);
            }
    }
    for (int t = 0; t < 2; t++)
        for (int m = 0; m < rows; m++) {
            alignas(64) float outputs[EDGE];
            _mm512_store_ps(outputs, sum[t][m]);
            for (int n = 0; n < EDGE; n++) results[t * GROUP * TILE_WORDS + n * EDGE + m] = outputs[n];
        }
}

// 32 outputs for up to GROUP row tiles of a panel: results [2][GROUP][16 outputs][16 rows].
template <class T>
void multiply(const T* w, int64_t k, const float* panel, int64_t rows, float* results) {
    if (rows <= FEW) return multiply_few(w, k, panel, rows, results);
    const int64_t tiles = ceil_div(rows, EDGE);
    auto strip = tiles == 1   ? multiply_strip<1, T>
                 : tiles == 2 ? multiply_strip<2, T>
                 : tiles == 3 ? multiply_strip<3, T>
                              : multiply_strip<4, T>;
    for (int t = 0; t < 2; t++) strip(w + t * EDGE * k, k, panel, results + t * GROUP * TILE_WORDS);
}

// Results of up to 16 rows and `count` outputs, with bias, to `out`, whose rows are n apart.
template <class T>
void store_tile(const float* results, const T* bias, int64_t count, int64_t rows, T* out, int64_t n) {
    __m512i r[EDGE];
    for (int i = 0; i < EDGE; i++) {
        __m512 v = _mm512_load_ps(results + i * EDGE);
        if (bias && i < count) v = _mm512_add_ps(v, _mm512_set1_ps(load(bias + i)));
        r[i] = _mm512_castps_si512(rounded(v, out));
    }
    transpose(r);
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    for (int64_t i = 0; i < EDGE && i < rows; i++) store_lanes(out + i * n, _mm512_castsi512_ps(r[i]), mask);
}

// x [rows, k] @ weight.T + bias, rounded to T. Work is handed out two units at a time: with equal shares a thread whose
// core has other work to do would hold up all others.
template <class T>
void linear(const T* x, int64_t rows, int64_t k, const T* weight, const T* bias, int64_t n, T* out, int threads) {
    const int64_t tiles = ceil_div(rows, EDGE), units = ceil_div(n, 2 * EDGE), chunks = ceil_div(tiles, CHUNK_TILES);
    const int64_t tile_words = panel_words(k);
    auto* panel = static_cast<float*>(operator new(tiles * tile_words * sizeof(float), std::align_val_t(64)));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++)
            pack(x + tile * EDGE * k, smaller(rows - tile * EDGE, EDGE), k, panel + tile * tile_words);
        std::vector<T> edge;
#pragma omp for schedule(dynamic, 2) nowait
        for (int64_t item = 0; item < units * chunks; item++) {
            const int64_t n0 = item % units * 2 * EDGE, first = item / units * CHUNK_TILES;
            const int64_t last = smaller(first + CHUNK_TILES, tiles);
            const T* w = weight + n0 * k;
            if (n0 + 2 * EDGE > n) {  // outputs end inside a tile: reading on would leave the parameter
                edge.assign(2 * EDGE * k, T{});
                std::memcpy(static_cast<void*>(edge.data()), w, (n - n0) * k * sizeof(T));
                w = edge.data();
            }
            alignas(64) float results[2 * GROUP * TILE_WORDS];
            for (int64_t tile = first; tile < last; tile += GROUP) {
                const int64_t count = smaller(rows - tile * EDGE, smaller(last - tile, GROUP) * EDGE);
                multiply(w, k, panel + tile * tile_words, count, results);
                for (int64_t row = 0; row < count; row += EDGE)
                    for (int64_t at = n0; at < n && at < n0 + 2 * EDGE; at += EDGE)
                        store_tile(results + (at - n0) / EDGE * GROUP * TILE_WORDS + row * EDGE,
                                   bias ? bias + at : nullptr, smaller(n - at, EDGE), count - row,
                                   out + (tile * EDGE + row) * n + at, n);
            }
        }
    }
    operator delete(panel, std::align_val_t(64));
}

}  // namespace

#endif  // AVX-512
