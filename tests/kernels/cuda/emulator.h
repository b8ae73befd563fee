// The instructions of lmkit/kernels/cuda/primitives.cuh on a CPU: a thread of the GPU is a coroutine here.
//
// CTAs run one after the other, in order. Inside of a CTA a warp runs until all its threads wait at a barrier of the CTA.
// Copies arrive as late as they may. Warps run in ascending or descending order (`descending`), so that a missing
// barrier changes results. Reads of shared memory by ldmatrix count their bank conflicts.

#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// ---- threads

struct Copy { uint32_t to; const void* from; bool inside; };

struct Thread {
    ucontext_t begun;
    jmp_buf place;
    bool started = false, done = false;
    int index;
    std::vector<std::vector<Copy>> groups{{}};  // the last one is open
};

struct Barrier { int arrived = 0, turn = 0; };

struct Index { int x; };
static std::vector<Thread> threads;
static std::vector<Barrier> warps;
static Barrier cta;
static Thread* now;
static jmp_buf scheduler;
static Index blockIdx, blockDim;
static int64_t moves;  // starts of threads, and waits that ended
static bool descending;
static int64_t conflicts;
alignas(128) static char shared[1 << 18];
#define threadIdx (Index{now->index})

static void yield() {
    if (!_setjmp(now->place)) _longjmp(scheduler, 1);
}

static void wait_at(Barrier& barrier, int members, const std::function<void()>& last = [] {}) {
    int turn = barrier.turn;
    if (++barrier.arrived == members) {
        last();
        barrier.arrived = 0;
        barrier.turn++;
    }
    while (barrier.turn == turn) yield();
    moves++;
}

inline void __syncthreads() { wait_at(cta, int(threads.size())); }
static Barrier named[16];
template <int ID> void meet(int threads) { wait_at(named[ID], threads); }
template <int ID> void arrive(int threads) {
    if (++named[ID].arrived == threads) named[ID].arrived = 0, named[ID].turn++;
}
static Barrier& my_warp() { return warps[now->index / 32]; }
inline void __syncwarp() { wait_at(my_warp(), 32); }

static std::function<void()> body;
static void enter() {
    body();
    now->done = true;
    _longjmp(scheduler, 1);
}

template <typename Kernel, typename Arguments>
void run(Kernel kernel, int64_t ctas, int count, const Arguments& arguments) {
    static std::vector<std::vector<char>> stacks;
    if (int(stacks.size()) < count) stacks.resize(count, std::vector<char>(1 << 17));
    blockDim.x = count;
    body = [&] { kernel(arguments); };
    for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++) {
        std::memset(shared, 0xff, sizeof shared);  // NaN
        threads = std::vector<Thread>(count);
        warps.assign(count / 32, {});
        cta = {};
        for (int i = 0; i < count; i++) threads[i].index = i;
        int left = count;
        auto resume = [&](Thread& thread) {
            now = &thread;
            if (!_setjmp(scheduler)) {
                if (thread.started) _longjmp(thread.place, 1);
                thread.started = true;
                moves++;
                getcontext(&thread.begun);
                thread.begun.uc_stack.ss_sp = stacks[thread.index].data();
                thread.begun.uc_stack.ss_size = stacks[thread.index].size();
                makecontext(&thread.begun, enter, 0);
                setcontext(&thread.begun);
            }
            left -= now->done;
        };
        while (left)
            for (int i = 0; i < count / 32; i++) {
                int warp = descending ? count / 32 - 1 - i : i;
                int64_t before;
                do {
                    before = moves;
                    for (int lane = 0; lane < 32; lane++)
                        if (Thread& thread = threads[warp * 32 + lane]; !thread.done) resume(thread);
                } while (moves != before);
            }
    }
}

// ---- numbers

inline float infinity() { return INFINITY; }
inline float power_of_2(float x) { return exp2f(x); }

inline float wide(uint16_t bits) {
#if BF16
    return __uint_as_float(uint32_t(bits) << 16);
#else
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return x;
#endif
}

inline uint16_t narrow(float x) {
#if BF16
    uint32_t bits = as_bits(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    _Float16 y = x;
    uint16_t bits;
    std::memcpy(&bits, &y, 2);
    return bits;
#endif
}

inline uint32_t pack(float low, float high) { return narrow(low) | uint32_t(narrow(high)) << 16; }
inline float2 unpack(uint32_t bits) { return {wide(bits & 0xffff), wide(bits >> 16)}; }

// ---- memory

inline uint32_t shared_address(const void* pointer) { return static_cast<const char*>(pointer) - shared; }
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(shared + address, &value, 4); }
inline uint4 load_shared(uint32_t address) { uint4 x; std::memcpy(&x, shared + address, 16); return x; }
inline void copy_16_bytes(uint32_t to, const void* from, bool inside) { now->groups.back().push_back({to, from, inside}); }
inline void close_copies() { now->groups.push_back({}); }

template <int UNDER_WAY>
void wait_for_copies() {
    while (int(now->groups.size()) - 1 > UNDER_WAY) {
        for (const Copy& copy : now->groups.front()) {
            if (copy.inside) std::memcpy(shared + copy.to, copy.from, 16);
            else std::memset(shared + copy.to, 0, 16);
        }
        now->groups.erase(now->groups.begin());
    }
}

inline int atomicAdd(int* to, int x) { *to += x; return *to - x; }
inline void wait_for_flag(const int* flag, int value) { if (*flag < value) abort(); }  // no CTA runs that could raise it
inline void raise_flag(int* flag, int value) { *flag = value; }
inline float4 load_from_all(const float4* from) { return *from; }
inline void keep_24_registers() {}
inline void take_240_registers() {}
inline void store_for_all(float4* to, float4 x) { *to = x; }
inline void add_for_all(float4* to, float4 x) { *to = {to->x + x.x, to->y + x.y, to->z + x.z, to->w + x.w}; }

// ---- warps. Lanes leave what they bring in a slot; the last one computes for all.

struct Slot { uint32_t address, a[4], b[2]; float sum[4]; uint32_t result[4]; };
static Slot slots[1024];
static Slot* warp_slots() { return slots + now->index / 32 * 32; }
static Slot& mine() { return slots[now->index]; }

static void exchange(const std::function<void(Slot*)>& compute) {
    Slot* of_warp = warp_slots();
    wait_at(my_warp(), 32, [&] { compute(of_warp); });
}

static void read_any(uint32_t (&x)[4], uint32_t address, bool transposed) {
    mine().address = address;
    exchange([&](Slot* lanes) {
        for (int matrix = 0; matrix < 4; matrix++) {
            int groups = 0;
            for (int row = 0; row < 8; row++) groups |= 1 << lanes[matrix * 8 + row].address / 16 % 8;
            conflicts += groups != 0xff;
            for (int lane = 0; lane < 32; lane++) {
                uint16_t pair[2];
                for (int i = 0; i < 2; i++) {
                    int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
                    std::memcpy(pair + i, shared + lanes[matrix * 8 + row].address + column * 2, 2);
                }
                std::memcpy(&lanes[lane].result[matrix], pair, 4);
            }
        }
    });
    std::copy(mine().result, mine().result + 4, x);
}

inline void read_matrices(uint32_t (&x)[4], uint32_t address) { read_any(x, address, false); }
inline void read_transposed(uint32_t (&x)[4], uint32_t address) { read_any(x, address, true); }

inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    std::copy(a, a + 4, mine().a);
    mine().b[0] = b0, mine().b[1] = b1;
    std::copy(sum, sum + 4, mine().sum);
    exchange([](Slot* lanes) {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                int g = lane / 4, t = lane % 4 * 2 + i;
                for (int part = 0; part < 4; part++)
                    left[g + part % 2 * 8][t + part / 2 * 8] = wide(lanes[lane].a[part] >> 16 * i & 0xffff);
                for (int part = 0; part < 2; part++) right[t + part * 8][g] = wide(lanes[lane].b[part] >> 16 * i & 0xffff);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                for (int j = 0; j < 16; j++) lanes[lane].sum[i] += left[row][j] * right[j][column];
            }
    });
    std::copy(mine().sum, mine().sum + 4, sum);
}

inline float from_lane_xor(float x, int mask) {
    mine().sum[0] = x;
    exchange([&](Slot* lanes) {
        for (int lane = 0; lane < 32; lane++) lanes[lane].sum[1] = lanes[lane ^ mask].sum[0];
    });
    return mine().sum[1];
}

inline bool any_lane(bool x) {
    mine().address = x;
    exchange([](Slot* lanes) {
        uint32_t any = 0;
        for (int lane = 0; lane < 32; lane++) any |= lanes[lane].address;
        for (int lane = 0; lane < 32; lane++) lanes[lane].result[0] = any;
    });
    return mine().result[0];
}
