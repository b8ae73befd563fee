// The instructions that the kernel is made of. Everything that is written in PTX is in this file, so that a test can
// replace it and run the kernel on a CPU.

#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char shared[];
    return shared;
}

DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// ---- numbers

DEVICE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE uint32_t bits(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
DEVICE float rounded(float x) { return low(bits(x)); }
DEVICE float power_of_2(float x) { return exp2f(x); }
DEVICE float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// ---- words that other SMs write: read and written past the first-level cache, in one piece

DEVICE uint4 look(const uint4* at) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}
DEVICE uint64_t look(const uint64_t* at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
DEVICE void tell(uint32_t* at, uint32_t x) { asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
DEVICE void tell(uint64_t* at, uint64_t x) { asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(x) : "memory"); }
DEVICE void look_again() {}

// ---- the ring: bulk copies into shared memory, and barriers that count their bytes

DEVICE void make_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @done bra over;\n bra again;\n over:\n}"
        ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}
// Arrive, and let the barrier wait for this many bytes more.
DEVICE void expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE void copy_in(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// ---- tensor cores

// Add the product of a (16, 16) and b (16, 8). With g = lane / 4 and t = 2 (lane % 4), a lane holds of a the columns
// t, t + 1 of row g (`a0`), of row g + 8 (`a1`), and the columns t + 8, t + 9 of both (`a2`, `a3`); of b the same rows
// of column g; of the sum row g at columns t and t + 1, then row g + 8.
DEVICE void multiply_add(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- threads

DEVICE void meet(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
DEVICE void let_the_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// All four warps of a group take registers that another group leaves.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
