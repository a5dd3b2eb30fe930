// Kernels of the training step between matrix products, forward and backward. Built by cpu_build.py; plain pointers.
//
// T is float or bf16; arithmetic is float, and T is rounded to where Hugging Face's modules round. Sums over rows (the
// gradient of a norm's weight) go over blocks of a fixed number of rows, in order: no result depends on the number of
// threads.

#include <algorithm>
#include <cstdlib>

#include "cpu_activation.h"

namespace {

constexpr int64_t SMALL = 16384;  // elements below which one thread is quicker than several

#ifdef __AVX512BF16__
inline void store_vec(bf16* p, vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
}
#else
inline void store_vec(bf16* p, vec v) {
    for (int i = 0; i < LANES; i++) store(p + i, v[i]);
}
#endif
inline void store_vec(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline vec rounded(vec v, const float*) { return v; }
inline vec rounded(vec v, const bf16*) {
    bf16 b[LANES];
    store_vec(b, v);
    return load_vec(b);
}
inline vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return reinterpret_cast<vec>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    for (int i = 0; i < LANES; i++) a[i] = b[i] > a[i] ? b[i] : a[i];
    return a;
#endif
}

// --- RMSNorm ----------------------------------------------------------------------------------------------------

template <class T>
void norm(const T* x, const T* w, T* out, int64_t n, int64_t size, float eps, int gemma, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * size > SMALL)
    for (int64_t row = 0; row < n; row++) norm_row(x + row * size, w, out + row * size, size, eps, gemma);
}

constexpr int64_t NORM_ROWS = 64;  // rows whose weight gradients are added up before they meet others

// dx = residual + d norm(x) / dx · dy. partial [ceil(n / NORM_ROWS), size] is scratch; dw [size] is their sum.
template <class T>
void norm_grad(const T* x, const T* w, const T* dy, const T* residual, T* dx, float* partial, float* dw, int64_t n,
               int64_t size, float eps, int gemma, int threads) {
    const int64_t num_blocks = (n + NORM_ROWS - 1) / NORM_ROWS;
#pragma omp parallel num_threads(threads) if (threads > 1 && n * size > SMALL)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; block++) {
            float* sums = partial + block * size;
            std::memset(sums, 0, size * sizeof(float));
            const int64_t end = std::min(n, (block + 1) * NORM_ROWS);
            for (int64_t row = block * NORM_ROWS; row < end; row++) {
                const T* xr = x + row * size;
                const T* gr = dy + row * size;
                T* out = dx + row * size;
                float square = 0.f, dot = 0.f;
                for (int64_t i = 0; i < size; i++) {
                    float v = load(xr + i), weight = load(w + i) + (gemma ? 1.0f : 0.0f);
                    square += v * v;
                    dot += load(gr + i) * weight * v;
                }
                const float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
                const float pull = dot * scale * scale / static_cast<float>(size);
                for (int64_t i = 0; i < size; i++) {
                    float v = load(xr + i), g = load(gr + i), weight = load(w + i) + (gemma ? 1.0f : 0.0f);
                    sums[i] += g * v * scale;
                    float d = scale * (g * weight - v * pull);
                    store(out + i, residual ? d + load(residual + row * size + i) : d);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i++) {
            float sum = 0.f;
            for (int64_t block = 0; block < num_blocks; block++) sum += partial[block * size + i];
            dw[i] = sum;
        }
    }
}

// sums [width] of the columns of x [n, width]; partial [ceil(n / NORM_ROWS), width] is scratch.
template <class T>
void column_sums(const T* x, int64_t stride, float* partial, float* sums, int64_t n, int64_t width, int threads) {
    const int64_t num_blocks = (n + NORM_ROWS - 1) / NORM_ROWS;
#pragma omp parallel num_threads(threads) if (threads > 1 && n * width > SMALL)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; block++) {
            float* to = partial + block * width;
            std::memset(to, 0, width * sizeof(float));
            const int64_t end = std::min(n, (block + 1) * NORM_ROWS);
            for (int64_t row = block * NORM_ROWS; row < end; row++)
                for (int64_t i = 0; i < width; i++) to[i] += load(x + row * stride + i);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < width; i++) {
            float sum = 0.f;
            for (int64_t block = 0; block < num_blocks; block++) sum += partial[block * width + i];
            sums[i] = sum;
        }
    }
}

// --- act(gate) · up ---------------------------------------------------------------------------------------------

template <class T>
void gated(const T* gate, const T* up, T* out, int64_t count, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > SMALL)
    for (int64_t at = 0; at < count; at += 1024) {
        const int64_t end = std::min(count, at + 1024);
        int64_t i = at;
        for (; i + LANES <= end; i += LANES) {
            const vec g = load_vec(gate + i);
            store_vec(out + i, rounded(gelu ? gelu_tanh(g) : silu(g), gate) * load_vec(up + i));
        }
        for (; i < end; i++) {
            const float g = load(gate + i);
            store(out + i, rounded(gelu ? gelu_tanh(g) : silu(g), gate) * load(up + i));
        }
    }
}

// In place: gate and up become their gradients, grad_out becomes the output itself (the next product needs it).
template <class T>
void gated_grad(T* gate, T* up, T* grad_out, int64_t count, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > SMALL)
    for (int64_t at = 0; at < count; at += 1024) {
        const int64_t end = std::min(count, at + 1024);
        int64_t i = at;
        for (; i + LANES <= end; i += LANES) {
            const vec u = load_vec(up + i), d = load_vec(grad_out + i);
            vec act, slope;
            activate(load_vec(gate + i), gelu, &act, &slope);
            act = rounded(act, gate);
            store_vec(gate + i, d * u * slope);
            store_vec(up + i, d * act);
            store_vec(grad_out + i, act * u);
        }
        for (; i < end; i++) {
            const float u = load(up + i), d = load(grad_out + i);
            float act, slope;
            activate(load(gate + i), gelu, &act, &slope);
            act = rounded(act, gate);
            store(gate + i, d * u * slope);
            store(up + i, d * act);
            store(grad_out + i, act * u);
        }
    }
}

// --- log-probability and entropy of one token of each row of logits ------------------------------------------------

constexpr int64_t SPAN = 512;

template <class T>
float row_top(const T* x, int64_t vocab, float scale) {
    vec best = vec{} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) best = larger(best, load_vec(x + i) * scale);
    float top = max_lane(best);
    for (; i < vocab; i++) top = std::max(top, load(x + i) * scale);
    return top;
}

template <class T>
void head_stats(const T* logits, const int64_t* targets, int64_t n, int64_t vocab, float scale, float* logprob,
                float* entropy, float* lse, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * vocab > SMALL)
    for (int64_t row = 0; row < n; row++) {
        const T* x = logits + row * vocab;
        const float top = row_top(x, vocab, scale);
        double total = 0.0, moment = 0.0;  // of exp(l - top), and of the same times (l - top)
        for (int64_t begin = 0; begin < vocab; begin += SPAN) {
            const int64_t end = std::min(vocab, begin + SPAN);
            vec sum = {}, weighted = {};
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) {
                const vec v = load_vec(x + i) * scale - top, e = exp_vec(v);
                sum += e;
                weighted += e * v;
            }
            total += sum_lanes(sum);
            moment += sum_lanes(weighted);
            for (; i < end; i++) {
                const float v = load(x + i) * scale - top, e = fast_exp(v);
                total += e;
                moment += e * v;
            }
        }
        const double log_total = std::log(total);
        logprob[row] = static_cast<float>(load(x + targets[row]) * scale - top - log_total);
        entropy[row] = static_cast<float>(log_total - moment / total);
        lse[row] = static_cast<float>(top + log_total);
    }
}

// logits become the gradient: scale · (g (onehot − p) − h p (log p + entropy)) for gradients g and h of the outputs.
template <class T>
void head_grad(T* logits, const int64_t* targets, int64_t n, int64_t vocab, float scale, const float* entropy,
               const float* lse, const float* grad_logprob, const float* grad_entropy, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * vocab > SMALL)
    for (int64_t row = 0; row < n; row++) {
        T* x = logits + row * vocab;
        const float g = grad_logprob[row], h = grad_entropy ? grad_entropy[row] : 0.f, shift = lse[row];
        const float constant = -g - h * entropy[row];
        const float at_target = load(x + targets[row]) * scale - shift;
        const float own = g + fast_exp(at_target) * (constant - h * at_target);
        int64_t i = 0;
        for (; i + LANES <= vocab; i += LANES) {
            const vec logp = load_vec(x + i) * scale - shift;
            store_vec(x + i, scale * exp_vec(logp) * (constant - h * logp));
        }
        for (; i < vocab; i++) {
            const float logp = load(x + i) * scale - shift;
            store(x + i, scale * fast_exp(logp) * (constant - h * logp));
        }
        store(x + targets[row], scale * own);
    }
}

// --- AdamW in one pass ------------------------------------------------------------------------------------------

struct Rates {
    float scale, decay_factor, step, beta1, beta2, epsilon, root_correction;
};

template <class G>
void adamw(float* master, const G* grad, float* mean, float* square, bf16* copy, int64_t count, Rates r, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > SMALL)
    for (int64_t at = 0; at < count; at += 4096) {
        const int64_t end = std::min(count, at + 4096);
        for (int64_t i = at; i < end; i++) {
            const float g = load(grad + i) * r.scale;
            const float m = mean[i] + (1.0f - r.beta1) * (g - mean[i]);
            const float v = r.beta2 * square[i] + (1.0f - r.beta2) * g * g;
            mean[i] = m;
            square[i] = v;
            master[i] = master[i] * r.decay_factor - r.step * m / (std::sqrt(v) / r.root_correction + r.epsilon);
        }
        if (copy)
            for (int64_t i = at; i < end; i++) store(copy + i, master[i]);
    }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                              \
    extern "C" void norm_##SUFFIX(const void* x, const void* w, void* out, int64_t n, int64_t size, float eps,         \
                                  int gemma, int threads) {                                                           \
        norm((const T*)x, (const T*)w, (T*)out, n, size, eps, gemma, threads);                                        \
    }                                                                                                                  \
    extern "C" void norm_grad_##SUFFIX(const void* x, const void* w, const void* dy, const void* residual, void* dx,   \
                                       float* partial, float* dw, int64_t n, int64_t size, float eps, int gemma,      \
                                       int threads) {                                                                 \
        norm_grad((const T*)x, (const T*)w, (const T*)dy, (const T*)residual, (T*)dx, partial, dw, n, size, eps,      \
                  gemma, threads);                                                                                    \
    }                                                                                                                  \
    extern "C" void column_sums_##SUFFIX(const void* x, int64_t stride, float* partial, float* sums, int64_t n,        \
                                         int64_t width, int threads) {                                                \
        column_sums((const T*)x, stride, partial, sums, n, width, threads);                                           \
    }                                                                                                                  \
    extern "C" void gated_##SUFFIX(const void* gate, const void* up, void* out, int64_t count, int gelu,               \
                                   int threads) {                                                                     \
        gated((const T*)gate, (const T*)up, (T*)out, count, gelu, threads);                                           \
    }                                                                                                                  \
    extern "C" void gated_grad_##SUFFIX(void* gate, void* up, void* grad_out, int64_t count, int gelu, int threads) {  \
        gated_grad((T*)gate, (T*)up, (T*)grad_out, count, gelu, threads);                                             \
    }                                                                                                                  \
    extern "C" void head_stats_##SUFFIX(const void* logits, const int64_t* targets, int64_t n, int64_t vocab,          \
                                        float scale, float* logprob, float* entropy, float* lse, int threads) {       \
        head_stats((const T*)logits, targets, n, vocab, scale, logprob, entropy, lse, threads);                       \
    }                                                                                                                  \
    extern "C" void head_grad_##SUFFIX(void* logits, const int64_t* targets, int64_t n, int64_t vocab, float scale,    \
                                       const float* entropy, const float* lse, const float* grad_logprob,             \
                                       const float* grad_entropy, int threads) {                                      \
        head_grad((T*)logits, targets, n, vocab, scale, entropy, lse, grad_logprob, grad_entropy, threads);           \
    }                                                                                                                  \
    extern "C" void adamw_##SUFFIX(float* master, const void* grad, float* mean, float* square, void* copy,            \
                                   int64_t count, float scale, float decay_factor, float step, float beta1,           \
                                   float beta2, float epsilon, float root_correction, int threads) {                  \
        adamw(master, (const T*)grad, mean, square, (bf16*)copy, count,                                               \
              {scale, decay_factor, step, beta1, beta2, epsilon, root_correction}, threads);                          \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
