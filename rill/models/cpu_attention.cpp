// Attention over packed sequences with its backward pass, for training on the CPU. Built by cpu_build.py.
//
// A row of M tokens is made of segments (see attention_packed.py). Segments that share a prefix form a family; a family
// and one key/value head are one task, computed by one thread in a fixed order, so no result depends on the number of
// threads. Rotary embedding happens on the way in and is undone on the way out: rotated queries and keys are never
// stored. A task holds its keys and values as float, by rows and by columns:
//
//     scores[16, keys] = q · keysᵀ      weights = softmax       out = weights · values
//     backward: the weights again from the stored log-sum-exp, then the four products of the chain rule
//
// q [M, H·E], k and v [M, G·E] with their own row strides; cos and sin [M, E]; E is a multiple of 16.

#include <algorithm>
#include <cstdlib>

#include "cpu_vector.h"

namespace {

constexpr int64_t QUERIES = 16;  // rows of scores computed at once

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// c[m, n] (+)= sum over k of a[m · am + k · ak] · b[k, n]; m a multiple of 8, n of 16.
template <int R, int V>
inline void product_block(const float* a, int64_t am, int64_t ak, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t inner, bool add) {
    vec sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = add ? load_vec(c + r * ldc + v * LANES) : vec{};
    for (int64_t k = 0; k < inner; k++) {
        vec right[V];
        for (int v = 0; v < V; v++) right[v] = load_vec(b + k * ldb + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] += a[r * am + k * ak] * right[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) *reinterpret_cast<vec*>(c + r * ldc + v * LANES) = sum[r][v];
}

void product(const float* a, int64_t am, int64_t ak, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
             int64_t n, int64_t inner, bool add) {
    int64_t col = 0;
    for (; col + 2 * LANES <= n; col += 2 * LANES)
        for (int64_t row = 0; row < m; row += 8)
            product_block<8, 2>(a + row * am, am, ak, b + col, ldb, c + row * ldc + col, ldc, inner, add);
    for (; col < n; col += LANES)
        for (int64_t row = 0; row < m; row += 8)
            product_block<8, 1>(a + row * am, am, ak, b + col, ldb, c + row * ldc + col, ldc, inner, add);
}

template <class T>
void load_rotated(const T* x, const T* cs, const T* sn, int64_t dim, float factor, float* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = load(x + i), b = load(x + i + half);
        float first = rounded(a * load(cs + i), x) + rounded(-b * load(sn + i), x);
        float second = rounded(b * load(cs + i + half), x) + rounded(a * load(sn + i + half), x);
        out[i] = rounded(first, x) * factor;
        out[i + half] = rounded(second, x) * factor;
    }
}

template <class T>
void store_unrotated(const float* g, const T* cs, const T* sn, int64_t dim, float factor, T* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = g[i] * factor, second = g[i + half] * factor;
        store(out + i, first * load(cs + i) + second * load(sn + i + half));
        store(out + i + half, second * load(cs + i + half) - first * load(sn + i));
    }
}

struct Segment {
    int64_t start, length, prefix_start, prefix_length;
    int64_t num_keys() const { return prefix_length + length; }
    int64_t row(int64_t key) const { return key < prefix_length ? prefix_start + key : start + key - prefix_length; }
};

template <class T>
struct Problem {
    const T *q, *k, *v, *cs, *sn;
    int64_t q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, dim, num_tokens;
    float scale;
    int64_t window;  // tokens that a query sees, itself included; 0: all
};

struct Scratch {
    float* data = nullptr;
    size_t size = 0;
    float* get(size_t count) {
        if (count > size) {
            std::free(data);
            size = padded(count);
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
    ~Scratch() { std::free(data); }
};
thread_local Scratch scratch;

// Keys and values of one segment and head, padded with zeros to a multiple of 16 keys.
struct Keys {
    int64_t count, width;                      // width: padded count
    float *k_rows, *k_columns, *v_rows, *v_columns;  // [width, E] and [E, width]

    static int64_t floats(int64_t count, int64_t dim) { return 4 * padded(count) * dim; }
    Keys(float* at, int64_t count_, int64_t dim) : count(count_), width(padded(count_)) {
        k_rows = at;
        k_columns = at + width * dim;
        v_rows = at + 2 * width * dim;
        v_columns = at + 3 * width * dim;
    }
};

void turn(const float* rows, int64_t count, int64_t dim, float* columns) {
    for (int64_t i = 0; i < count; i += LANES)
        for (int64_t e = 0; e < dim; e++)
            for (int64_t j = 0; j < LANES; j++) columns[e * count + i + j] = rows[(i + j) * dim + e];
}

template <class T>
void load_keys(const Problem<T>& p, const Segment& s, int64_t kv, bool for_backward, Keys& keys) {
    for (int64_t j = 0; j < keys.count; j++) {
        const int64_t row = s.row(j);
        load_rotated(p.k + row * p.k_stride + kv * p.dim, p.cs + row * p.dim, p.sn + row * p.dim, p.dim, 1.0f,
                     keys.k_rows + j * p.dim);
        const T* v = p.v + row * p.v_stride + kv * p.dim;
        for (int64_t e = 0; e < p.dim; e++) keys.v_rows[j * p.dim + e] = load(v + e);
    }
    const int64_t rest = (keys.width - keys.count) * p.dim;
    std::memset(keys.k_rows + keys.count * p.dim, 0, rest * sizeof(float));
    std::memset(keys.v_rows + keys.count * p.dim, 0, rest * sizeof(float));
    turn(keys.k_rows, keys.width, p.dim, keys.k_columns);
    if (for_backward) turn(keys.v_rows, keys.width, p.dim, keys.v_columns);
}

// Which keys a block of queries looks at, as multiples of 16, and which of them one query sees.
struct View {
    int64_t from, to, window;
    template <class T>
    View(const Problem<T>& p, const Segment& s, int64_t first_query, int64_t num_queries) : window(p.window) {
        const int64_t position = s.prefix_length + first_query;
        from = first(position) / LANES * LANES;
        to = padded(position + num_queries);
    }
    int64_t first(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

template <class T>
void load_queries(const Problem<T>& p, const Segment& s, int64_t first, int64_t count, int64_t head, float* q) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = s.start + first + i;
        load_rotated(p.q + row * p.q_stride + head * p.dim, p.cs + row * p.dim, p.sn + row * p.dim, p.dim, p.scale,
                     q + i * p.dim);
    }
    std::memset(q + count * p.dim, 0, (QUERIES - count) * p.dim * sizeof(float));
}

// scores[i, :] of query `position` (counted in keys) become exp(score − shift), 0 where it does not look.
inline float weigh(float* s, const View& view, int64_t first, int64_t position, float shift) {
    vec sum = {};
    for (int64_t j = view.from; j < view.to; j += LANES) {
        vec e = exp_vec(load_vec(s + j) - shift);
        if (j < first || j + LANES > position + 1)
            for (int i = 0; i < LANES; i++) e[i] = j + i >= first && j + i <= position ? e[i] : 0.f;
        *reinterpret_cast<vec*>(s + j) = e;
        sum += e;
    }
    return sum_lanes(sum);
}

// The largest of scores [first, position]; others become MASKED.
inline float top_of(float* s, const View& view, int64_t first, int64_t position) {
    for (int64_t j = view.from; j < first; j++) s[j] = MASKED;
    for (int64_t j = position + 1; j < view.to; j++) s[j] = MASKED;
    vec best = vec{} + MASKED;
    for (int64_t j = view.from; j < view.to; j += LANES) {
        const vec v = load_vec(s + j);
        best = best > v ? best : v;
    }
    return max_lane(best);
}

template <class T>
void attend_segment(const Problem<T>& p, const Segment& s, int64_t kv, T* out, float* lse) {
    const int64_t group = p.heads / p.kv_heads, dim = p.dim, width = padded(s.num_keys());
    float* at = scratch.get(Keys::floats(s.num_keys(), dim) + QUERIES * (2 * dim + width));
    Keys keys(at, s.num_keys(), dim);
    float* q = at + Keys::floats(s.num_keys(), dim);
    float* o = q + QUERIES * dim;
    float* scores = o + QUERIES * dim;
    load_keys(p, s, kv, false, keys);
    for (int64_t head = kv * group; head < (kv + 1) * group; head++)
        for (int64_t first = 0; first < s.length; first += QUERIES) {
            const int64_t count = std::min(QUERIES, s.length - first);
            const View view(p, s, first, count);
            load_queries(p, s, first, count, head, q);
            product(q, dim, 1, keys.k_columns + view.from, width, scores + view.from, width, QUERIES,
                    view.to - view.from, dim, false);
            float inverse[QUERIES];
            for (int64_t i = 0; i < QUERIES; i++) {
                const int64_t position = s.prefix_length + first + std::min(i, count - 1);
                float* row = scores + i * width;
                const float top = top_of(row, view, view.first(position), position);
                const float sum = weigh(row, view, view.first(position), position, top);
                inverse[i] = 1.0f / sum;
                if (i < count) lse[head * p.num_tokens + s.start + first + i] = top + std::log(sum);
            }
            product(scores + view.from, width, 1, keys.v_rows + view.from * dim, dim, o, dim, QUERIES, dim,
                    view.to - view.from, false);
            for (int64_t i = 0; i < count; i++) {
                T* to = out + ((s.start + first + i) * p.heads + head) * dim;
                for (int64_t e = 0; e < dim; e++) store(to + e, o[i * dim + e] * inverse[i]);
            }
        }
}

template <class T>
struct Gradients {
    const T *out, *grad_out;
    const float* lse;
    T *dq, *dk, *dv;
    int64_t dq_stride, dk_stride, dv_stride;
};

// Adds the gradients of one segment's keys to dk and dv [keys, E]; writes its queries'.
template <class T>
void segment_grad(const Problem<T>& p, const Gradients<T>& g, const Segment& s, int64_t kv, float* at, float* dk,
                  float* dv) {
    const int64_t group = p.heads / p.kv_heads, dim = p.dim, width = padded(s.num_keys());
    Keys keys(at, s.num_keys(), dim);
    float* q = at + Keys::floats(s.num_keys(), dim);
    float* d_out = q + QUERIES * dim;
    float* dq = d_out + QUERIES * dim;
    float* weights = dq + QUERIES * dim;
    float* slopes = weights + QUERIES * width;
    load_keys(p, s, kv, true, keys);
    for (int64_t head = kv * group; head < (kv + 1) * group; head++)
        for (int64_t first = 0; first < s.length; first += QUERIES) {
            const int64_t count = std::min(QUERIES, s.length - first);
            const View view(p, s, first, count);
            const int64_t seen = view.to - view.from;
            load_queries(p, s, first, count, head, q);
            float delta[QUERIES] = {};
            std::memset(d_out, 0, QUERIES * dim * sizeof(float));
            for (int64_t i = 0; i < count; i++) {
                const int64_t offset = ((s.start + first + i) * p.heads + head) * dim;
                float sum = 0.f;
                for (int64_t e = 0; e < dim; e++) {
                    d_out[i * dim + e] = load(g.grad_out + offset + e);
                    sum += d_out[i * dim + e] * load(g.out + offset + e);
                }
                delta[i] = sum;
            }
            product(q, dim, 1, keys.k_columns + view.from, width, weights + view.from, width, QUERIES, seen, dim, false);
            product(d_out, dim, 1, keys.v_columns + view.from, width, slopes + view.from, width, QUERIES, seen, dim,
                    false);
            for (int64_t i = 0; i < QUERIES; i++) {
                float* row = weights + i * width;
                float* slope = slopes + i * width;
                if (i >= count) {
                    std::memset(row + view.from, 0, seen * sizeof(float));
                    std::memset(slope + view.from, 0, seen * sizeof(float));
                    continue;
                }
                const int64_t position = s.prefix_length + first + i;
                weigh(row, view, view.first(position), position, g.lse[head * p.num_tokens + s.start + first + i]);
                for (int64_t j = view.from; j < view.to; j++) slope[j] = row[j] * (slope[j] - delta[i]);
            }
            product(weights + view.from, 1, width, d_out, dim, dv + view.from * dim, dim, seen, dim, count, true);
            product(slopes + view.from, 1, width, q, dim, dk + view.from * dim, dim, seen, dim, count, true);
            product(slopes + view.from, width, 1, keys.k_rows + view.from * dim, dim, dq, dim, QUERIES, dim, seen,
                    false);
            for (int64_t i = 0; i < count; i++) {
                const int64_t row = s.start + first + i;
                store_unrotated(dq + i * dim, p.cs + row * dim, p.sn + row * dim, dim, p.scale,
                                g.dq + row * g.dq_stride + head * dim);
            }
        }
}

// A family: segments with one prefix in common, then the segment that is the prefix; or one plain segment.
template <class T>
void family_grad(const Problem<T>& p, const Gradients<T>& g, const Segment* first, int64_t count, int64_t kv) {
    int64_t longest = 0;
    for (int64_t n = 0; n < count; n++) longest = std::max(longest, first[n].num_keys());
    const int64_t dim = p.dim, width = padded(longest), prefix = first[0].prefix_length;
    const int64_t work = Keys::floats(longest, dim) + QUERIES * (3 * dim + 2 * width);
    float* at = scratch.get(work + 2 * (width + prefix) * dim);
    float* dk = at + work;
    float* dv = dk + width * dim;
    float* prefix_dk = dv + width * dim;
    float* prefix_dv = prefix_dk + prefix * dim;
    std::memset(prefix_dk, 0, 2 * prefix * dim * sizeof(float));
    for (int64_t n = 0; n < count; n++) {
        const Segment& s = first[n];
        const bool is_prefix = n > 0 && n == count - 1;
        std::memset(dk, 0, 2 * width * dim * sizeof(float));
        segment_grad(p, g, s, kv, at, dk, dv);
        for (int64_t i = 0; i < s.prefix_length * dim; i++) {
            prefix_dk[i] += dk[i];
            prefix_dv[i] += dv[i];
        }
        for (int64_t j = 0; j < s.length; j++) {
            const int64_t row = s.start + j;
            float* k = dk + (s.prefix_length + j) * dim;
            float* v = dv + (s.prefix_length + j) * dim;
            for (int64_t e = 0; is_prefix && e < dim; e++) {
                k[e] += prefix_dk[j * dim + e];
                v[e] += prefix_dv[j * dim + e];
            }
            store_unrotated(k, p.cs + row * dim, p.sn + row * dim, dim, 1.0f, g.dk + row * g.dk_stride + kv * dim);
            for (int64_t e = 0; e < dim; e++) store(g.dv + row * g.dv_stride + kv * dim + e, v[e]);
        }
    }
}

}  // namespace

// table [S, 4]: start, length, prefix start, prefix length, family by family; ends [F + 1]: where families begin.
#define EXPORT(SUFFIX, T)                                                                                              \
    extern "C" void attend_##SUFFIX(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,   \
                                    int64_t v_stride, const void* cs, const void* sn, const int64_t* table,           \
                                    int64_t num_segments, int64_t num_tokens, int64_t heads, int64_t kv_heads,        \
                                    int64_t dim, float scale, int64_t window, void* out, float* lse, int threads) {   \
        const Problem<T> p{(const T*)q, (const T*)k, (const T*)v, (const T*)cs, (const T*)sn, q_stride, k_stride,      \
                           v_stride, heads, kv_heads, dim, num_tokens, scale, window};                                \
        const Segment* segments = reinterpret_cast<const Segment*>(table);                                            \
        _Pragma("omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)")                        \
        for (int64_t task = 0; task < num_segments * kv_heads; task++)                                                \
            attend_segment(p, segments[task / kv_heads], task % kv_heads, (T*)out, lse);                              \
    }                                                                                                                  \
    extern "C" void attend_grad_##SUFFIX(                                                                              \
        const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v, int64_t v_stride,             \
        const void* cs, const void* sn, const int64_t* table, const int64_t* ends, int64_t num_families,              \
        int64_t num_tokens, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window,                \
        const void* out, const void* grad_out, const float* lse, void* dq, int64_t dq_stride, void* dk,               \
        int64_t dk_stride, void* dv, int64_t dv_stride, int threads) {                                                \
        const Problem<T> p{(const T*)q, (const T*)k, (const T*)v, (const T*)cs, (const T*)sn, q_stride, k_stride,      \
                           v_stride, heads, kv_heads, dim, num_tokens, scale, window};                                \
        const Gradients<T> g{(const T*)out, (const T*)grad_out, lse, (T*)dq, (T*)dk, (T*)dv, dq_stride, dk_stride,    \
                             dv_stride};                                                                              \
        const Segment* segments = reinterpret_cast<const Segment*>(table);                                            \
        _Pragma("omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)")                        \
        for (int64_t task = 0; task < num_families * kv_heads; task++) {                                              \
            const int64_t family = task / kv_heads;                                                                   \
            family_grad(p, g, segments + ends[family], ends[family + 1] - ends[family], task % kv_heads);             \
        }                                                                                                              \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
