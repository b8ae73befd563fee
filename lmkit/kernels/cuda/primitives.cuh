// The instructions that the kernels are made of: 16-bit numbers, copies into shared memory, ldmatrix, mma, flags.
//
// The kernels above know a number as 16 bits and a pair as 32. BF16 says which numbers these are. Everything that is
// written in PTX is in this file, so that a test can replace it and run the kernels on a CPU.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Round two numbers to 16 bits: `low` becomes the lower half, the earlier column of a row.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float2 unpack(uint32_t bits) {
#if BF16
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&bits));
#else
    return __half22float2(*reinterpret_cast<__half2*>(&bits));
#endif
}

// ---- shared memory. Addresses in it are 32 bits: what ldmatrix and cp.async take.

extern __shared__ __align__(128) char shared[];  // as many bytes as the launch asks for

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// Copy 16 bytes from global memory, or write zeros. From sm_80 on the thread does not wait for the copy.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    uint4 x = inside ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
#endif
}

// Close the group of copies that this thread began.
__device__ __forceinline__ void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `UNDER_WAY` groups of this thread are under way.
template <int UNDER_WAY>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
#endif
}

// ---- tensor cores

// Read four 8 x 8 matrices. Lane i names the address of row i % 8 of matrix i / 8; it gets, of each matrix, the two
// numbers in row i / 4 at columns 2 (i % 4) and 2 (i % 4) + 1.
__device__ __forceinline__ void read_matrices(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void read_transposed(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

// Add the product of a (16, 16) and b (16, 8) to sum (16, 8). With g = lane / 4 and t = 2 (lane % 4), a lane holds
//   a:   rows g, g + 8, g, g + 8 at columns t, t, t + 8, t + 8, and the next column
//   b:   rows t and t + 8, and the next row, of column g
//   sum: row g at columns t and t + 1, then row g + 8
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif !BF16
    // sm_75 multiplies half as many columns of a at a time.
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// ---- between the lanes of a warp, and between CTAs

__device__ __forceinline__ float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

#if BACKWARD_HELPERS
// Give registers back, and take more than the launch gave: each 128 threads together.
__device__ __forceinline__ void keep_24_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
__device__ __forceinline__ void take_240_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
#endif

// Meet `threads` threads at a barrier; or tell them that this one has come, and go on.
template <int ID>
__device__ __forceinline__ void meet(int threads) { asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory"); }

template <int ID>
__device__ __forceinline__ void arrive(int threads) { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "r"(threads) : "memory"); }

// Wait until `*flag` is at least `value`; what the thread that wrote it had written before is visible then.
__device__ __forceinline__ void wait_for_flag(const int* flag, int value) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    } while (found < value);
}

__device__ __forceinline__ void raise_flag(int* flag, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Read and write past the first-level cache, which does not see what other SMs write.
__device__ __forceinline__ float4 load_from_all(const float4* from) { return __ldcg(from); }
__device__ __forceinline__ void store_for_all(float4* to, float4 x) { __stcg(to, x); }

// Add to a sum that only the CTA whose turn it is writes. From sm_90 on the thread does not wait for the sum.
__device__ __forceinline__ void add_for_all(float4* to, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
    float4 y = __ldcg(to);
    __stcg(to, make_float4(y.x + x.x, y.y + x.y, y.z + x.z, y.w + x.w));
#endif
}
