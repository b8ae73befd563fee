// The functions that Python calls, with ctypes. Each returns a cudaError_t.
//
// Compiled with HEAD_DIM (32, 64, 96 or 128), BF16 (else float16), and the tiles: see lmkit/kernels/cuda/build.py.

#include "primitives.cuh"
#include "tiles.cuh"
#include "forward.cuh"
#include "backward.cuh"
#include "naive.cuh"

static int launch(void (*kernel)(Arguments), int64_t ctas, int threads, int bytes, const Arguments& a, cudaStream_t stream) {
    if (bytes > 48 * 1024) {  // more has to be asked for
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
    }
    kernel<<<static_cast<unsigned>(ctas), threads, bytes, stream>>>(a);
    return cudaGetLastError();
}

static int64_t tiles(int64_t length, int64_t size) { return (length + size - 1) / size; }

extern "C" {

int forward(const Arguments* a, cudaStream_t stream) {
    int64_t ctas = tiles(a->num_queries, Forward::ROWS) * a->batch * a->heads;
    return launch(forward_kernel, ctas, Forward::THREADS, Forward::BYTES, *a, stream);
}

int backward(const Arguments* a, cudaStream_t stream) {
    int64_t padded = tiles(a->num_queries, Backward::QUERIES) * Backward::QUERIES;
    int64_t lanes = padded * a->batch * a->heads * (HEAD_DIM % 64 == 0 ? 8 : 4);
    int error = launch(statistics_kernel, tiles(lanes, 256), 256, 0, *a, stream);
    if (error) return error;
    int64_t ctas = tiles(a->num_keys, Backward::KEYS) * a->batch * a->kv_heads;
    return launch(backward_kernel, ctas, Backward::LAUNCHED, Backward::BYTES, *a, stream);
}

int naive_forward(const Arguments* a, cudaStream_t stream) {
    return launch(naive_forward_kernel, tiles(int64_t(a->batch) * a->heads * a->num_queries, 128), 128, 0, *a, stream);
}

int naive_backward(const Arguments* a, cudaStream_t stream) {
    int error = launch(naive_dq_kernel, tiles(int64_t(a->batch) * a->heads * a->num_queries, 128), 128, 0, *a, stream);
    if (error) return error;
    return launch(naive_dkdv_kernel, tiles(int64_t(a->batch) * a->kv_heads * a->num_keys, 128), 128, 0, *a, stream);
}

int queries_of_a_tile() { return Backward::QUERIES; }

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
