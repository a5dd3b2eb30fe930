// All layers of a decode step of few rows in one launch that never lets go of the device.
//
//     feeders  weights of layer 0, 1, 2 … ──► rings in shared memory (as far ahead as there is room)
//     workers  norm, qkv │ attend │ join, out, + │ norm, gate_up, act │ down, + │ next layer
//                        ▲ every block waits here until all have come so far
//
// A step of few rows costs what reading the weights costs. Which weights come next is known long before what they are
// multiplied with, so reading them never waits for anything but room: not for a launch, not for another multiprocessor.
//
// There is one block to a multiprocessor, in clusters of four. Of qkv and gate_up a block makes whole outputs from all
// inputs; of out and down a cluster does, each block of it from a quarter of them. A block's inputs are divided among its
// eight warps, which hold theirs (x) in registers; what they make of a tile, 16 rows of a weight, is added up in one
// order, whatever comes first. In the matrix instructions tiles are the left side and eight rows of x the right one.
//
// Constants come from rill.models.decode.one_launch. Before this stand cuda_device.h, cuda_scores.h, cuda_step.cu and
// cuda_attend.cu.

// Small things of a layer, on their way to the second cache long before: each block asks for one line.
DEVICE void ask_for_numbers(const Layer& l) {
  constexpr int NORM = SIZE / 64, BIAS = QKV / 64;
  for (int line = block_index(); line < 2 * NORM + BIAS; line += BLOCKS) {
    if (line < 2 * NORM) {
      ask_for(line < NORM ? l.norm + line * 64 : l.mlp_norm + (line - NORM) * 64);
    } else if (l.qkv_bias) {
      ask_for(l.qkv_bias + (line - 2 * NORM) * 64);
    }
  }
}

DEVICE void feed(const Step& s, const Memory& m, int feeder, int lane) {
  Ring ring = ring_of(m, feeder * 2);
  policy keep = read_once();
#pragma unroll 1
  for (int half = 0; half < 2 * s.num_layers; ++half) {
    const Layer& l = s.layers[half / 2];
    bool is_mlp = half % 2;
    if (!is_mlp && feeder == 0) ask_for_cache(s, l, m.plan, lane);
    if (!is_mlp && feeder == 1 && half / 2 + 1 < s.num_layers && lane == 0) ask_for_numbers(s.layers[half / 2 + 1]);
    fetch(normed_part(l, is_mlp), [&](int tile) { return normed_start(is_mlp, tile); }, ring, feeder, lane, keep);
    fetch(onto_part(l, is_mlp), [](int tile) { return onto_start() + tile * 16; }, ring, feeder, lane, keep);
  }
  await_copies();
}

DEVICE void work(const Step& s, const Memory& m, int thread) {
  int warp = thread / 32, lane = thread % 32;
  Ring ring = ring_of(m, warp);
  Grid grid = {s.counters, 0};
  word turn = 0;
#pragma unroll 1
  for (int half = 0; half < 2 * s.num_layers; ++half) {
    const Layer& l = s.layers[half / 2];
    bool is_mlp = half % 2;

    Part part = normed_part(l, is_mlp);
    Inputs normed(part, warp);
    load_normed(s, is_mlp ? l.mlp_norm : l.norm, normed, m, grid, warp, lane);
#pragma unroll 1
    for (int from = 0; from < part.tiles; from += MAX_TILES) {
      int to = from + MAX_TILES < part.tiles ? from + MAX_TILES : part.tiles;
      multiply(part, from, to, normed, m, ring, warp, lane);
      workers_meet();
      leave(s, l, is_mlp, from, to, m, thread);
      if (to < part.tiles) workers_meet();
    }
    grid.arrive_all(thread);

    if (!is_mlp) {
      grid.wait(thread);
      attend(s, l, m, turn, thread);
      grid.arrive_all(thread);
    }

    part = onto_part(l, is_mlp);
    Inputs inputs(part, warp);
    grid.wait(thread);
    if (is_mlp) {
      inputs.load<stripes_of_warp(DOWN_QUARTER)>(
          s.rows, lane, [&](int row, int column) { return load_16(s.inner + row * INNER + column); });
    } else {
      load_attended(s, part, inputs, m, thread);
    }
    multiply(part, 0, part.tiles, inputs, m, ring, warp, lane);
    workers_meet();
    add_to_hidden(s, part, m, turn, thread);
    if (half + 1 < 2 * s.num_layers) grid.arrive_all(thread);
  }
  // Whoever leaves last has seen all others pass their last wait.
  if (thread == 0 && count_and_get(s.counters + 1) == BLOCKS - 1) s.counters[0] = s.counters[1] = 0;
}

CLUSTER_KERNEL(CLUSTER, 32 * (WARPS + FEEDERS)) layers(const CONSTANT Step s) {
  Memory m = memory_of(shared_memory());
  int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
#pragma unroll 1
    for (int slot = 0; slot < WARPS * SLOTS; ++slot) {
      init_barrier(&m.full[slot], 32);
      init_barrier(&m.empty[slot], 1);
    }
    init_barrier(m.arrived, 1);
    barriers_are_made();
  }
  if (warp == 1) make_plan(s, m.plan, lane);
  sync_cluster();
  if (warp < WARPS) {
    work(s, m, thread);
  } else {
    feed(s, m, warp - WARPS, lane);
  }
}
