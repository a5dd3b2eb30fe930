// CPU kernels for decoding, one for each stage. Built by cpu_build.py; called by cpu_kernels.py
// with plain pointers. Rows lie one after the other:
//
//     h, x, out  [n, size]             add_norm: h += x, out = norm(h) · w
//     gate_up    [n, 2 · size]         act_mul: out = act(gate) · up
//     qkv        [n, (H + 2K) · D]     rope_store: q and k rotated in place, k and v written to slots of the cache
//     logits     [n, vocabulary]       sample: token and log-probability of each row
//     x          [n, k]                linear: x @ weight.T + bias (cpu_product.h)
//
// Every output row is computed by one thread, in an order that depends on that row's own data alone. A row is
// therefore bit-identical whatever else is in the batch and however many threads there are.

#include <algorithm>
#include <functional>
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

// One row: token by inverse CDF in vocabulary order, and its log-probability. temperature 0 is greedy. Where no logit is
// a number the log-probability is NaN, and the token means nothing.
constexpr int64_t SPAN = 512;

// exp(logit / temperature - shift) of [begin, end), 0 below `cut`; out may be null. Returns the sum.
// Not inlined: sampling and scoring must sum in one order, and the compiler picks an order per copy.
template <class T>
__attribute__((noinline)) float span_weights(const T* logits, int64_t begin, int64_t end, float inv, float shift,
                                             float cut, float* out) {
    vec sums = {};
    for (int64_t i = begin; i < end; i += LANES) {
        float x[LANES];
        vec scaled;
        if (end - i >= LANES) {
            scaled = load_vec(logits + i) * inv;
        } else {
            for (int t = 0; t < LANES; t++) x[t] = i + t < end ? load(logits + i + t) * inv : -INFINITY;
            scaled = load_vec(x);
        }
        const vec weights = scaled >= cut && scaled > MASKED ? exp_vec(scaled - shift) : vec{};
        sums += weights;
        if (out) *reinterpret_cast<vec*>(out + (i - begin)) = weights;
    }
    return sum_lanes(sums);
}

template <class T>
float largest(const T* logits, int64_t vocab) {
    vec top = vec{} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        const vec v = load_vec(logits + i);
        top = v > top ? v : top;
    }
    float best = max_lane(top);
    for (; i < vocab; i++) best = load(logits + i) > best ? load(logits + i) : best;
    return best;
}

// The sum of all weights at or above `cut`; span by span in `sums`.
template <class T>
double total_weight(const T* logits, int64_t vocab, float inv, float shift, float cut, std::vector<float>& sums) {
    double total = 0.0;
    sums.clear();
    for (int64_t begin = 0; begin < vocab; begin += SPAN) {
        const int64_t end = begin + SPAN < vocab ? begin + SPAN : vocab;
        sums.push_back(span_weights(logits, begin, end, inv, shift, cut, nullptr));
        total += sums.back();
    }
    return total;
}

template <class T>
__attribute__((noinline)) float logprob_of(const T* logits, int64_t token, float inv, float shift, double total) {
    return static_cast<float>(load(logits + token) * inv - shift - std::log(total));
}

template <class T>
void score(const T* logits, const int64_t* targets, int64_t n, int64_t vocab, const float* temperature,
           float* logprobs, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && n > 1)
    {
        std::vector<float> sums;
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const T* x = logits + row * vocab;
            const float inv = temperature[row] == 0.f ? 1.f : 1.f / temperature[row], shift = largest(x, vocab) * inv;
            logprobs[row] = logprob_of(x, targets[row], inv, shift, total_weight(x, vocab, inv, shift, -INFINITY, sums));
        }
    }
}

struct Filter {
    int32_t top_k;  // 0: off
    float top_p, min_p;
    bool is_on() const { return top_k > 0 || top_p < 1.f || min_p > 0.f; }
};

// The smallest scaled logit that may be sampled; ties at the cut are all kept. Only as many values are put in order as
// the answer needs. `total` is the weight of all.
template <class T>
float cut_of(const T* logits, int64_t vocab, float inv, float shift, double total, const Filter& filter,
             std::vector<float>& scaled) {
    const float floor = filter.min_p > 0.f ? shift + std::log(filter.min_p) : -INFINITY;
    const int64_t most = filter.top_k > 0 && filter.top_k < vocab ? filter.top_k : vocab;
    if (most == vocab && filter.top_p >= 1.f) return floor;
    scaled.resize(vocab);
    for (int64_t i = 0; i < vocab; i++) {
        const float v = load(logits + i) * inv;
        scaled[i] = v == v ? v : -INFINITY;  // NaN has no place in an order
    }
    auto weight = [&](float v) { return v > MASKED ? std::exp(static_cast<double>(v) - shift) : 0.0; };
    if (most < vocab) {
        std::nth_element(scaled.begin(), scaled.begin() + (most - 1), scaled.end(), std::greater<float>());
        total = 0.0;
        for (int64_t i = 0; i < most; i++) total += weight(scaled[i]);
    }
    float cut = -INFINITY;
    double before = 0.0;
    for (int64_t begin = 0, size = 64; begin < most; size *= 4) {
        const int64_t end = begin + size < most ? begin + size : most;
        if (end < most)
            std::nth_element(scaled.begin() + begin, scaled.begin() + end, scaled.begin() + most, std::greater<float>());
        std::sort(scaled.begin() + begin, scaled.begin() + end, std::greater<float>());
        for (; begin < end; begin++) {
            // A token is kept while the mass before it is below p: at least one always is.
            if (before >= filter.top_p * total || !(scaled[begin] > MASKED)) return cut > floor ? cut : floor;
            cut = scaled[begin];
            before += weight(cut);
        }
    }
    return cut > floor ? cut : floor;
}

struct Scratch {
    std::vector<float> sums, scaled;
};

template <class T>
void sample_row(const T* logits, int64_t vocab, float temperature, const Filter& filter, double uniform, int64_t* token,
                float* logprob, Scratch& scratch) {
    const bool is_greedy = temperature == 0.f;
    const float inv = is_greedy ? 1.f : 1.f / temperature, top = largest(logits, vocab), shift = top * inv;
    const double total = total_weight(logits, vocab, inv, shift, -INFINITY, scratch.sums);
    if (!(total > 0.0 && total < INFINITY)) {  // no logit is a number: there is nothing to choose from
        *token = 0;
        *logprob = NAN;
        return;
    }
    int64_t chosen = -1;
    if (!is_greedy) {
        float cut = -INFINITY;
        double kept = total;
        if (filter.is_on()) {
            cut = cut_of(logits, vocab, inv, shift, total, filter, scratch.scaled);
            kept = total_weight(logits, vocab, inv, shift, cut, scratch.sums);
        }
        const double target = uniform * kept;
        double before = 0.0;
        int64_t span = 0;
        const int64_t last = static_cast<int64_t>(scratch.sums.size()) - 1;
        while (span < last && before + scratch.sums[span] <= target) before += scratch.sums[span++];
        const int64_t begin = span * SPAN, end = begin + SPAN < vocab ? begin + SPAN : vocab;
        float weights[SPAN + LANES];
        span_weights(logits, begin, end, inv, shift, cut, weights);
        for (int64_t i = begin; i < end; i++) {
            if (weights[i - begin] < 1e-37f) continue;  // impossible, or as good as
            before += weights[i - begin];
            chosen = i;  // the last possible one, should rounding leave the target just above the span's end
            if (before > target) break;
        }
    }
    for (int64_t i = 0; chosen < 0; i++)
        if (load(logits + i) == top) chosen = i;
    *token = chosen;
    *logprob = logprob_of(logits, chosen, inv, shift, total);
}

// top_k, top_p and min_p: one entry per row, or all null.
template <class T>
void sample(const T* logits, int64_t n, int64_t vocab, const float* temperature, const int32_t* top_k,
            const float* top_p, const float* min_p, const double* uniform, int64_t* tokens, float* logprobs,
            int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && n > 1)
    {
        Scratch scratch;
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const Filter filter = top_k ? Filter{top_k[row], top_p[row], min_p[row]} : Filter{0, 1.f, 0.f};
            sample_row(logits + row * vocab, vocab, temperature[row], filter, uniform[row], tokens + row,
                       logprobs + row, scratch);
        }
    }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                              \
    extern "C" void add_norm_##SUFFIX(void* h, const void* x, const void* w, void* out, int64_t n, int64_t size,       \
                                      float eps, int gemma, int threads) {                                            \
        add_norm((T*)h, (const T*)x, (const T*)w, (T*)out, n, size, eps, gemma, threads);                             \
    }                                                                                                                  \
    extern "C" void act_mul_##SUFFIX(const void* gate_up, void* out, int64_t n, int64_t size, int gelu, int threads) { \
        act_mul((const T*)gate_up, (T*)out, n, size, gelu, threads);                                                  \
    }                                                                                                                  \
    extern "C" void rope_store_##SUFFIX(void* qkv, const void* cs, const void* sn, const int64_t* positions,           \
                                        const int64_t* slots, const void* qw, const void* kw, float eps, void* keys,  \
                                        void* values, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,        \
                                        int threads) {                                                                \
        rope_store((T*)qkv, (const T*)cs, (const T*)sn, positions, slots, (const T*)qw, (const T*)kw, eps, (T*)keys,  \
                   (T*)values, n, heads, kv_heads, dim, threads);                                                     \
    }                                                                                                                  \
    extern "C" void attend_##SUFFIX(const void* query, int64_t query_stride, const void* keys, const void* values,     \
                                    const int32_t* tables, int64_t table_stride, const int32_t* starts,               \
                                    const int32_t* lengths, int64_t num_seqs, int64_t heads, int64_t kv_heads,        \
                                    int64_t dim, int64_t block_size, float scale, int64_t window, float cap,          \
                                    const void* sinks, void* out, int threads) {                                      \
        attend_all((const T*)query, query_stride, (const T*)keys, (const T*)values, tables, table_stride, starts, lengths, \
               num_seqs, heads, kv_heads, dim, block_size, scale, window, cap, (const T*)sinks, (T*)out, threads);    \
    }                                                                                                                  \
    extern "C" void sample_##SUFFIX(const void* logits, int64_t n, int64_t vocab, const float* temperature,            \
                                    const int32_t* top_k, const float* top_p, const float* min_p,                     \
                                    const double* uniform, int64_t* tokens, float* logprobs, int threads) {           \
        sample((const T*)logits, n, vocab, temperature, top_k, top_p, min_p, uniform, tokens, logprobs, threads);     \
    }                                                                                                                  \
    extern "C" void score_##SUFFIX(const void* logits, const int64_t* targets, int64_t n, int64_t vocab,               \
                                   const float* temperature, float* logprobs, int threads) {                          \
        score((const T*)logits, targets, n, vocab, temperature, logprobs, threads);                                   \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)

#ifdef RILL_PRODUCTS
extern "C" int64_t panel_bytes(int64_t rows, int64_t k) { return panel_words(rows, k) * 4; }
#define EXPORT_LINEAR(SUFFIX, T)                                                                                       \
    extern "C" void linear_##SUFFIX(const void* x, int64_t rows, int64_t k, const void* weight, const void* bias,      \
                                    int64_t n, void* out, void* panel, int threads) {                                  \
        linear((const T*)x, rows, k, (const T*)weight, (const T*)bias, n, (T*)out, (float*)panel, threads);            \
    }
EXPORT_LINEAR(f32, float)
EXPORT_LINEAR(bf16, bf16)
#else
extern "C" int64_t panel_bytes(int64_t, int64_t) { return -1; }  // no products here
#endif
