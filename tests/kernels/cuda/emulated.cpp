// The kernels on a CPU, behind the functions of lmkit/kernels/cuda/flash.cu.

#include "emulator.h"

#include "tiles.cuh"
#include "forward.cuh"
#include "backward.cuh"
#include "naive.cuh"

static int64_t tiles(int64_t length, int64_t size) { return (length + size - 1) / size; }
static int64_t rows(const Arguments* a) { return int64_t(a->batch) * a->heads; }

extern "C" {

int forward(const Arguments* a, void*) {
    run(forward_kernel, tiles(a->num_queries, Forward::ROWS) * rows(a), Forward::THREADS, *a);
    return Forward::BYTES > int(sizeof shared);
}

int backward(const Arguments* a, void*) {
    int64_t padded = tiles(a->num_queries, Backward::QUERIES) * Backward::QUERIES;
    run(statistics_kernel, tiles(padded * rows(a) * (HEAD_DIM % 64 == 0 ? 8 : 4), 256), 256, *a);
    run(backward_kernel, tiles(a->num_keys, Backward::KEYS) * a->batch * a->kv_heads, Backward::LAUNCHED, *a);
    return Backward::BYTES > int(sizeof shared);
}

int naive_forward(const Arguments* a, void*) {
    run(naive_forward_kernel, tiles(rows(a) * a->num_queries, 128), 128, *a);
    return 0;
}

int naive_backward(const Arguments* a, void*) {
    run(naive_dq_kernel, tiles(rows(a) * a->num_queries, 128), 128, *a);
    run(naive_dkdv_kernel, tiles(int64_t(a->batch) * a->kv_heads * a->num_keys, 128), 128, *a);
    return 0;
}

int queries_of_a_tile() { return Backward::QUERIES; }
const char* error_text(int) { return "shared memory is too small"; }

void set_descending(bool x) { descending = x; }
int64_t take_conflicts() { return std::exchange(conflicts, 0); }
}
