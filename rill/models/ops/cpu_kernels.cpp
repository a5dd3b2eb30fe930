// CPU kernels for decoding, one for each stage. Built by cpu_build.py; called by cpu_kernels.py
// with plain pointers. Rows lie one after the other:
//
//     h, x, out  [n, size]             add_norm: h += x, out = norm(h) · w
//     gate_up    [n, 2 · size]         act_mul: out = act(gate) · up
//     qkv        [n, (H + 2K) · D]     rope_store: q and k rotated in place, k and v written to slots of the cache
//     x          [n, k]                linear: x @ weight.T + bias (cpu_product.h)
//
// Every output row is computed by one thread, in an order that depends on that row's own data alone. A row is
// therefore bit-identical whatever else is in the batch and however many threads there are.

#include <string>
#include <vector>

#include "cpu_attention_paged.h"
#include "cpu_product.h"
#include "cpu_vector.h"

namespace {

template <class T>
void add_norm(T* h, const T* x, const T* w, T* out, int64_t n, int64_t size, float eps, int gemma, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * size > 16384)
    for (int64_t row = 0; row < n; row++)
        add_norm_row(h + row * size, x ? x + row * size : nullptr, w, out + row * size, size, eps, gemma);
}

// gate_up [n, 2 * size] -> out [n, size]
template <class T>
void act_mul(const T* gate_up, T* out, int64_t n, int64_t size, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * size > 16384)
    for (int64_t row = 0; row < n; row++) {
        const T* g = gate_up + row * 2 * size;
        const T* u = g + size;
        T* o = out + row * size;
        if (gelu)
            for (int64_t i = 0; i < size; i++) store(o + i, rounded(gelu_tanh(load(g + i)), g) * load(u + i));
        else
            for (int64_t i = 0; i < size; i++) store(o + i, rounded(silu(load(g + i)), g) * load(u + i));
    }
}

// qkv [n, (H + 2K) * D]
template <class T>
void rope_store(T* qkv, const T* cs, const T* sn, const int64_t* positions, const int64_t* slots, const T* qw,
                const T* kw, float eps, T* keys, T* values, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,
                int threads) {
    int64_t width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * width > 16384)
    for (int64_t row = 0; row < n; row++)
        rope_store_row(qkv + row * width, cs + positions[row] * dim, sn + positions[row] * dim, qw, kw, eps,
                       keys + slots[row] * kv_heads * dim, values + slots[row] * kv_heads * dim, heads, kv_heads, dim);
}

template <class T>
void attend_all(const T* query, int64_t query_stride, const T* keys, const T* values, const int32_t* tables,
                int64_t table_stride, const int32_t* starts, const int32_t* lengths, int64_t num_seqs, int64_t heads,
                int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window, float cap,
                const T* sinks, T* out, int threads) {
    const auto blocks = query_blocks(starts, lengths, num_seqs, heads, kv_heads, threads);
#pragma omp parallel num_threads(threads) if (threads > 1 && starts[num_seqs] * heads > 8)
    attend(blocks, query, query_stride, keys, values, tables, table_stride, heads, kv_heads, dim, block_size, scale,
           window, cap, sinks, out);
}

template <class T>
void* find(const std::string& name) {
    if (name == "add_norm") return reinterpret_cast<void*>(&add_norm<T>);
    if (name == "act_mul") return reinterpret_cast<void*>(&act_mul<T>);
    if (name == "rope_store") return reinterpret_cast<void*>(&rope_store<T>);
    if (name == "attend") return reinterpret_cast<void*>(&attend_all<T>);
#ifdef RILL_PRODUCTS
    if (name == "linear") return reinterpret_cast<void*>(&linear<T>);
#endif
    return nullptr;
}

}  // namespace

// A kernel's address, for cpu_kernels.py to call; null where this processor has none.
extern "C" void* kernel(const char* name, int is_bf16) { return is_bf16 ? find<bf16>(name) : find<float>(name); }

#ifdef RILL_PRODUCTS
// What `linear` writes x into.
extern "C" int64_t panel_bytes(int64_t rows, int64_t k) { return panel_words(rows, k) * 4; }
#endif
