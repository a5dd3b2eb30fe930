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

#include "cpu_attention_paged.h"
#include "cpu_product.h"
#include "cpu_vector.h"

namespace {

template <class T>
void norm_row(const T* x, const T* w, T* out, int64_t size, float eps, int gemma) {
    float sum = 0.f;
    for (int64_t i = 0; i < size; i++) {
        float v = load(x + i);
        sum += v * v;
    }
    float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
    if (gemma) {
        for (int64_t i = 0; i < size; i++) store(out + i, load(x + i) * scale * (1.0f + load(w + i)));
    } else {
        for (int64_t i = 0; i < size; i++) store(out + i, rounded(load(x + i) * scale, x) * load(w + i));
    }
}

template <class T>
void add_norm(T* h, const T* x, const T* w, T* out, int64_t n, int64_t size, float eps, int gemma, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * size > 16384)
    for (int64_t row = 0; row < n; row++) {
        T* target = h + row * size;
        if (x)
            for (int64_t i = 0; i < size; i++) store(target + i, load(target + i) + load(x + row * size + i));
        norm_row(target, w, out + row * size, size, eps, gemma);
    }
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

template <class T>
void rope_row(T* x, const T* cs, const T* sn, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = load(x + i), b = load(x + i + half);
        float c = load(cs + i), s = load(sn + i);
        float c2 = load(cs + i + half), s2 = load(sn + i + half);
        store(x + i, rounded(a * c, x) + rounded(-b * s, x));
        store(x + i + half, rounded(b * c2, x) + rounded(a * s2, x));
    }
}

// qkv [n, (H + 2K) * D]: normalise (optional) and rotate q and k, put k and v into their slot.
template <class T>
void rope_store(T* qkv, const T* cs, const T* sn, const int64_t* positions, const int64_t* slots, const T* qw,
                const T* kw, float eps, T* keys, T* values, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,
                int threads) {
    const int64_t size = kv_heads * dim, width = heads * dim + 2 * size;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * width > 16384)
    for (int64_t row = 0; row < n; row++) {
        T* token = qkv + row * width;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            T* x = token + h * dim;
            if (qw) norm_row(x, h < heads ? qw : kw, x, dim, eps, 0);
            rope_row(x, cs + positions[row] * dim, sn + positions[row] * dim, dim);
        }
        std::memcpy(keys + slots[row] * size, token + heads * dim, sizeof(T) * size);
        std::memcpy(values + slots[row] * size, token + heads * dim + size, sizeof(T) * size);
    }
}

template <class T>
void* find(const std::string& name) {
    if (name == "add_norm") return reinterpret_cast<void*>(&add_norm<T>);
    if (name == "act_mul") return reinterpret_cast<void*>(&act_mul<T>);
    if (name == "rope_store") return reinterpret_cast<void*>(&rope_store<T>);
    if (name == "attend") return reinterpret_cast<void*>(&attend<T>);
#ifdef RILL_PRODUCTS
    if (name == "linear") return reinterpret_cast<void*>(&linear<T>);
#endif
    return nullptr;
}

}  // namespace

// A kernel's address, for cpu_kernels.py to call; null where this processor has none.
extern "C" void* kernel(const char* name, int is_bf16) { return is_bf16 ? find<bf16>(name) : find<float>(name); }
