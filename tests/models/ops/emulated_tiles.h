// The names of rill/models/ops/cuda_tiles.h on a processor, as emulated_device.h has those of cuda_device.h: tiles come at
// once, which is as early as they may, and are read when somebody waits for what comes of them, which is as late.

#include "emulated_device.h"

static int grid_x, grid_y;
#define block_index() (current->block % grid_x)
DEVICE int block_index_y() { return current->block / grid_x % grid_y; }
DEVICE int block_index_z() { return current->block / grid_x / grid_y; }
DEVICE int grid_size_x() { return grid_x; }
DEVICE int grid_size_y() { return grid_y; }
DEVICE word shared_address(const void* p) { return (word)(size_t)p; }

// What the kernel before writes is there when somebody has waited for it.
static std::function<void()> kernel_before;
DEVICE void let_next_kernel_begin() {}
DEVICE void await_kernel_before() {
  for (int i = 0; i < 20; ++i) give_way();
  if (kernel_before) kernel_before();
  kernel_before = nullptr;
  has_moved = true;
}

struct alignas(64) TensorMap { const bf16* data; int sizes[3], strides[3], box[3]; char rest[84]; };
static_assert(sizeof(TensorMap) == 128);

static size_t swizzled(size_t address) { return address ^ (address / 128 % 8 * 16); }
DEVICE void fetch_tiles(void* to, const TensorMap* map, int column, int row, int first, mbarrier* b) {
  check_aligned(to, 1024);
  size_t at = (size_t)to;
  for (int k = 0; k < map->box[2]; ++k)
    for (int j = 0; j < map->box[1]; ++j)
      for (int i = 0; i < map->box[0]; ++i, at += 2) {
        bool is_inside = column + i < map->sizes[0] && row + j < map->sizes[1] && first + k < map->sizes[2];
        size_t from = column + i + (size_t)(row + j) * map->strides[1] + (size_t)(first + k) * map->strides[2];
        *(bf16*)swizzled(at) = is_inside ? map->data[from] : 0;
      }
  b->bytes -= at - (size_t)to, b->settle();
  has_moved = true;
}
DEVICE void fetch_tile(void* to, const TensorMap* map, int column, int row, mbarrier* b) { fetch_tiles(to, map, column, row, 0, b); }

typedef size_t tile_address;
struct Multiplied { float* sums; int num; tile_address a, b; };
static std::map<Thread*, std::vector<std::vector<Multiplied>>> multiplied;  // closed groups, and behind them the open one
DEVICE tile_address tile_at(const void* p) { check_aligned(p, 1024); return (size_t)p / 16; }
DEVICE void begin_tiles() { if (multiplied[current].empty()) multiplied[current].emplace_back(); }
DEVICE void end_tiles() { multiplied[current].emplace_back(); }
template <int NUM> static void multiply_tiles(float (&sums)[NUM], tile_address a, tile_address b) {
  multiplied[current].back().push_back({sums, NUM, a, b});
}
DEVICE float of_tile(tile_address tile, int row, int k) { return widened(*(const bf16*)swizzled(tile * 16 + row * 128 + k * 2)); }
template <int NUM> static void await_tiles() {
  auto& groups = multiplied[current];
  int lane = current->index % 32, row = current->index / 32 % 4 * 16 + lane / 4;
  for (; groups.size() > NUM + 1; groups.erase(groups.begin()))
    for (Multiplied& m : groups.front())
      for (int i = 0; i < m.num; ++i)
        for (int k = 0; k < 16; ++k)
          m.sums[i] += of_tile(m.a, row + i / 2 % 2 * 8, k) * of_tile(m.b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
  meet(mine().meetings[100 + current->index / 128], 128);  // four warps multiply together
}
DEVICE void hold(float&) {}
