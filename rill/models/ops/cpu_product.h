// x @ weight.T with the weights where torch keeps them, row by row: nothing is packed, copied or cached, so an update
// of a parameter in place is all that an update takes. Needs AVX-512, and AMX for bf16.
//
// Products are computed transposed, so that a lane is a row of x and only x has to be turned:
//
//     weight  16 outputs × 16 words of k      straight from the parameter
//     panel   16 words of k × 16 rows of x    a word is one float or two bf16; rows and k beyond the end are zero
//     result  16 outputs × 16 rows, float     one accumulator over all of k, in order
//
// An element's sum runs over k in one order whatever the number of rows or threads: a row's bits do not depend on the
// batch. Functions marked "omp for" share their work among the threads of the enclosing parallel region; those marked
// "no barrier" leave it to the caller to wait for all of it. Products are handed out two units at a time: with equal
// shares a thread whose core has other work to do would hold up all others at every barrier.

#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define RILL_PRODUCTS 1

#include <immintrin.h>

#include <new>

#include "cpu_tiles.h"
#include "cpu_vector.h"

namespace {

constexpr int EDGE = 16;                                             // of a tile
template <class T> constexpr int PER_WORD = 4 / sizeof(T);           // elements of k in a word
template <class T> constexpr int64_t DEPTH = EDGE * PER_WORD<T>;     // elements of k in a tile
constexpr int64_t TILE_WORDS = EDGE * EDGE;
template <class T> constexpr int64_t GROUP = sizeof(T) == 4 ? 4 : 2; // row tiles that are multiplied together
constexpr int64_t CHUNK_TILES = 16;                                  // rows / 16 of a panel part that stays in L2

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
int64_t panel_words(int64_t rows, int64_t k) {
    return ceil_div(rows, EDGE) * ceil_div(k, DEPTH<T>) * TILE_WORDS;
}

inline __m512i load_words(const float* x, int64_t left) {
    return _mm512_castps_si512(left >= EDGE ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps((1u << left) - 1, x));
}
inline __m512i load_words(const bf16* x, int64_t left) {
    return left >= 2 * EDGE ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1u << left) - 1, x);
}

// Up to 16 rows of x, `stride` elements apart, into one row tile of a panel.
template <class T>
void pack(const T* x, int64_t stride, int64_t rows, int64_t k, uint32_t* panel) {
    for (int64_t at = 0; at < k; at += DEPTH<T>, panel += TILE_WORDS) {
        __m512i r[EDGE];
        for (int i = 0; i < EDGE; i++)
            r[i] = i < rows ? load_words(x + i * stride + at, k - at) : _mm512_setzero_si512();
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

// Words of two neighbouring outputs, rounded: a in the low half.
inline __m512i pair_words(__m512 a, __m512 b) {
#ifdef __AVX512BF16__
    alignas(64) static constexpr uint16_t INTERLEAVED[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                             21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                             11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    return _mm512_permutexvar_epi16(_mm512_load_si512(INTERLEAVED), both);
#else
    const bf16* as_bf16 = nullptr;
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(rounded(a, as_bf16)), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(rounded(b, as_bf16)));
#endif
}

template <class T>
struct Weight {
    const T* data;  // [n, k]
    const T* bias;  // [n] or null
    int64_t n, k;
};

#ifdef RILL_AMX
// Tiles 0 to 3 hold results, 4 and 5 weights, 6 and 7 panels.
// results: [weight tile][row tile][16][16]
inline void multiply_tiles(const bf16* const w[2], int64_t stride, int64_t, const uint32_t* first, int64_t rows,
                           int64_t depth_tiles, float* results) {
    const int64_t bytes = stride * 2;
    const uint32_t* panel[2] = {first, first + depth_tiles * TILE_WORDS};
    _tile_zero(0);
    _tile_zero(2);
    if (rows > EDGE) {
        _tile_zero(1);
        _tile_zero(3);
        for (int64_t i = 0; i < depth_tiles; i++) {
            _tile_loadd(4, w[0] + i * 32, bytes);
            _tile_loadd(6, panel[0] + i * TILE_WORDS, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel[1] + i * TILE_WORDS, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, w[1] + i * 32, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(1, results + TILE_WORDS, 64);
        _tile_stored(3, results + 3 * TILE_WORDS, 64);
    } else {
        for (int64_t i = 0; i < depth_tiles; i++) {
            _tile_loadd(6, panel[0] + i * TILE_WORDS, 64);
            _tile_loadd(4, w[0] + i * 32, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, w[1] + i * 32, bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
    }
    _tile_stored(0, results, 64);
    _tile_stored(2, results + 2 * TILE_WORDS, 64);
}

inline bool bf16_products() { return may_use_tiles(); }
#else
struct TileScope {
    ~TileScope() {}
};
inline void multiply_tiles(const bf16* const*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, float*) {}
inline bool bf16_products() { return false; }
#endif

// The next weights are asked for while these are multiplied: rows of a parameter are too short for the processor to see
// where reading goes on.
template <int ROW_TILES, int OUTPUTS>
__attribute__((noinline)) void multiply_rows(const float* w, int64_t stride, int64_t k, const float* panel,
                                             int64_t tile_words, float* results) {
    __m512 sum[OUTPUTS][ROW_TILES];
    for (int n = 0; n < OUTPUTS; n++)
        for (int m = 0; m < ROW_TILES; m++) sum[n][m] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i++) {
        if (i % EDGE == 0)
            for (int n = 0; n < OUTPUTS; n++) __builtin_prefetch(w + (OUTPUTS + n) * stride + i, 0, 2);
        __m512 x[ROW_TILES];
        for (int m = 0; m < ROW_TILES; m++) x[m] = _mm512_load_ps(panel + m * tile_words + i * EDGE);
        for (int n = 0; n < OUTPUTS; n++) {
            const __m512 b = _mm512_set1_ps(w[n * stride + i]);
            for (int m = 0; m < ROW_TILES; m++) sum[n][m] = _mm512_fmadd_ps(b, x[m], sum[n][m]);
        }
    }
    for (int n = 0; n < OUTPUTS; n++)
        for (int m = 0; m < ROW_TILES; m++) _mm512_store_ps(results + m * TILE_WORDS + n * EDGE, sum[n][m]);
}

// 16 outputs, so many at a time as the registers hold sums for.
template <int ROW_TILES>
void multiply_strip(const float* w, int64_t stride, int64_t k, const float* panel, int64_t tile_words, float* results) {
    constexpr int FIRST = ROW_TILES == 4 ? 6 : 8, THEN = ROW_TILES == 4 ? 5 : 8;
    multiply_rows<ROW_TILES, FIRST>(w, stride, k, panel, tile_words, results);
    for (int n = FIRST; n < EDGE; n += THEN)
        multiply_rows<ROW_TILES, THEN>(w + n * stride, stride, k, panel, tile_words, results + n * EDGE);
}

// A few rows would leave most lanes empty: lanes are outputs then, the weights are turned, and sums keep their order.
constexpr int64_t FEW = 4;
__attribute__((noinline)) inline void multiply_few(const float* const w[2], int64_t stride, int64_t k, const float* panel,
                                                   int64_t rows, float* results) {
    __m512 sum[2][FEW];
    for (int t = 0; t < 2; t++)
        for (int m = 0; m < FEW; m++) sum[t][m] = _mm512_setzero_ps();
    for (int64_t at = 0; at < k; at += EDGE) {
        const int64_t depth = k - at < EDGE ? k - at : EDGE;
        __m512i turned[2][EDGE];
        for (int t = 0; t < 2; t++) {
            for (int n = 0; n < EDGE; n++) turned[t][n] = load_words(w[t] + n * stride + at, k - at);
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
            for (int n = 0; n < EDGE; n++) results[t * GROUP<float> * TILE_WORDS + n * EDGE + m] = outputs[n];
        }
}

inline void multiply_tiles(const float* const w[2], int64_t stride, int64_t k, const uint32_t* first, int64_t rows,
                           int64_t depth_tiles, float* results) {
    const float* panel = reinterpret_cast<const float*>(first);
    if (rows <= FEW) return multiply_few(w, stride, k, panel, rows, results);
    const int64_t tiles = ceil_div(rows, EDGE);
    auto strip = tiles == 1   ? multiply_strip<1>
                 : tiles == 2 ? multiply_strip<2>
                 : tiles == 3 ? multiply_strip<3>
                              : multiply_strip<4>;
    for (int t = 0; t < 2; t++)
        strip(w[t], stride, k, panel, depth_tiles * TILE_WORDS, results + t * GROUP<float> * TILE_WORDS);
}

// Scratch for a weight tile whose rows or k end inside a tile: reading on would leave the parameter.
template <class T>
struct Edge {
    T* data = nullptr;
    ~Edge() { operator delete[](data, std::align_val_t(64)); }
    const T* fill(const Weight<T>& w, int64_t n0, int slot, int64_t padded_k) {
        if (!data) data = static_cast<T*>(operator new[](2 * EDGE * padded_k * sizeof(T), std::align_val_t(64)));
        T* out = data + slot * EDGE * padded_k;
        std::memset(static_cast<void*>(out), 0, EDGE * padded_k * sizeof(T));
        for (int64_t n = n0; n < w.n && n < n0 + EDGE; n++)
            std::memcpy(static_cast<void*>(out + (n - n0) * padded_k), w.data + n * w.k, w.k * sizeof(T));
        return out;
    }
};

// Outputs [n0, n0 + 16) of a and [n1, n1 + 16) of b for row tiles [first, last) of a panel with that many rows; both
// have the same k. out(row tile, results of a, results of b), each [16 outputs][16 rows].
template <class T, class Out>
void multiply(const Weight<T>& a, int64_t n0, const Weight<T>& b, int64_t n1, const uint32_t* panel, int64_t rows,
              int64_t first, int64_t last, Out&& out) {
    const int64_t depth_tiles = ceil_div(a.k, DEPTH<T>), padded_k = depth_tiles * DEPTH<T>;
    const bool is_whole = n0 + EDGE <= a.n && n1 + EDGE <= b.n && (PER_WORD<T> == 1 || a.k == padded_k);
    Edge<T> edge;
    const T* w[2] = {a.data + n0 * a.k, b.data + n1 * b.k};
    if (!is_whole) {
        w[0] = edge.fill(a, n0, 0, padded_k);
        w[1] = edge.fill(b, n1, 1, padded_k);
    }
    alignas(64) float results[2 * GROUP<T> * TILE_WORDS];
    for (int64_t tile = first; tile < last; tile += GROUP<T>) {
        const int64_t left = rows - tile * EDGE, tiles = last - tile < GROUP<T> ? last - tile : GROUP<T>;
        const int64_t count = left < tiles * EDGE ? left : tiles * EDGE;
        multiply_tiles(w, is_whole ? a.k : padded_k, a.k, panel + tile * depth_tiles * TILE_WORDS, count, depth_tiles,
                       results);
        for (int64_t i = 0; i < ceil_div(count, EDGE); i++)
            out(tile + i, results + i * TILE_WORDS, results + (GROUP<T> + i) * TILE_WORDS);
    }
}

// Results of one tile, with bias, to rows of `out`.
template <class T>
void store_tile(const float* results, const Weight<T>& w, int64_t n0, int64_t row0, int64_t rows, T* out,
                int64_t stride) {
    const int64_t count = w.n - n0 < EDGE ? w.n - n0 : EDGE;
    if (count <= 0) return;
    __m512i r[EDGE];
    for (int n = 0; n < EDGE; n++) {
        __m512 v = _mm512_load_ps(results + n * EDGE);
        if (w.bias && n < count) v = _mm512_add_ps(v, _mm512_set1_ps(load(w.bias + n0 + n)));
        r[n] = _mm512_castps_si512(rounded(v, w.data));
    }
    transpose(r);
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    for (int64_t i = 0; i < EDGE && row0 + i < rows; i++)
        store_lanes(out + (row0 + i) * stride + n0, _mm512_castsi512_ps(r[i]), mask);
}

// The common case: 16 whole outputs in bf16. Two outputs make a word, so half as many words have to be turned.
inline void store_tile(const float* results, const Weight<bf16>& w, int64_t n0, int64_t row0, int64_t rows, bf16* out,
                       int64_t stride) {
    if (w.n - n0 < EDGE) return store_tile<bf16>(results, w, n0, row0, rows, out, stride);
    __m512i p[8], a[8], b[8];
    for (int i = 0; i < 8; i++) {
        __m512 v0 = _mm512_load_ps(results + 2 * i * EDGE), v1 = _mm512_load_ps(results + (2 * i + 1) * EDGE);
        if (w.bias) {
            v0 = _mm512_add_ps(v0, _mm512_set1_ps(load(w.bias + n0 + 2 * i)));
            v1 = _mm512_add_ps(v1, _mm512_set1_ps(load(w.bias + n0 + 2 * i + 1)));
        }
        p[i] = pair_words(v0, v1);
    }
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(p[2 * i], p[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(p[2 * i], p[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    bf16* target = out + row0 * stride + n0;
    auto put = [&](int row, __m256i v) {
        if (row0 + row < rows) _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + row * stride), v);
    };
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_permutex2var_epi64(b[i], first, b[4 + i]);
        const __m512i high = _mm512_permutex2var_epi64(b[i], second, b[4 + i]);
        put(i, _mm512_castsi512_si256(low));
        put(4 + i, _mm512_extracti64x4_epi64(low, 1));
        put(8 + i, _mm512_castsi512_si256(high));
        put(12 + i, _mm512_extracti64x4_epi64(high, 1));
    }
}

// omp for, no barrier. out[row, n] = x[row] · w[n] + bias[n], rounded to T.
template <class T>
void product(const uint32_t* panel, int64_t rows, const Weight<T>& w, T* out, int64_t stride) {
    const int64_t tiles = ceil_div(rows, EDGE), units = ceil_div(w.n, 2 * EDGE), chunks = ceil_div(tiles, CHUNK_TILES);
#pragma omp for schedule(dynamic, 2) nowait
    for (int64_t item = 0; item < units * chunks; item++) {
        const int64_t n = item % units * 2 * EDGE, first = item / units * CHUNK_TILES;
        const int64_t last = first + CHUNK_TILES < tiles ? first + CHUNK_TILES : tiles;
        multiply(w, n, w, n + EDGE, panel, rows, first, last, [&](int64_t tile, const float* a, const float* b) {
            store_tile(a, w, n, tile * EDGE, rows, out, stride);
            store_tile(b, w, n + EDGE, tile * EDGE, rows, out, stride);
        });
    }
}

inline void store_words(uint32_t* panel, int64_t depth_tiles, int64_t tile, int64_t n0, const __m512* v, const float*) {
    float* p = reinterpret_cast<float*>(panel + (tile * depth_tiles + n0 / EDGE) * TILE_WORDS);
    for (int n = 0; n < EDGE; n++) _mm512_store_ps(p + n * EDGE, v[n]);
}
inline void store_words(uint32_t* panel, int64_t depth_tiles, int64_t tile, int64_t n0, const __m512* v, const bf16*) {
    uint32_t* p = panel + (tile * depth_tiles + n0 / (2 * EDGE)) * TILE_WORDS + n0 % (2 * EDGE) / 2 * EDGE;
    for (int n = 0; n < EDGE; n += 2) _mm512_store_si512(p + n / 2 * EDGE, pair_words(v[n], v[n + 1]));
}

// omp for. activation(gate) * up of every row, straight into the panel of the product that follows.
template <class T, class Activation>
void gated_product(const uint32_t* panel, int64_t rows, const Weight<T>& gate, const Weight<T>& up, uint32_t* out,
                   Activation activation) {
    const int64_t tiles = ceil_div(rows, EDGE), chunks = ceil_div(tiles, CHUNK_TILES);
    const int64_t depth_tiles = ceil_div(gate.n, DEPTH<T>), units = depth_tiles * DEPTH<T> / EDGE;
#pragma omp for schedule(dynamic, 2)
    for (int64_t item = 0; item < units * chunks; item++) {
        const int64_t n0 = item % units * EDGE, first = item / units * CHUNK_TILES;
        const int64_t last = first + CHUNK_TILES < tiles ? first + CHUNK_TILES : tiles;
        if (n0 >= gate.n) {  // the panel's end, beyond the last output
            __m512 zero[EDGE] = {};
            for (int64_t tile = first; tile < last; tile++) store_words(out, depth_tiles, tile, n0, zero, gate.data);
            continue;
        }
        multiply(gate, n0, up, n0, panel, rows, first, last, [&](int64_t tile, const float* g, const float* u) {
            __m512 v[EDGE];
            for (int n = 0; n < EDGE; n++) {
                const vec x = reinterpret_cast<vec>(rounded(_mm512_load_ps(g + n * EDGE), gate.data));
                const __m512 a = rounded(reinterpret_cast<__m512>(activation(x)), gate.data);
                v[n] = _mm512_mul_ps(a, rounded(_mm512_load_ps(u + n * EDGE), gate.data));  // store_words rounds it
            }
            store_words(out, depth_tiles, tile, n0, v, gate.data);
        });
    }
}

}  // namespace

#endif  // AVX-512
