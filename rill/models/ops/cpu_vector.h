// What the CPU sources share: bf16, vectors of 16 floats, exp, activations.
//
// T is float or bf16. All arithmetic is float; rounding to T happens where Hugging Face's modules round. -1e30 stands
// for "masked": it stays finite through every subtraction.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

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

inline float silu(float v) { return v / (1.0f + fast_exp(-v)); }
inline float gelu_tanh(float v) {  // 0.5 v (1 + tanh z)
    float z = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return v / (1.0f + fast_exp(-2.0f * z));
}

// 16 floats; the compiler lowers them to whatever the processor has.
typedef float vec __attribute__((vector_size(64), aligned(4)));
constexpr int LANES = 16;

inline vec load_vec(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load_vec(const bf16* p) {
#ifdef __AVX512F__
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    float v[LANES];
    for (int i = 0; i < LANES; i++) v[i] = load(p + i);
    return load_vec(v);
#endif
}

#ifdef __AVX512F__
// The same polynomial as fast_exp, 16 at a time.
inline vec exp_vec(vec v) {
    __m512 x = _mm512_min_ps(_mm512_max_ps(reinterpret_cast<__m512>(v), _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return reinterpret_cast<vec>(_mm512_scalef_ps(p, n));
}
inline float max_lane(vec v) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v)); }
inline float sum_lanes(vec v) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v)); }
#else
inline vec exp_vec(vec v) {
    float x[LANES];
    std::memcpy(x, &v, sizeof(x));
    for (int i = 0; i < LANES; i++) x[i] = fast_exp(x[i]);
    return load_vec(x);
}
inline float max_lane(vec v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}
inline float sum_lanes(vec v) {
    float x[LANES];
    std::memcpy(x, &v, sizeof(x));
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
#endif

}  // namespace
