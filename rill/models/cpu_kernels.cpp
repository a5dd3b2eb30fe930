// CPU kernels for decoding. Built by cpu_build.py with the host's compiler; plain pointers, no library headers.
//
// Every output row is computed by one thread, in an order that depends on that row's own data alone. A row is
// therefore bit-identical whatever else is in the batch and however many threads there are.

#include "cpu_attention.h"
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
                int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window, float cap, T* out,
                int threads) {
    const auto blocks = query_blocks(starts, lengths, num_seqs, static_cast<int>(heads / kv_heads));
#pragma omp parallel num_threads(threads) if (threads > 1 && starts[num_seqs] * heads > 8)
    attend(blocks, query, query_stride, keys, values, tables, table_stride, heads, kv_heads, dim, block_size, scale,
           window, cap, out);
}

// One row: token by inverse CDF in vocabulary order, and its log-probability. temperature 0 is greedy.
constexpr int64_t SPAN = 512;

// log of the sum of exp(logit / temperature), less the largest of them; `shift` is that largest one.
// Not inlined: sampling and scoring must sum in one order, and the compiler picks an order per copy.
template <class T>
__attribute__((noinline)) double log_total(const T* logits, int64_t vocab, float inv, float* shift, double* total) {
    float top = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) {
        float v = load(logits + i);
        top = v > top ? v : top;
    }
    *shift = top * inv;
    *total = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += SPAN) {
        int64_t end = begin + SPAN < vocab ? begin + SPAN : vocab;
        float sum = 0.f;
        for (int64_t i = begin; i < end; i++) sum += fast_exp(load(logits + i) * inv - *shift);
        *total += sum;
    }
    return std::log(*total);
}

template <class T>
__attribute__((noinline)) float logprob_of(const T* logits, int64_t token, float inv, float shift, double log_sum) {
    return static_cast<float>(load(logits + token) * inv - shift - log_sum);
}

template <class T>
void score(const T* logits, const int64_t* targets, int64_t n, int64_t vocab, const float* temperature,
           float* logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 1)
    for (int64_t row = 0; row < n; row++) {
        const T* x = logits + row * vocab;
        float shift, inv = temperature[row] == 0.f ? 1.f : 1.f / temperature[row];
        double total, log_sum = log_total(x, vocab, inv, &shift, &total);
        logprobs[row] = logprob_of(x, targets[row], inv, shift, log_sum);
    }
}

template <class T>
void sample_row(const T* logits, int64_t vocab, float temperature, double uniform, int64_t* token, float* logprob) {
    const bool greedy = temperature == 0.f;
    const float inv = greedy ? 1.f : 1.f / temperature;
    float shift;
    double total;
    const double log_sum = log_total(logits, vocab, inv, &shift, &total);
    auto span_sum = [&](int64_t begin, int64_t end) {
        float sum = 0.f;
        for (int64_t i = begin; i < end; i++) sum += fast_exp(load(logits + i) * inv - shift);
        return sum;
    };
    int64_t chosen = -1;
    double before = 0.0;
    const double target = uniform * total;
    for (int64_t begin = 0; !greedy && begin < vocab && chosen < 0; begin += SPAN) {
        int64_t end = begin + SPAN < vocab ? begin + SPAN : vocab;
        float sum = span_sum(begin, end);
        if (before + sum <= target && end < vocab) {
            before += sum;
            continue;
        }
        double run = before;
        for (int64_t i = begin; i < end; i++) {
            float x = load(logits + i) * inv - shift;
            if (x < -86.0f) continue;  // impossible, or as good as; fast_exp has clamped it
            run += fast_exp(x);
            chosen = i;  // the last possible one, should rounding leave the target just above the span's end
            if (run > target) break;
        }
        before += sum;
    }
    for (int64_t i = 0; chosen < 0; i++)
        if (load(logits + i) * inv == shift) chosen = i;
    *token = chosen;
    *logprob = logprob_of(logits, chosen, inv, shift, log_sum);
}

template <class T>
void sample(const T* logits, int64_t n, int64_t vocab, const float* temperature, const double* uniform,
            int64_t* tokens, float* logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 1)
    for (int64_t row = 0; row < n; row++)
        sample_row(logits + row * vocab, vocab, temperature[row], uniform[row], tokens + row, logprobs + row);
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
                                    void* out, int threads) {                                                         \
        attend_all((const T*)query, query_stride, (const T*)keys, (const T*)values, tables, table_stride, starts, lengths, \
               num_seqs, heads, kv_heads, dim, block_size, scale, window, cap, (T*)out, threads);                     \
    }                                                                                                                  \
    extern "C" void sample_##SUFFIX(const void* logits, int64_t n, int64_t vocab, const float* temperature,            \
                                    const double* uniform, int64_t* tokens, float* logprobs,                          \
                                    int threads) {                                                                    \
        sample((const T*)logits, n, vocab, temperature, uniform, tokens, logprobs, threads);                          \
    }                                                                                                                  \
    extern "C" void score_##SUFFIX(const void* logits, const int64_t* targets, int64_t n, int64_t vocab,               \
                                   const float* temperature, float* logprobs, int threads) {                          \
        score((const T*)logits, targets, n, vocab, temperature, logprobs, threads);                                   \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
