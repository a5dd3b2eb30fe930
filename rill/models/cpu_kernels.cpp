// CPU kernels for decoding. Built by cpu_kernels.py with the host's compiler; plain pointers, no library headers.
//
// Every output row is computed by one thread, in an order that depends on that row's own data alone. A row is
// therefore bit-identical whatever else is in the batch and however many threads there are.
//
// T is float or bf16 (stored as uint16_t). All arithmetic is float; rounding to T happens where Hugging Face's
// modules round. -1e30 stands for "masked": it stays finite through every subtraction.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
    uint32_t u = static_cast<uint32_t>(p->bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline void store(float* p, float v) { *p = v; }
inline void store(bf16* p, float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    u += 0x7FFF + ((u >> 16) & 1);  // round to nearest even
    p->bits = static_cast<uint16_t>(u >> 16);
}
inline float rounded(float v, const float*) { return v; }
inline float rounded(float v, const bf16*) {
    bf16 b;
    store(&b, v);
    return load(&b);
}

constexpr float MASKED = -1e30f;

// exp to about 1e-7 relative; branch-free so that loops over it vectorise.
inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = std::nearbyint(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t e = (static_cast<int32_t>(n) + 127) << 23;
    float s;
    std::memcpy(&s, &e, 4);
    return p * s;
}

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

// h += x (when x is given), out = norm(h)
template <class T>
void add_norm(T* h, const T* x, const T* w, T* out, int64_t n, int64_t size, float eps, int gemma, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * size > 16384)
    for (int64_t row = 0; row < n; row++) {
        T* hr = h + row * size;
        if (x) {
            const T* xr = x + row * size;
            for (int64_t i = 0; i < size; i++) store(hr + i, load(hr + i) + load(xr + i));
        }
        norm_row(hr, w, out + row * size, size, eps, gemma);
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
        if (gelu) {
            for (int64_t i = 0; i < size; i++) {
                float v = load(g + i);
                float z = 0.7978845608028654f * (v + 0.044715f * v * v * v);
                float a = v / (1.0f + fast_exp(-2.0f * z));  // 0.5 v (1 + tanh z)
                store(o + i, rounded(a, g) * load(u + i));
            }
        } else {
            for (int64_t i = 0; i < size; i++) {
                float v = load(g + i);
                float a = v / (1.0f + fast_exp(-v));
                store(o + i, rounded(a, g) * load(u + i));
            }
        }
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

// qkv [n, (H + 2K) * D]: normalise (optional) and rotate q and k in place, put k and v into their slots.
template <class T>
void rope_store(T* qkv, const T* cs, const T* sn, const int64_t* positions, const int64_t* slots, const T* qw,
                const T* kw, float eps, T* keys, T* values, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,
                int threads) {
    int64_t width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * width > 16384)
    for (int64_t row = 0; row < n; row++) {
        T* q = qkv + row * width;
        T* k = q + heads * dim;
        T* v = k + kv_heads * dim;
        const T* c = cs + positions[row] * dim;
        const T* s = sn + positions[row] * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            T* x = q + h * dim;
            if (qw) norm_row(x, h < heads ? qw : kw, x, dim, eps, 0);
            rope_row(x, c, s, dim);
        }
        std::memcpy(keys + slots[row] * kv_heads * dim, k, sizeof(T) * kv_heads * dim);
        std::memcpy(values + slots[row] * kv_heads * dim, v, sizeof(T) * kv_heads * dim);
    }
}

constexpr int TILE = 16;        // keys per softmax tile; independent of the block size
constexpr int MAX_GROUP = 16;   // query heads handled together
constexpr int MAX_DIM = 256;

// 16 floats; the compiler lowers them to whatever the processor has.
typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef uint32_t word_vec __attribute__((vector_size(64)));
constexpr int LANES = 16;

inline vec load_vec(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load_vec(const bf16* p) {
    word_vec w;
    for (int i = 0; i < LANES; i++) w[i] = static_cast<uint32_t>(p[i].bits) << 16;
    return reinterpret_cast<vec&>(w);
}
inline float sum_lanes(vec v) {
    typedef float vec8 __attribute__((vector_size(32)));
    typedef float vec4 __attribute__((vector_size(16)));
    vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// Scores of one tile become weights; returns the factor for what was accumulated before.
inline float soften(float* s, const bool* seen, float cap, float* top, float* total) {
    float best = *top;
    for (int t = 0; t < TILE; t++) {
        if (cap > 0.f) s[t] = cap * std::tanh(s[t] / cap);
        s[t] = seen[t] ? s[t] : MASKED;
        best = s[t] > best ? s[t] : best;
    }
    float keep = fast_exp(*top - best), sum = 0.f;
    for (int t = 0; t < TILE; t++) {
        s[t] = seen[t] ? fast_exp(s[t] - best) : 0.f;
        sum += s[t];
    }
    *total = *total * keep + sum;
    *top = best;
    return keep;
}

// One query token, one key/value head and up to MAX_GROUP of its query heads, over keys [first, last].
// NV vectors to a head; 0 for head dimensions that are not a multiple of LANES.
template <class T, int NV>
void attend_token(const T* query, const T* keys, const T* values, const int32_t* table, int64_t block_size,
                  int64_t first, int64_t last, int64_t kv_stride, int group, int64_t dim_, float scale, float cap,
                  T* out) {
    const int64_t dim = NV ? NV * LANES : dim_;
    float q[MAX_GROUP][NV ? NV * LANES : MAX_DIM], acc[MAX_GROUP][NV ? NV * LANES : MAX_DIM];
    float top[MAX_GROUP], total[MAX_GROUP];
    for (int g = 0; g < group; g++) {
        top[g] = MASKED;
        total[g] = 0.f;
        for (int64_t d = 0; d < dim; d++) {
            q[g][d] = load(query + g * dim + d) * scale;
            acc[g][d] = 0.f;
        }
    }
    // Tiles start at multiples of TILE whatever `first` is, so a window does not change the order of others.
    for (int64_t tile = first / TILE * TILE; tile <= last; tile += TILE) {
        const T* k[TILE];
        const T* v[TILE];
        bool seen[TILE];
        for (int t = 0; t < TILE; t++) {
            int64_t at = tile + t;
            seen[t] = at >= first && at <= last;
            int64_t safe = seen[t] ? at : last;
            int64_t slot = static_cast<int64_t>(table[safe / block_size]) * block_size + safe % block_size;
            k[t] = keys + slot * kv_stride;
            v[t] = values + slot * kv_stride;
        }
        for (int g = 0; g < group; g++) {
            float s[TILE];
            if constexpr (NV > 0) {
                vec qv[NV], av[NV];
                for (int i = 0; i < NV; i++) qv[i] = load_vec(q[g] + i * LANES);
                for (int t = 0; t < TILE; t++) {
                    vec dot = qv[0] * load_vec(k[t]);
                    for (int i = 1; i < NV; i++) dot += qv[i] * load_vec(k[t] + i * LANES);
                    s[t] = sum_lanes(dot);
                }
                float keep = soften(s, seen, cap, &top[g], &total[g]);
                for (int i = 0; i < NV; i++) av[i] = load_vec(acc[g] + i * LANES) * keep;
                for (int t = 0; t < TILE; t++)  // an unseen key repeats a seen one, with weight 0
                    for (int i = 0; i < NV; i++) av[i] += s[t] * load_vec(v[t] + i * LANES);
                for (int i = 0; i < NV; i++) *reinterpret_cast<vec*>(acc[g] + i * LANES) = av[i];
            } else {
                for (int t = 0; t < TILE; t++) {
                    s[t] = 0.f;
                    for (int64_t d = 0; d < dim; d++) s[t] += q[g][d] * load(k[t] + d);
                }
                float keep = soften(s, seen, cap, &top[g], &total[g]);
                for (int64_t d = 0; d < dim; d++) acc[g][d] *= keep;
                for (int t = 0; t < TILE; t++)
                    for (int64_t d = 0; d < dim; d++) acc[g][d] += s[t] * load(v[t] + d);
            }
        }
    }
    for (int g = 0; g < group; g++) {
        float inverse = 1.0f / total[g];
        for (int64_t d = 0; d < dim; d++) store(out + g * dim + d, acc[g][d] * inverse);
    }
}

template <class T>
void attend(const T* query, int64_t query_stride, const T* keys, const T* values, const int32_t* tables,
            int64_t table_stride, const int32_t* starts, const int32_t* lengths, int64_t num_seqs, int64_t heads,
            int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window, float cap, T* out,
            int threads) {
    int64_t num_tokens = starts[num_seqs];
    int64_t kv_stride = kv_heads * dim;
    int group_all = static_cast<int>(heads / kv_heads);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && num_tokens * heads > 8)
    for (int64_t item = 0; item < num_tokens * kv_heads; item++) {
        int64_t token = item / kv_heads, kv = item % kv_heads;
        int64_t lo = 0, hi = num_seqs - 1;  // the sequence that the token belongs to
        while (lo < hi) {
            int64_t mid = (lo + hi + 1) / 2;
            if (starts[mid] <= token) lo = mid; else hi = mid - 1;
        }
        int64_t last = lengths[lo] - (starts[lo + 1] - token);
        int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
        for (int part = 0; part < group_all; part += MAX_GROUP) {
            int group = group_all - part < MAX_GROUP ? group_all - part : MAX_GROUP;
            int64_t head = kv * group_all + part;
            const T* q = query + token * query_stride + head * dim;
            T* o = out + (token * heads + head) * dim;
            const int32_t* table = tables + lo * table_stride;
            const T* k = keys + kv * dim;
            const T* v = values + kv * dim;
            auto run = dim == 64    ? attend_token<T, 4>
                       : dim == 128 ? attend_token<T, 8>
                       : dim == 32  ? attend_token<T, 2>
                       : dim == 96  ? attend_token<T, 6>
                       : dim == 16  ? attend_token<T, 1>
                                    : attend_token<T, 0>;
            run(q, k, v, table, block_size, first, last, kv_stride, group, dim, scale, cap, o);
        }
    }
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
        attend((const T*)query, query_stride, (const T*)keys, (const T*)values, tables, table_stride, starts, lengths, \
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
