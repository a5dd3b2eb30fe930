// Tiles of shared memory, swizzled by 128 bytes: how Hopper's copy engine brings them and its tensor cores read them.
// Behind cuda_device.h.

DEVICE int block_index_y() { return blockIdx.y; }
DEVICE int block_index_z() { return blockIdx.z; }
DEVICE int grid_size_x() { return gridDim.x; }
DEVICE int grid_size_y() { return gridDim.y; }

// --- kernels that overlap -----------------------------------------------------------------------------------------

DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- the copy engine ----------------------------------------------------------------------------------------------

struct alignas(64) TensorMap { char bytes[128]; };

DEVICE void fetch_tile(void* to, const TensorMap* map, int column, int row, mbarrier* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(b)) : "memory");
}
DEVICE void fetch_tiles(void* to, const TensorMap* map, int column, int row, int first, mbarrier* b) {  // one behind the other
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(first), "r"(shared_address(b)) : "memory");
}

// --- the tensor cores ---------------------------------------------------------------------------------------------

typedef unsigned long long tile_address;  // in steps of 16 bytes; rows of 128 bytes, eight behind the eight before
DEVICE tile_address tile_at(const void* p) {
  return (shared_address(p) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void begin_tiles() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_tiles() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int NUM>  // for all but the last so many; what four warps have multiplied together has been read by all of them then
DEVICE void await_tiles() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NUM) : "memory"); }
DEVICE void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }  // where it is: what is multiplied is written there
