// The names of rill/models/ops/cuda_device.h on a processor: every thread of a launch is a context of its own, and runs
// until it has to wait for others. What threads do at one time on a device they do here in turns; but in every order but 0
// warps fall asleep for a while, at random, so that others get as far ahead of them as they can, and a wait that is
// missing shows.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

typedef unsigned short bf16;
typedef unsigned int word;
struct uint2 { word x, y; };
struct alignas(16) uint4 { word x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(word x, word y) { return {x, y}; }
static uint4 make_uint4(word x, word y, word z, word w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct mbarrier {
  signed char expected, pending;
  bool phase;
  int bytes;
  void settle() {
    if (pending == 0 && bytes == 0) pending = expected, phase = !phase;
  }
};
static_assert(sizeof(mbarrier) == 8);

struct Warp { int arrived = 0, turn = 0; word in[32][10], out[32][10]; };
struct Meeting { int arrived = 0, turn = 0; };
struct Block { std::vector<char> memory; std::map<int, Meeting> meetings; std::vector<Warp> warps; };
struct Thread { ucontext_t context; std::vector<char> stack; int block, index; bool is_done = false; std::function<bool()> ready; std::vector<std::pair<void*, const void*>> copies; };

static std::vector<Thread> threads;
static std::vector<Block> blocks;
static std::map<int, Meeting> cluster_meetings;
static Thread* current;
static ucontext_t scheduler;
static int cluster_size, threads_per_block;
static bool has_moved;

static void give_way() { swapcontext(&current->context, &scheduler); }
template <class F> static void wait_until(F is_true) {
  if (!is_true()) {
    current->ready = is_true;  // looked at from outside: to come back and find that it is not so yet takes long
    give_way();
    current->ready = nullptr;
  }
  has_moved = true;
}

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define CONSTANT
#define CLUSTER_KERNEL(cluster, threads) static constexpr int CLUSTER_SIZE = cluster, BLOCK_THREADS = threads; static void
#define KERNEL(threads, blocks) CLUSTER_KERNEL(1, threads)

DEVICE int thread_index() { return current->index; }
DEVICE int block_index() { return current->block; }
DEVICE Block& mine() { return blocks[current->block]; }
DEVICE char* shared_memory() { return (char*)(((size_t)mine().memory.data() + 127) / 128 * 128); }

DEVICE void meet(Meeting& m, int count) {
  int turn = m.turn;
  if (++m.arrived == count) m.arrived = 0, ++m.turn;
  wait_until([&] { return m.turn != turn; });
}
DEVICE void pause() { give_way(); }
DEVICE void sync_threads(int barrier, int count) { meet(mine().meetings[barrier], count); }
DEVICE void sync_cluster() { meet(cluster_meetings[current->block / cluster_size], cluster_size * threads_per_block); }

// Every lane gives some words, one lane computes what all get.
template <class F> static void together(word* words, int count, F compute) {
  Warp& w = mine().warps[current->index / 32];
  int lane = current->index % 32, turn = w.turn;
  memcpy(w.in[lane], words, 4 * count);
  if (++w.arrived == 32) {
    compute(w.in, w.out);
    w.arrived = 0;
    ++w.turn;
  }
  wait_until([&] { return w.turn != turn; });
  memcpy(words, w.out[lane], 4 * count);
}
DEVICE void sync_warp() { word none = 0; together(&none, 0, [](auto, auto) {}); }
static word bits(float x) { word w; memcpy(&w, &x, 4); return w; }
static float number(word w) { float x; memcpy(&x, &w, 4); return x; }
DEVICE float shuffle_xor(float x, int mask) {
  word w = bits(x);
  together(&w, 1, [&](word (*in)[10], word (*out)[10]) { for (int i = 0; i < 32; ++i) out[i][0] = in[i ^ mask][0]; });
  return number(w);
}
DEVICE int shuffle(int x, int lane) {
  word w[2] = {(word)x, (word)lane};
  together(w, 2, [](word (*in)[10], word (*out)[10]) { for (int i = 0; i < 32; ++i) out[i][0] = in[in[i][1]][0]; });
  return w[0];
}
DEVICE word lanes_where(bool x) {
  word w = x;
  together(&w, 1, [](word (*in)[10], word (*out)[10]) {
    word all = 0;
    for (int i = 0; i < 32; ++i) all |= in[i][0] << i;
    for (int i = 0; i < 32; ++i) out[i][0] = all;
  });
  return w;
}

DEVICE void init_barrier(mbarrier* b, int count) { *b = {(signed char)count, (signed char)count, false, 0}; }
DEVICE void barriers_are_made() {}
DEVICE void arrive(mbarrier* b) { --b->pending, b->settle(); }
DEVICE void arrive_expecting(mbarrier* b, int bytes) { b->bytes += bytes, arrive(b); }
static void check_aligned(const void* p, int to) { if ((size_t)p % to) fprintf(stderr, "an address is not aligned to %d\n", to), abort(); }
// Copies are made when somebody is told of them, which is as late as they may come.
DEVICE void arrive_with_copies(mbarrier* b) {
  give_way();
  for (auto [to, from] : current->copies) memcpy(to, from, 16);
  current->copies.clear();
  arrive(b);
}
DEVICE void await(mbarrier* b, word parity) { wait_until([&] { return b->phase != (bool)parity; }); }

typedef int policy;
DEVICE policy read_once() { return 0; }
DEVICE void copy_16(void* to, const void* from, policy) { check_aligned(to, 16), check_aligned(from, 16), current->copies.push_back({to, from}); }
DEVICE void await_copies() {}
DEVICE void ask_for(const void* line) { (void)*(volatile const char*)line; }
DEVICE uint4 load_16(const void* from) { check_aligned(from, 16); uint4 x; memcpy(&x, from, 16); return x; }
DEVICE float load_float(const float* from) { return *from; }
DEVICE bf16 load_2(const bf16* from) { return *from; }
DEVICE void count_up(word* counter) { ++*counter; has_moved = true; }
DEVICE word count_of(const word* counter) { return *counter; }
DEVICE word count_and_get(word* counter) { return (*counter)++; }
template <class T> static T* at_rank(T* p, int rank) {
  Block& there = blocks[current->block / cluster_size * cluster_size + rank];
  char* base = (char*)(((size_t)there.memory.data() + 127) / 128 * 128);
  return (T*)(base + ((char*)p - shared_memory()));
}
DEVICE void push(float4* to, int rank, float4 x, mbarrier* b) {
  check_aligned(to, 16);
  *at_rank(to, rank) = x;
  mbarrier* there = at_rank(b, rank);
  there->bytes -= 16, there->settle();
}

static word rounded_bits(float x) {  // to bf16, the nearest, ties to even
  word w = bits(x);
  if (x != x) return 0x7fff;
  return (w + 0x7fff + (w >> 16 & 1)) >> 16;
}
static float widened(word half) { return number(half << 16); }
DEVICE void multiply_add(float4& sums, uint4 a, uint2 b) {
  word w[10] = {a.x, a.y, a.z, a.w, b.x, b.y, bits(sums.x), bits(sums.y), bits(sums.z), bits(sums.w)};
  together(w, 10, [](word (*in)[10], word (*out)[10]) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      int g = lane / 4, t = lane % 4;
      for (int e = 0; e < 2; ++e) {
        auto half = [&](int i) { return widened(e ? in[lane][i] >> 16 : in[lane][i] & 0xffff); };
        left[g][2 * t + e] = half(0), left[g + 8][2 * t + e] = half(1);
        left[g][2 * t + 8 + e] = half(2), left[g + 8][2 * t + 8 + e] = half(3);
        right[2 * t + e][g] = half(4), right[2 * t + 8 + e][g] = half(5);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = number(in[lane][6 + i]);
        for (int k = 0; k < 16; ++k) sum += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
        out[lane][i] = bits(sum);
      }
    }
  });
  sums = {number(w[0]), number(w[1]), number(w[2]), number(w[3])};
}
DEVICE word transposed(word x) {
  together(&x, 1, [](word (*in)[10], word (*out)[10]) {
    for (int lane = 0; lane < 32; ++lane) {
      int g = lane / 4, t = lane % 4;
      word half[2];
      for (int e = 0; e < 2; ++e) half[e] = in[(2 * t + e) * 4 + g / 2][0] >> g % 2 * 16 & 0xffff;
      out[lane][0] = half[0] | half[1] << 16;
    }
  });
  return x;
}
DEVICE word packed(float low, float high) { return rounded_bits(low) | rounded_bits(high) << 16; }
DEVICE float low_of(word both) { return number(both << 16); }
DEVICE float high_of(word both) { return number(both & 0xffff0000u); }
DEVICE float as_float(word x) { return number(x); }
DEVICE word times(word a, word b) { return packed(low_of(a) * low_of(b), high_of(a) * high_of(b)); }
DEVICE word plus(word a, word b) { return packed(low_of(a) + low_of(b), high_of(a) + high_of(b)); }
DEVICE word minus(word a, word b) { return packed(low_of(a) - low_of(b), high_of(a) - high_of(b)); }
DEVICE word lows_of(word a, word b) { return (a & 0xffff) | b << 16; }
DEVICE word highs_of(word a, word b) { return a >> 16 | (b & 0xffff0000u); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float quotient(float x, float y) { return x / y; }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE float root(float x) { return sqrtf(x); }

static std::function<void()> entry;
static void run_thread() {
  entry();
  current->is_done = true;
  has_moved = true;
  give_way();
}

// 0: every thread came to its end; 1: all wait, and for nothing that comes.
static int launch(int num_blocks, int num_threads, int cluster, int memory_bytes, int order, std::function<void()> kernel) {
  entry = kernel, cluster_size = cluster, threads_per_block = num_threads;
  threads.clear(), blocks.clear(), cluster_meetings.clear();
  blocks.resize(num_blocks);
  for (Block& block : blocks) {
    block.memory.assign(memory_bytes + 128, (char)0xff);  // NaNs
    block.warps.resize(num_threads / 32);
  }
  threads.resize(num_blocks * num_threads);
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& t = threads[i];
    t.block = i / num_threads, t.index = i % num_threads;
    t.stack.resize(64 << 10);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size(), t.context.uc_link = nullptr;
    makecontext(&t.context, run_thread, 0);
  }
  srand(order);
  std::vector<bool> sleeps(threads.size() / 32);
  size_t left = threads.size();
  for (int round = 0, idle = 0; left > 0; ++round) {
    if (order && round % 32 == 0)
      for (size_t warp = 0; warp < sleeps.size(); ++warp) sleeps[warp] = rand() % 4 == 0;
    has_moved = false;
    for (size_t i = 0; i < threads.size(); ++i) {
      if (threads[i].is_done || sleeps[i / 32]) continue;
      current = &threads[i];
      if (current->ready && !current->ready()) continue;
      swapcontext(&scheduler, &current->context);
      if (threads[i].is_done) --left;
    }
    idle = has_moved ? 0 : idle + 1;
    if (idle > 1000) return 1;
  }
  return 0;
}
