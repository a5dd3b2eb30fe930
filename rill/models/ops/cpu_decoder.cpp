// A whole step of a decoder-only transformer in one call: every layer's norms, products, rotary embedding, cache
// writes, attention and activation, by one team of threads that meets at barriers. Called by cpu_decoder.py, whose
// structures mirror those below.
//
//     hidden ─► norm ─► q k v ─► rope, write cache ─► attend ─► out ─┐
//                 ▲                                                  ▼
//                 └── (+, norm) ◄── down ◄── act · mul ◄── gate, up ◄── (+, norm)
//
// Rows are bit-identical whatever else is in the batch and however many threads there are.

#include "cpu_attention_paged.h"
#include "cpu_product.h"

extern "C" {

struct Shape {
    int64_t hidden, intermediate, heads, kv_heads, dim, block_size, num_layers;
    float eps, scale, softcap;
    int32_t is_gemma, is_gelu, threads, padding;
};

struct LayerWeights {
    const void *q, *k, *v, *out, *gate, *up, *down;
    const void *q_bias, *k_bias, *v_bias, *out_bias;  // null where there is none
    const void *q_norm, *k_norm;                      // null where there is none
    const void *input_norm, *feedforward_norm;
    const void *post_attention_norm, *post_feedforward_norm;  // of what is added to the residual; null where there is none
    void *keys, *values;
    int64_t window;
};

struct Batch {
    int64_t rows, num_seqs, table_stride;
    const int64_t *positions, *slots;
    const int32_t *tables, *starts, *lengths;
    const void *cos, *sin;
};
}

#ifdef RILL_PRODUCTS

namespace {

// Parts of one buffer; each starts at a cache line.
struct Workspace {
    char* at;
    template <class P>
    P* take(int64_t count) {
        P* part = reinterpret_cast<P*>(at);
        at += ceil_div(count * static_cast<int64_t>(sizeof(P)), 64) * 64;
        return part;
    }
};

template <class T>
struct Buffers {
    T *qkv, *attended, *addend, *normed;
    uint32_t *narrow, *wide;  // panels: of the hidden size or all heads, and of the intermediate size

    Buffers(const Shape& s, int64_t rows, Workspace& space) {
        const int64_t padded = ceil_div(rows, EDGE) * EDGE;
        qkv = space.take<T>(rows * (s.heads + 2 * s.kv_heads) * s.dim);
        attended = space.take<T>(rows * s.heads * s.dim);
        addend = space.take<T>(rows * s.hidden);
        normed = space.take<T>(padded * s.hidden);
        const int64_t all_heads = s.heads * s.dim;
        narrow = space.take<uint32_t>(panel_words<T>(rows, all_heads > s.hidden ? all_heads : s.hidden));
        wide = space.take<uint32_t>(panel_words<T>(rows, s.intermediate));
    }
};

// omp for. hidden += x (when given, normed first by `post` when that is given); the panel holds norm(hidden).
template <class T>
void add_norm_pack(const Shape& s, T* hidden, T* x, const void* post, const void* weight, T* normed, int64_t rows,
                   uint32_t* panel) {
    const int64_t width = s.hidden, tile_words = panel_words<T>(1, width);
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < ceil_div(rows, EDGE); tile++) {
        const int64_t first = tile * EDGE, last = first + EDGE < rows ? first + EDGE : rows;
        for (int64_t row = first; row < last; row++) {
            T* xr = x ? x + row * width : nullptr;
            if (x && post) norm_row(xr, static_cast<const T*>(post), xr, width, s.eps, s.is_gemma);
            add_norm_row(hidden + row * width, xr, static_cast<const T*>(weight), normed + row * width, width, s.eps,
                         s.is_gemma);
        }
        if (panel) pack(normed + first * width, width, last - first, width, panel + tile * tile_words);
    }
}

// omp for.
template <class T>
void pack_all(const T* x, int64_t rows, int64_t k, uint32_t* panel) {
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < ceil_div(rows, EDGE); tile++) {
        const int64_t first = tile * EDGE, count = rows - first < EDGE ? rows - first : EDGE;
        pack(x + first * k, k, count, k, panel + tile * panel_words<T>(1, k));
    }
}

// One layer after its input norm has been packed into `narrow`. Leaves in `addend` what the residual still lacks.
template <class T>
void run_layer(const Shape& s, const LayerWeights& l, const Batch& b, const std::vector<QueryBlock>& blocks, T* hidden,
               Buffers<T>& to) {
    auto typed = [](const void* p) { return static_cast<const T*>(p); };
    const int64_t q_width = s.heads * s.dim, kv_width = s.kv_heads * s.dim, width = q_width + 2 * kv_width;
    product(to.narrow, b.rows, Weight<T>{typed(l.q), typed(l.q_bias), q_width, s.hidden}, to.qkv, width);
    product(to.narrow, b.rows, Weight<T>{typed(l.k), typed(l.k_bias), kv_width, s.hidden}, to.qkv + q_width, width);
    product(to.narrow, b.rows, Weight<T>{typed(l.v), typed(l.v_bias), kv_width, s.hidden},
            to.qkv + q_width + kv_width, width);
#pragma omp barrier
    T *keys = static_cast<T*>(l.keys), *values = static_cast<T*>(l.values);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < b.rows; row++)
        rope_store_row(to.qkv + row * width, typed(b.cos) + b.positions[row] * s.dim,
                       typed(b.sin) + b.positions[row] * s.dim, typed(l.q_norm), typed(l.k_norm), s.eps,
                       keys + b.slots[row] * kv_width, values + b.slots[row] * kv_width, s.heads, s.kv_heads, s.dim);
    attend(blocks, to.qkv, width, keys, values, b.tables, b.table_stride, s.heads, s.kv_heads, s.dim, s.block_size,
           s.scale, l.window, s.softcap, to.attended);
    pack_all(to.attended, b.rows, q_width, to.narrow);
    product(to.narrow, b.rows, Weight<T>{typed(l.out), typed(l.out_bias), s.hidden, q_width}, to.addend, s.hidden);
#pragma omp barrier
    add_norm_pack(s, hidden, to.addend, l.post_attention_norm, l.feedforward_norm, to.normed, b.rows, to.narrow);
    const Weight<T> gate{typed(l.gate), nullptr, s.intermediate, s.hidden};
    const Weight<T> up{typed(l.up), nullptr, s.intermediate, s.hidden};
    if (s.is_gelu)
        gated_product(to.narrow, b.rows, gate, up, to.wide, [](vec v) { return gelu_tanh(v); });
    else
        gated_product(to.narrow, b.rows, gate, up, to.wide, [](vec v) { return silu(v); });
    product(to.wide, b.rows, Weight<T>{typed(l.down), nullptr, s.hidden, s.intermediate}, to.addend, s.hidden);
#pragma omp barrier
}

// hidden: embedded tokens [rows, hidden], overwritten; out: last hidden states after the final norm.
template <class T>
void decode(const Shape& s, const LayerWeights* layers, const Batch& b, const void* final_norm, T* hidden, T* out,
            char* space) {
    Workspace workspace{space};
    Buffers<T> to(s, b.rows, workspace);
    const auto blocks = query_blocks(b.starts, b.lengths, b.num_seqs, s.heads, s.kv_heads, s.threads);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
    {
        TileScope tiles;
        add_norm_pack<T>(s, hidden, nullptr, nullptr, layers[0].input_norm, to.normed, b.rows, to.narrow);
        for (int64_t i = 0; i < s.num_layers; i++) {
            run_layer(s, layers[i], b, blocks, hidden, to);
            const bool is_last = i + 1 == s.num_layers;
            add_norm_pack(s, hidden, to.addend, layers[i].post_feedforward_norm,
                          is_last ? final_norm : layers[i + 1].input_norm, is_last ? out : to.normed, b.rows,
                          is_last ? nullptr : to.narrow);
        }
    }
}

template <class T>
void linear(const T* x, int64_t rows, int64_t k, const T* weight, const T* bias, int64_t n, T* out, uint32_t* panel,
            int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        TileScope tiles;
        pack_all(x, rows, k, panel);
        product(panel, rows, Weight<T>{weight, bias, n, k}, out, n);
    }
}

}  // namespace

extern "C" int supports_f32() { return 1; }
extern "C" int supports_bf16() { return bf16_products(); }

#define EXPORT(SUFFIX, T)                                                                                               \
    extern "C" int64_t workspace_bytes_##SUFFIX(const Shape* s, int64_t rows) {                                         \
        Workspace space{nullptr};                                                                                       \
        Buffers<T> all(*s, rows, space);                                                                                \
        return reinterpret_cast<int64_t>(space.at);                                                                     \
    }                                                                                                                   \
    extern "C" void decode_##SUFFIX(const Shape* s, const LayerWeights* layers, const Batch* b, const void* final_norm, \
                                    void* hidden, void* out, void* space) {                                             \
        decode(*s, layers, *b, final_norm, (T*)hidden, (T*)out, (char*)space);                                          \
    }                                                                                                                   \
    extern "C" void linear_##SUFFIX(const void* x, int64_t rows, int64_t k, const void* weight, const void* bias,       \
                                    int64_t n, void* out, void* panel, int threads) {                                   \
        linear((const T*)x, rows, k, (const T*)weight, (const T*)bias, n, (T*)out, (uint32_t*)panel, threads);          \
    }                                                                                                                   \
    extern "C" int64_t panel_bytes_##SUFFIX(int64_t rows, int64_t k) { return panel_words<T>(rows, k) * 4; }

EXPORT(f32, float)
EXPORT(bf16, bf16)

#else

extern "C" int supports_f32() { return 0; }
extern "C" int supports_bf16() { return 0; }

#endif
