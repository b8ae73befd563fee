// The C interface that Python calls. The macros WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CTAS, SPLITS, TILE and STAGES
// are set by the compiler's command line.

#include "primitives.cuh"
#include "layers.cuh"

extern "C" int arguments_bytes() { return sizeof(Arguments); }
extern "C" int shared_bytes() { return sizeof(Shared); }
extern "C" const char* error_text(int code) { return cudaGetErrorString(cudaError_t(code)); }

extern "C" int launch(const Arguments* arguments, cudaStream_t stream) {
    cudaError_t error = cudaFuncSetAttribute(layers_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (error != cudaSuccess) return error;
    layers_kernel<<<CTAS, ALL_THREADS, sizeof(Shared), stream>>>(*arguments);
    return cudaGetLastError();
}
