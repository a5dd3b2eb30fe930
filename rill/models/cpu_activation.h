// The derivative of a gated layer's activation, beside the activations of cpu_vector.h.

#pragma once

#include "cpu_vector.h"

namespace {

constexpr float GELU = 1.5957691216057308f;  // 2 sqrt(2 / pi)

inline vec logistic(vec v) { return inverse_vec(1.0f + exp_vec(-v)); }
inline float logistic(float v) { return 1.0f / (1.0f + fast_exp(-v)); }

// The activation is g · s with s a logistic function of g; `slope` is its derivative. V is vec or float.
template <class V>
inline void activate(V g, int gelu, V* act, V* slope) {
    if (gelu) {
        const V s = logistic(GELU * (g + 0.044715f * g * g * g));
        *act = g * s;
        *slope = s + *act * (1.0f - s) * GELU * (1.0f + 0.134145f * g * g);
    } else {
        const V s = logistic(g);
        *act = g * s;
        *slope = s + *act * (1.0f - s);
    }
}

}  // namespace
