// Matrix products in bfloat16 on processors with AMX, for training. Built by cpu_build.py; plain pointers.
//
//     matmul        C[M, N]  = sum over parts of A_p[M, K_p] · op(B_p)   + bias + addend       bf16 in and out
//     gated         act(x Gᵀ) · (x Uᵀ), and the gradients of both factors, without a pass over memory of their own
//     weight_grad   C[N, K] (+)= G[T, N]ᵀ · X[T, K]                                            bf16 in, float out
//
// Sums are float, inside a tile register, and go over the inner dimension in order: a result depends neither on the
// number of threads nor on the number of rows. Inner dimensions and widths are multiples of 32; numbers of rows (M, T)
// are arbitrary. Operands are brought into tile order first:
//
//     left tile    16 rows x 32 inner values
//     right tile   16 pairs of inner values x 16 columns, the two of a pair side by side
//
// A left operand that is stored by rows is read where it lies.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cpu_activation.h"
#include "cpu_tiles.h"

#if defined(RILL_AMX) && defined(__AVX512BF16__)

namespace {

constexpr int64_t BLOCK = 32;          // rows and columns of the result kept in registers: 2 x 2 tiles
constexpr int64_t TILE = 512;          // values in a tile of 1 KiB
constexpr int64_t PANELS_BYTES = 3 << 18;         // of one operand, used again and again from the second-level cache
constexpr int64_t SUMS_IN_CACHE_BYTES = 4 << 20;  // of weight_grad's result

struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    bf16* get(size_t count) {
        if (count * sizeof(bf16) > size) {
            std::free(data);
            size = (count * sizeof(bf16) + 4095) / 4096 * 4096;
            data = std::aligned_alloc(4096, size);
        }
        return static_cast<bf16*>(data);
    }
    ~Buffer() { std::free(data); }
};
thread_local Buffer left_buffer, right_buffer;

// 16 dwords, each the values (even[i], odd[i]) of two rows; rows at or past `count` are zero.
inline __m512i pair_rows(const bf16* even, int64_t stride, int64_t count) {
    __m512i low = _mm512_setzero_si512(), high = low;
    if (count > 0) low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    if (count > 1) high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + stride)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Right tile from B[k][n]: 32 rows, of which `count` exist.
inline void right_tile_of_rows(const bf16* b, int64_t stride, int64_t count, bf16* out) {
    for (int p = 0; p < 16; p++) _mm512_store_si512(out + p * 32, pair_rows(b + 2 * p * stride, stride, count - 2 * p));
}

// Right tile from B[n][k]: 16 rows of 32 values.
inline void right_tile_of_columns(const bf16* b, int64_t stride, bf16* out) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(b + i * stride);
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 32, r[i]);
}

// Left tile of Aᵀ from A[k][m]: 32 rows of 16 values, of which `count` rows exist.
inline void left_tile_of_columns(const bf16* a, int64_t stride, int64_t count, bf16* out) {
    __m512i r[16];
    for (int p = 0; p < 16; p++) r[p] = pair_rows(a + 2 * p * stride, stride, count - 2 * p);
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 32, r[i]);
}

// Tiles 0 to 3 += left rows (two tiles, `row_bytes` between rows, `step` values to the next 32) · right tiles in order.
// `meanwhile` is called at every step: vector work that goes on while the tile unit is busy.
template <class Work>
inline void multiply(const bf16* top, const bf16* bottom, int64_t row_bytes, int64_t step, const bf16* right,
                     int64_t num_steps, Work&& meanwhile) {
    for (int64_t k = 0; k < num_steps; k++) {
        _tile_loadd(4, top + k * step, row_bytes);
        _tile_loadd(6, right + k * 2 * TILE, 64);
        _tile_loadd(7, right + k * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, bottom + k * step, row_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        meanwhile();
    }
}

inline void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void store_tiles(float* to, int64_t stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + 16, stride * 4);
    _tile_stored(2, to + 16 * stride, stride * 4);
    _tile_stored(3, to + 16 * stride + 16, stride * 4);
}

inline void load_tiles(const float* from, int64_t stride) {
    _tile_loadd(0, from, stride * 4);
    _tile_loadd(1, from + 16, stride * 4);
    _tile_loadd(2, from + 16 * stride, stride * 4);
    _tile_loadd(3, from + 16 * stride + 16, stride * 4);
}

inline __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
inline __m512 from_half(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline __m512 from_bf16(const bf16* p) {
    return from_half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Where sums go: each of these writes 32 values of one row, at column n. Values are rounded to bf16 where Hugging Face's
// modules round: after the bias, again after the addend, and after the activation.

struct LinearRow {
    const bf16 *bias, *addend;
    int64_t addend_stride;
    bf16* c;
    int64_t stride;

    void operator()(int64_t row, int64_t n, const float* sums, const float*) const {
        __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
        if (bias) {
            low = _mm512_add_ps(low, from_bf16(bias + n));
            high = _mm512_add_ps(high, from_bf16(bias + n + 16));
        }
        __m512i out = to_bf16(low, high);
        if (addend) {
            const bf16* more = addend + row * addend_stride + n;
            low = _mm512_add_ps(from_half(_mm512_castsi512_si256(out)), from_bf16(more));
            high = _mm512_add_ps(from_half(_mm512_extracti64x4_epi64(out, 1)), from_bf16(more + 16));
            out = to_bf16(low, high);
        }
        _mm512_storeu_si512(c + row * stride + n, out);
    }
};

inline void store_pair(bf16* to, const vec* v) {
    _mm512_storeu_si512(to, to_bf16(reinterpret_cast<__m512>(v[0]), reinterpret_cast<__m512>(v[1])));
}
inline vec rounded_vec(vec v) {
    return reinterpret_cast<vec>(from_half((__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v))));
}

// act(gate) · up; gate and up themselves are stored where the backward pass will need them.
struct GatedRow {
    bf16 *gate, *up, *out;
    int64_t width;
    bool gelu;

    void operator()(int64_t row, int64_t n, const float* gates, const float* ups) const {
        vec g[2], u[2], z[2];
        for (int i = 0; i < 2; i++) {
            g[i] = rounded_vec(load_vec(gates + i * LANES));
            u[i] = rounded_vec(load_vec(ups + i * LANES));
            z[i] = rounded_vec(gelu ? gelu_tanh(g[i]) : silu(g[i])) * u[i];
        }
        const int64_t at = row * width + n;
        store_pair(out + at, z);
        if (gate) {
            store_pair(gate + at, g);
            store_pair(up + at, u);
        }
    }
};

// The sums are the gradient of act(gate) · up. gate and up become their gradients, out the product itself.
struct GatedGradRow {
    bf16 *gate, *up, *out;
    int64_t width;
    bool gelu;

    void operator()(int64_t row, int64_t n, const float* sums, const float*) const {
        vec dg[2], du[2], z[2];
        const int64_t at = row * width + n;
        for (int i = 0; i < 2; i++) {
            const vec d = rounded_vec(load_vec(sums + i * LANES)), u = load_vec(up + at + i * LANES);
            vec act, slope;
            activate(load_vec(gate + at + i * LANES), gelu, &act, &slope);
            act = rounded_vec(act);
            dg[i] = d * u * slope;
            du[i] = d * act;
            z[i] = act * u;
        }
        store_pair(gate + at, dg);
        store_pair(up + at, du);
        store_pair(out + at, z);
    }
};

struct Part {
    const bf16* a;
    int64_t a_stride;
    const bf16* b;
    int64_t b_stride;
    int64_t inner;
};

// Panels of 32 columns; in a panel all parts follow one another, 2 tiles for each 32 inner values.
void pack_right(const Part* parts, int num_parts, int64_t total, bool by_columns, int64_t panel, bf16* out) {
    bf16* to = out + panel * BLOCK * total;
    for (int p = 0; p < num_parts; p++)
        for (int64_t k = 0; k < parts[p].inner; k += 32)
            for (int half = 0; half < 2; half++, to += TILE) {
                int64_t n = panel * BLOCK + half * 16, stride = parts[p].b_stride;
                if (by_columns)
                    right_tile_of_columns(parts[p].b + n * stride + k, stride, to);
                else
                    right_tile_of_rows(parts[p].b + k * stride + n, stride, 32, to);
            }
}

// 32 rows of every left operand: where they lie, or copied and filled up with zeros at the end.
struct Band {
    const bf16* left[8];
    int64_t stride[8];

    Band(const Part* parts, int num_parts, int64_t total, int64_t row, int64_t count) {
        bf16* tail = count < BLOCK ? left_buffer.get(BLOCK * total) : nullptr;
        if (tail) std::memset(static_cast<void*>(tail), 0, BLOCK * total * sizeof(bf16));
        for (int p = 0; p < num_parts; p++) {
            left[p] = parts[p].a + row * parts[p].a_stride;
            stride[p] = parts[p].a_stride;
            if (!tail) continue;
            const int64_t inner = parts[p].inner;
            for (int64_t r = 0; r < count; r++)
                std::memcpy(static_cast<void*>(tail + r * inner), left[p] + r * stride[p], inner * sizeof(bf16));
            left[p] = tail;
            stride[p] = inner;
            tail += BLOCK * inner;
        }
    }
};

// One block of sums on its way to the result, a few rows at a time while the next block is computed.
template <class Row>
struct Pending {
    const Row& write_row;
    const float* sums = nullptr;
    int64_t row = 0, n = 0, count = 0, next = 0;

    void write(int64_t rows) {
        const int64_t end = std::min(count, next + rows);
        for (; next < end; next++)
            write_row(row + next, n, sums + next * BLOCK, sums + BLOCK * BLOCK + next * BLOCK);
    }
};

// With `is_pair`, two parts are two products of one left operand, handed to write_row together; else parts are added.
template <class Row>
void matmul(const Part* parts, int num_parts, bool is_pair, bool by_columns, int64_t rows, int64_t width,
            const Row& write_row, int threads) {
    int64_t total = 0;
    for (int p = 0; p < num_parts; p++) total += parts[p].inner;
    const int64_t num_panels = width / BLOCK, num_bands = (rows + BLOCK - 1) / BLOCK;
    bf16* packed = right_buffer.get(total * width);
    // Panels are visited in groups that stay in the second-level cache while bands of rows pass by.
    const int64_t group = std::max<int64_t>(1, PANELS_BYTES / (total * BLOCK * 2));
    const int64_t per_step = std::max<int64_t>(1, BLOCK / (total / 32));
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * width * total > (1 << 22))
    {
        TileScope scope;
        alignas(64) float sums[2][2 * BLOCK * BLOCK];
        Pending<Row> pending{write_row};
        int64_t num_blocks = 0;
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels; panel++)
            pack_right(parts, num_parts, total, by_columns, panel, packed);
#pragma omp for schedule(dynamic, 4) collapse(2) nowait
        for (int64_t first = 0; first < num_panels; first += group)
            for (int64_t band = 0; band < num_bands; band++) {
                const int64_t row = band * BLOCK, count = std::min(BLOCK, rows - row);
                const Band left(parts, num_parts, total, row, count);
                const int64_t last = std::min(first + group, num_panels);
                for (int64_t panel = first; panel < last; panel++) {
                    const bf16* right = packed + panel * BLOCK * total;
                    float* to = sums[num_blocks++ % 2];
                    zero_tiles();
                    for (int p = 0; p < num_parts; p++) {
                        multiply(left.left[p], left.left[p] + 16 * left.stride[p], left.stride[p] * 2, 32, right,
                                 parts[p].inner / 32, [&] { pending.write(per_step); });
                        right += BLOCK * parts[p].inner;
                        if (is_pair && p == 0) {
                            store_tiles(to, BLOCK);
                            zero_tiles();
                        }
                    }
                    pending.write(BLOCK);
                    store_tiles(is_pair ? to + BLOCK * BLOCK : to, BLOCK);
                    pending.sums = to;
                    pending.row = row;
                    pending.n = panel * BLOCK;
                    pending.count = count;
                    pending.next = 0;
                }
            }
        pending.write(BLOCK);
    }
}

// 32 rows of an operand of weight_grad, of which `count` exist, into tile `step` of every panel. By rows: memory is
// read in the order it lies in.
void pack_rows(const bf16* from, int64_t stride, int64_t count, int64_t width, bool is_left, int64_t chunk, int64_t step,
               bf16* to) {
    for (int64_t at = 0; at < width; at += 16) {
        bf16* tile = to + at / BLOCK * BLOCK * chunk + step * 2 * TILE + at / 16 % 2 * TILE;
        if (is_left)
            left_tile_of_columns(from + at, stride, count, tile);
        else
            right_tile_of_rows(from + at, stride, count, tile);
    }
}

void weight_grad(const bf16* g, int64_t g_stride, const bf16* x, int64_t x_stride, float* c, int64_t stride,
                 int64_t tokens, int64_t num_out, int64_t num_in, bool accumulate, int threads) {
    const int64_t out_panels = num_out / BLOCK, in_panels = num_in / BLOCK;
    // The sums are read and written once a chunk. Small ones stay in cache, and a short chunk lets a left panel stay in
    // the first level; large ones come from memory, and long chunks make them come less often.
    const int64_t longest = num_out * num_in * 4 <= SUMS_IN_CACHE_BYTES ? 384 : 2048;
    const int64_t chunk = std::min((tokens + 31) / 32 * 32, longest);
    bf16* left = left_buffer.get(num_out * chunk);
    bf16* right = right_buffer.get(num_in * chunk);
    const int64_t group = std::max<int64_t>(1, PANELS_BYTES / (chunk * BLOCK * 2));
#pragma omp parallel num_threads(threads) if (threads > 1 && tokens * num_out * num_in > (1 << 22))
    {
        TileScope scope;
        for (int64_t first = 0; first < tokens; first += chunk) {
            const int64_t count = std::min(chunk, tokens - first), steps = (count + 31) / 32;
#pragma omp for schedule(static)
            for (int64_t step = 0; step < steps; step++) {
                const int64_t row = first + step * 32, left_rows = std::min<int64_t>(32, tokens - row);
                pack_rows(g + row * g_stride, g_stride, left_rows, num_out, true, chunk, step, left);
                pack_rows(x + row * x_stride, x_stride, left_rows, num_in, false, chunk, step, right);
            }
#pragma omp for schedule(static) collapse(2)
            for (int64_t start = 0; start < in_panels; start += group)
                for (int64_t o = 0; o < out_panels; o++) {
                    const bf16* top = left + o * BLOCK * chunk;
                    const int64_t end = std::min(in_panels, start + group);
                    for (int64_t i = start; i < end; i++) {
                        float* to = c + o * BLOCK * stride + i * BLOCK;
                        if (first == 0 && !accumulate)
                            zero_tiles();
                        else
                            load_tiles(to, stride);
                        multiply(top, top + TILE, 64, 2 * TILE, right + i * BLOCK * chunk, steps, [] {});
                        store_tiles(to, stride);
                    }
                }
        }
    }
}

}  // namespace

// 1 when this process may use the tiles.
extern "C" int can_multiply() { return may_use_tiles(); }

// `parts` are (a, a_stride, b, b_stride, inner) one after another, at most 8 of them.
extern "C" void matmul_bf16(const int64_t* parts, int num_parts, int by_columns, const void* bias, const void* addend,
                            int64_t addend_stride, void* c, int64_t stride, int64_t rows, int64_t width, int threads) {
    Part list[8];
    for (int p = 0; p < num_parts; p++, parts += 5)
        list[p] = {reinterpret_cast<const bf16*>(parts[0]), parts[1], reinterpret_cast<const bf16*>(parts[2]), parts[3],
                   parts[4]};
    matmul(list, num_parts, false, by_columns, rows, width,
           LinearRow{(const bf16*)bias, (const bf16*)addend, addend_stride, (bf16*)c, stride}, threads);
}

// out = act(x Gᵀ) · (x Uᵀ), all contiguous; gate and up may be null.
extern "C" void gated_bf16(const void* x, const void* gate_weight, const void* up_weight, void* gate, void* up, void* out,
                           int64_t rows, int64_t width, int64_t inner, int gelu, int threads) {
    const Part parts[2] = {{(const bf16*)x, inner, (const bf16*)gate_weight, inner, inner},
                           {(const bf16*)x, inner, (const bf16*)up_weight, inner, inner}};
    matmul(parts, 2, true, true, rows, width, GatedRow{(bf16*)gate, (bf16*)up, (bf16*)out, width, gelu != 0}, threads);
}

// The gradient of out is grad · D: gate and up become their gradients, out = act(gate) · up.
extern "C" void gated_grad_bf16(const void* grad, const void* down_weight, void* gate, void* up, void* out, int64_t rows,
                                int64_t width, int64_t inner, int gelu, int threads) {
    const Part part = {(const bf16*)grad, inner, (const bf16*)down_weight, width, inner};
    matmul(&part, 1, false, false, rows, width, GatedGradRow{(bf16*)gate, (bf16*)up, (bf16*)out, width, gelu != 0},
           threads);
}

extern "C" void weight_grad_bf16(const void* g, int64_t g_stride, const void* x, int64_t x_stride, float* c,
                                 int64_t stride, int64_t tokens, int64_t num_out, int64_t num_in, int accumulate,
                                 int threads) {
    weight_grad((const bf16*)g, g_stride, (const bf16*)x, x_stride, c, stride, tokens, num_out, num_in, accumulate,
                threads);
}

#else

extern "C" int can_multiply() { return 0; }
extern "C" void matmul_bf16(const int64_t*, int, int, const void*, const void*, int64_t, void*, int64_t, int64_t, int64_t,
                            int) {}
extern "C" void gated_bf16(const void*, const void*, const void*, void*, void*, void*, int64_t, int64_t, int64_t, int,
                           int) {}
extern "C" void gated_grad_bf16(const void*, const void*, void*, void*, void*, int64_t, int64_t, int64_t, int, int) {}
extern "C" void weight_grad_bf16(const void*, int64_t, const void*, int64_t, float*, int64_t, int64_t, int64_t, int64_t,
                                 int, int) {}

#endif
