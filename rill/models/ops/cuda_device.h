// What kernels in CUDA C++ ask of a Hopper device, one instruction each, and the numbers they work with. No other
// header is included, so that NVRTC needs none. Tests put a processor's threads behind the same names.

typedef unsigned short bf16;
typedef unsigned int word;
typedef unsigned long long mbarrier;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define CONSTANT __grid_constant__
#define CLUSTER_KERNEL(cluster, threads) extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)  // so many to a multiprocessor

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
DEVICE word shared_address(const void* p) { return (word)__cvta_generic_to_shared(p); }

// --- threads of a warp, a block, a cluster ------------------------------------------------------------------------

DEVICE void pause() {}  // of somebody who looks again and again
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE word lanes_where(bool x) { return __ballot_sync(~0u, x); }
DEVICE void sync_threads(int barrier, int count) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory"); }
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- barriers in shared memory ------------------------------------------------------------------------------------

DEVICE void init_barrier(mbarrier* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
DEVICE void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(mbarrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void arrive_expecting(mbarrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Arrives when all that this thread has asked for by copy_16() is there.
DEVICE void arrive_with_copies(mbarrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void await(mbarrier* b, word parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// --- memory -------------------------------------------------------------------------------------------------------

typedef unsigned long long policy;  // of the second cache
DEVICE policy read_once() {
  policy p;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
DEVICE void copy_16(void* to, const void* from, policy p) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "l"(p) : "memory");
}
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // of this thread
DEVICE void ask_for(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
// Past the first cache, which does not see what other multiprocessors write.
DEVICE uint4 load_16(const void* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}
DEVICE float load_float(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
DEVICE bf16 load_2(const bf16* from) {
  bf16 x;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
  return x;
}
DEVICE void count_up(word* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE word count_of(const word* counter) {
  word x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
DEVICE word count_and_get(word* counter) { return atomicAdd(counter, 1); }

// Into another block's shared memory, at the address that `to` has in this one's; its barrier counts the bytes.
DEVICE word at_rank(const void* p, int rank) {
  word there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}
DEVICE void push(float4* to, int rank, float4 x, mbarrier* b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at_rank(to, rank)),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(at_rank(b, rank)) : "memory");
}

// --- arithmetic ---------------------------------------------------------------------------------------------------

// sums += a · b of bf16: 16 × 16 by 16 × 8, spread over a warp. Lane 4g + t holds of a rows g (x, z) and g + 8 (y, w), of
// b column g, of sums rows g (x, y) and g + 8 (z, w) in columns 2t and 2t + 1.
DEVICE void multiply_add(float4& sums, uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
// Of 8 × 8 bf16: lane 4g + t gives row g, columns 2t and 2t + 1, and gets column g, rows 2t and 2t + 1.
DEVICE word transposed(word x) {
  word y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
DEVICE word packed(float low, float high) {  // two bf16, rounded to the nearest
  word both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
DEVICE float low_of(word both) { return __uint_as_float(both << 16); }
DEVICE float high_of(word both) { return __uint_as_float(both & 0xffff0000u); }
DEVICE float as_float(word x) { return __uint_as_float(x); }
DEVICE word times(word a, word b) {  // of both, rounded
  word c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEVICE word plus(word a, word b) {
  word c;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEVICE word minus(word a, word b) {
  word c;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEVICE word lows_of(word a, word b) { return __byte_perm(a, b, 0x5410); }
DEVICE word highs_of(word a, word b) { return __byte_perm(a, b, 0x7632); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float quotient(float x, float y) { return __fdividef(x, y); }  // 0 where y is infinite
DEVICE float logarithm(float x) { return __logf(x); }
DEVICE float root(float x) { return __fsqrt_rn(x); }
